"""Threads that call one module at once, on the CPU, and on a GPU or Triton's interpreter (--device): jobs of
calls of one shape lie in the same memory."""

import threading
from typing import Any

import pytest
import tables as devices
import torch
from module_tables import ROWS

from tableside.torch import EmbeddingBags

pytest.importorskip("triton")
THREADS, CALLS = 4, 12
NAMES = ["user_sum", "page_sum"]


def given(seed: int, call: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + call)
    ids = torch.randint(0, ROWS, (2, 3, 5), generator=generator)
    where = "cpu" if devices.DEVICE == "interpreter" else devices.DEVICE
    return dict(zip(NAMES, ids.to(where), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.drawn(0.5)
def test_each_thread_gets_its_own_vectors(model: str, on_device: bool) -> None:
    host = EmbeddingBags("ads", NAMES, root=model)
    options: dict[str, Any] = {"device": devices.DEVICE} if on_device else {}
    module = EmbeddingBags("ads", NAMES, root=model, **options)
    where = torch.device(devices.DEVICE if on_device and devices.DEVICE != "interpreter" else "cpu")
    calls = {
        (t, n): {k: v.to(where) for k, v in given(t, n).items()} for t in range(THREADS) for n in range(CALLS)
    }
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def call(thread: int) -> None:
        for n in range(CALLS):
            found[thread, n] = module(calls[thread, n])

    threads = [threading.Thread(target=call, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    module.check()
    assert len(found) == THREADS * CALLS
    for key, vectors in found.items():
        for name, expected in host({k: v.cpu() for k, v in calls[key].items()}).items():
            torch.testing.assert_close(vectors[name].cpu(), expected, rtol=0, atol=5 * 200 * 2.0**-24)
