"""Checks of operator calls whose kernels do not check their arguments.

A check gets the arguments by name, with defaults, and raises ValueError. It runs on real tensors and on
`measure`'s shapes. Three kinds: sizes that a kernel trusts (a batch norm reads a statistic per channel),
fatal arithmetic (the least integer divided by -1 is SIGFPE), and results sized by a number in the program.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

Arguments = Mapping[str, Any]
Check = Callable[[Arguments, int], None]  # the arguments, and the most bytes that one result may take

_MOST_PIECES = 4096
_MOST_TRIANGLE = 1 << 14  # rows and columns of tril_indices, whose kernel multiplies them unchecked
_INDICES = (torch.int64, torch.int32)


def _expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)


# ---- sizes that kernels trust ----


def _batch_norm(a: Arguments, _: int) -> None:
    x = a["input"]
    _expect(x.dim() >= 2, f"batch norm of a tensor of {x.dim()} dimensions; expected 2 at least")
    _expect(x.is_floating_point(), "batch norm of integers")
    for name in ("running_mean", "running_var", "weight", "bias"):
        values = a[name]
        if values is None:
            _expect(name in ("weight", "bias"), "batch norm without running statistics")
            continue
        _expect(values.dim() == 1, f"batch norm's {name} has {values.dim()} dimensions; expected one")
        _expect(
            values.size(0) == x.size(1),
            f"batch norm's {name} has {values.size(0)} values for {x.size(1)} channels",
        )
        _expect(values.dtype == x.dtype, f"batch norm's {name} is of another type than what it norms")


def _norm(a: Arguments, _: int) -> None:
    for name in ("weight", "bias"):
        if (values := a.get(name)) is not None:
            _expect(
                values.dtype == a["input"].dtype, f"a norm's {name} is of another type than what it norms"
            )


def _attention(a: Arguments, _: int) -> None:
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    _expect(
        q.dim() == k.dim() == v.dim() and q.dim() in (3, 4),
        "attention of tensors that have not 3 or 4 dimensions each",
    )
    _expect(q.dtype == k.dtype == v.dtype and q.is_floating_point(), "attention of tensors of several types")
    _expect(q.shape[:-2] == k.shape[:-2] == v.shape[:-2], "attention of several batches, or numbers of heads")
    _expect(q.size(-1) == k.size(-1) and q.size(-1) > 0, "attention's queries and keys are of several widths")
    _expect(k.size(-2) == v.size(-2), "attention has not as many values as keys")
    _expect(a["dropout_p"] == 0 and not a["enable_gqa"], "attention with dropout, or grouped queries")
    if mask is not None:
        scores = torch.Size((*q.shape[:-1], k.size(-2)))
        _expect(mask.dtype in (torch.bool, q.dtype), "attention's mask is of another type")
        _expect(mask.dim() >= 2, "attention's mask has no two dimensions")
        _expect(
            torch.broadcast_shapes(mask.shape, scores) == scores,  # type: ignore[no-untyped-call]
            "attention's mask does not fit its scores",
        )


def _convolution(a: Arguments, _: int) -> None:
    x, w, bias, groups = a["input"], a["weight"], a["bias"], a["groups"]
    _expect(x.dim() in (2, 3) and w.dim() == 3, "a convolution of tensors that have not 3 dimensions each")
    _expect(x.dtype == w.dtype and x.is_floating_point(), "a convolution of tensors of several types")
    _expect(groups >= 1 and w.size(0) % groups == 0, "a convolution's groups do not divide its channels")
    _expect(
        x.size(-2) == w.size(1) * groups, f"a convolution for {w.size(1) * groups} channels of {x.size(-2)}"
    )
    _expect(min(w.shape) > 0 and x.size(-1) > 0, "a convolution of nothing")
    _expect(
        bias is None or (bias.shape == w.shape[:1] and bias.dtype == x.dtype),
        "a convolution's bias does not fit it",
    )
    for name, least in (("stride", 1), ("dilation", 1), ("padding", 0)):
        _expect(
            all(least <= n <= _MOST_PIECES for n in a[name]), f"a convolution's {name} is {list(a[name])}"
        )


def _indices(name: str) -> Check:
    def check(a: Arguments, _: int) -> None:
        for index in a[name] if isinstance(a[name], list | tuple) else [a[name]]:
            _expect(index is None or index.dtype in _INDICES, "an index that is not of integers")

    return check


def _triangle(a: Arguments, most_bytes: int) -> None:
    _expect(
        max(a["row"], a["col"], abs(a["offset"])) <= _MOST_TRIANGLE, f"a triangle of {a['row']} by {a['col']}"
    )
    _fits(2 * max(a["row"], 0) * max(a["col"], 0), most_bytes)


# ---- arithmetic that ends a process ----


def _whole_division(a: Arguments, _: int) -> None:
    x, y = a["self"], a["other"]
    if a.get("rounding_mode", "floor") is None:
        return
    if any(t.is_floating_point() if isinstance(t, torch.Tensor) else isinstance(t, float) for t in (x, y)):
        return
    _expect(
        not isinstance(y, torch.Tensor) and y > 0,
        "a division of integers; expected one by a constant above 0",
    )


# ---- results as large as a number says ----


def _fits(elements: float, most_bytes: int) -> None:
    if elements * 8 > most_bytes:
        raise ValueError(f"a tensor of {elements:,.0f} values of 8 bytes; the limit is {most_bytes:,} bytes")


def _size(a: Arguments, most_bytes: int) -> None:
    _fits(prod(a["size"]), most_bytes)


def _expand(a: Arguments, most_bytes: int) -> None:
    x, size = a["self"], a["size"]
    old = [1] * (len(size) - x.dim()) + list(x.shape)
    _fits(prod(o if n == -1 else n for o, n in zip(old, size, strict=False)), most_bytes)


def _repeat(name: str) -> Check:
    def check(a: Arguments, most_bytes: int) -> None:
        times = a[name]
        _fits(a["self"].numel() * (prod(times) if isinstance(times, list | tuple) else times), most_bytes)

    return check


def _pad(a: Arguments, most_bytes: int) -> None:
    x, pad = a["self"], list(a["pad"])
    _expect(a.get("mode", "constant") == "constant", "padding with something else than a constant")
    _expect(len(pad) % 2 == 0 and len(pad) <= 2 * x.dim(), "padding of other dimensions than there are")
    added = [before + after for before, after in zip(pad[::2], pad[1::2], strict=True)]
    grown = added + [0] * (x.dim() - len(added))
    _fits(prod(max(0, n + more) for n, more in zip(reversed(x.shape), grown, strict=True)), most_bytes)


def _arange(a: Arguments, most_bytes: int) -> None:
    step = a.get("step", 1)
    _expect(step != 0, "a range with the step 0")
    _fits(abs((a["end"] - a.get("start", 0)) / step), most_bytes)


def _eye(a: Arguments, most_bytes: int) -> None:
    _fits(max(0, a["n"]) * max(0, a.get("m", a["n"])), most_bytes)


def _pieces(count: Callable[[Arguments], float]) -> Check:
    def check(a: Arguments, _: int) -> None:
        _expect(
            (n := count(a)) <= _MOST_PIECES, f"a tensor is split into {n:,.0f}; the limit is {_MOST_PIECES}"
        )

    return check


CHECKS: Mapping[str, Check] = {
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "layer_norm": _norm,
    "native_layer_norm": _norm,
    "group_norm": _norm,
    "rms_norm": _norm,
    "scaled_dot_product_attention": _attention,
    "conv1d": _convolution,
    "index": _indices("indices"),
    "index_select": _indices("index"),
    "gather": _indices("index"),
    "embedding": _indices("indices"),
    "tril_indices": _triangle,
    "triu_indices": _triangle,
    **dict.fromkeys(("floor_divide", "remainder", "fmod", "div"), _whole_division),
    **dict.fromkeys(("full", "zeros", "ones", "new_full", "new_zeros", "new_ones"), _size),
    "expand": _expand,
    "repeat": _repeat("repeats"),
    "tile": _repeat("dims"),
    "repeat_interleave": _repeat("repeats"),
    "pad": _pad,
    "constant_pad_nd": _pad,
    "arange": _arange,
    "eye": _eye,
    "unbind": _pieces(lambda a: a["self"].size(a["dim"]) if a["self"].dim() else 0),
    "split": _pieces(lambda a: a["self"].size(a["dim"]) / max(1, a["split_size"]) if a["self"].dim() else 0),
    "chunk": _pieces(lambda a: a["chunks"]),
}
