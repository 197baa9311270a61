"""Triton's interpreter looks for functions of its language to replace once a launch, and takes back what
it replaced."""

from typing import Any

import pytest
import tables
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402  (after the check that it is there)

pytestmark = pytest.mark.skipif("os.environ.get('TRITON_INTERPRET') != '1'", reason="this machine has a GPU")


@triton.jit
def doubled(x):
    return tl.where(x > 0, 2 * x, x)


@triton.jit
def sums(out, CALLS: tl.constexpr, BLOCK: tl.constexpr):
    """Calls functions of its own module, and of Triton's, whose module sees the language by another name."""
    at = tl.arange(0, BLOCK)
    for _ in range(CALLS):
        at = doubled(at)
    tl.store(out + tl.arange(0, BLOCK), at + tl.sum(doubled(at), 0))


def test_a_launch_replaces_functions_once_however_many_calls_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch replaces them again; between launches the language is Triton's own."""
    from triton.runtime import interpreter

    tables.gpu_backend()
    seen: list[Any] = []
    replace = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda package, *rest: (seen.append(package), replace(package, *rest))
    )
    load, replaced = tl.load, []
    for calls in (1, 1, 5):  # the first also makes the functions' interpreted forms
        out = torch.zeros(4, dtype=torch.int32)
        sums[(1,)](out, CALLS=calls, BLOCK=4)
        assert out.tolist() == [2**calls * (n + 2 * 6) for n in range(4)]
        assert tl.load is load
        replaced.append(len(seen) - sum(replaced))
    assert replaced[1] == replaced[2] > 0
