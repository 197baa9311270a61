"""TBE modules over a segment: no weights of their own, and the same answers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tables as gpu
import torch
from raw_segments import RawTable, publish_tables
from support import rows_of

from tableside.loader.errors import LoaderError
from tableside.loader.load.load import Loaded, load
from tableside.loader.model.model import parse_model
from tableside.loader.tbe.tbe import TbeTable, bind, fbgemm_module, init_tbe
from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, Pooling, RowFormat, choose
from tableside.quant.cpu import fbgemm

Publish = Callable[..., Loaded]
FORMATS = {"a": "int8", "b": "int4", "c": "fp16"}


def test_a_module_on_meta_gets_a_view_of_the_segment(publish: Publish, root: Path) -> None:
    """Three tables of different formats and widths; no byte of weights is allocated, before or after."""
    tables = {"a": rows_of(50, 64), "b": rows_of(70, 32), "c": rows_of(20, 16)}
    publish(tables, formats=FORMATS)
    segment = Model(root, "demo").attach()
    specs = [TbeTable(n, v.shape[0], v.shape[1], RowFormat.parse(FORMATS[n])) for n, v in tables.items()]
    module = init_tbe(specs)
    assert module.weights_host.device.type == "meta"
    assert module.D_offsets.device.type == "cpu"
    bind(module, segment, list(tables))
    assert module.weights_host.data_ptr() == segment.mapping.address
    ids = torch.tensor([1, 2, 49, 0, 69, 3, 19, 0])
    found = module(ids, torch.tensor([0, 2, 3, 4, 5, 7, 8])).numpy()
    at = 0
    for name, bags in (("a", ([1, 2], [49])), ("b", ([0], [69])), ("c", ([3, 19], [0]))):
        table = segment.tables[name]
        lengths = np.array([len(b) for b in bags], np.int32)
        flat = np.array([i for b in bags for i in b])
        expected = choose("fbgemm").lookup(table, flat, lengths, pooling=Pooling.SUM)
        np.testing.assert_array_equal(found[:, at : at + table.dim], expected)
        at += table.dim


def test_weights_on_cpu_are_allocated_for_the_caller(publish: Publish) -> None:
    module = init_tbe([TbeTable("a", 10, 64, RowFormat.INT8)], weight_init_device="cpu")
    assert module.weights_host.numel() >= 10 * 80


def test_a_table_of_another_shape_is_refused(publish: Publish, root: Path) -> None:
    publish({"a": rows_of(50, 64)})
    segment = Model(root, "demo").attach()
    with pytest.raises(LoaderError, match="the module was built for"):
        bind(init_tbe([TbeTable("a", 51, 64, RowFormat.INT8)]), segment, ["a"])
    with pytest.raises(LoaderError, match="has no table 'x'; it has: a"):
        bind(init_tbe([TbeTable("x", 50, 64, RowFormat.INT8)]), segment, ["x"])


def test_another_weight_init_device_is_refused() -> None:
    with pytest.raises(LoaderError, match="expected meta, cpu or None"):
        init_tbe([TbeTable("a", 10, 64, RowFormat.INT8)], weight_init_device="cuda")


FEATURES = {
    "user": {"table": "a", "pooling": "sum"},
    "item": {"table": "b", "pooling": "sum"},
    "seen": {"table": "a", "pooling": "sum"},
    "mean": {"table": "b", "pooling": "mean"},
}
DEVICES = [
    "cpu",
    pytest.param(
        "gpu", marks=pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="needs a GPU")
    ),
]


@pytest.mark.parametrize("where", DEVICES)
def test_one_call_makes_a_module_of_features(publish: Publish, root: Path, where: str) -> None:
    """Two of them read one table; the order is the caller's, the pooling that of the features. Nothing is
    copied on the CPU."""
    publish(
        {"a": rows_of(50, 64), "b": rows_of(70, 32)}, formats={"a": "int8", "b": "int4"}, features=FEATURES
    )
    segment = Model(root, "demo").attach()
    device = "cpu" if where == "cpu" else gpu.DEVICE
    module = fbgemm_module(segment, ["seen", "item", "user"], device=device)
    if where == "cpu":
        assert module.weights_host.data_ptr() == segment.mapping.address
    bags = {"seen": [[1, 2], [49]], "item": [[69], [0, 1, 2]], "user": [[], [7, 7]]}
    flat = [b for name in bags for b in bags[name]]
    ids, lengths = torch.tensor([i for b in flat for i in b]), torch.tensor([0, *(len(b) for b in flat)])
    found = module(ids.to(device), lengths.cumsum(0).to(device)).cpu().numpy()
    at = 0
    for name, its in bags.items():
        table = segment.tables[str(FEATURES[name]["table"])]
        wanted = choose("fbgemm").lookup(
            table, np.array([i for b in its for i in b]), np.array([len(b) for b in its], np.int32)
        )
        if where == "cpu":
            np.testing.assert_array_equal(found[:, at : at + table.dim], wanted)
        else:  # fp32 sums of at most three rows in another order
            np.testing.assert_allclose(found[:, at : at + table.dim], wanted, rtol=1e-6, atol=1e-6)
        at += table.dim
    assert found.shape == (2, at)


def test_one_call_takes_tables_and_another_pooling(publish: Publish, root: Path) -> None:
    """A table that no feature has the name of; tables are summed where no pooling is named."""
    publish({"a": rows_of(50, 64)}, features={"user": {"table": "a", "pooling": "mean"}})
    segment = Model(root, "demo").attach()
    ids = np.array([3, 9, 9])
    for pooling in (Pooling.SUM, Pooling.MEAN):
        found = fbgemm_module(segment, ["a"], pooling=pooling)(
            torch.from_numpy(ids), torch.tensor([0, 1, 3])
        ).numpy()
        wanted = choose("fbgemm").lookup(
            segment.tables["a"], ids, np.array([1, 2], np.int32), pooling=pooling
        )
        np.testing.assert_array_equal(found, wanted)
    half = fbgemm_module(segment, ["a"], half=True)(torch.from_numpy(ids), torch.tensor([0, 1, 3]))
    summed = fbgemm_module(segment, ["a"], pooling=Pooling.SUM, half=True)(
        torch.from_numpy(ids), torch.tensor([0, 1, 3])
    )
    assert half.dtype == torch.float16 and torch.equal(half, summed)


def test_what_one_module_cannot_be_is_refused(publish: Publish, root: Path) -> None:
    """Two poolings in one, names that are not there, raw ids."""
    publish({"a": rows_of(50, 64), "b": rows_of(70, 32)}, features=FEATURES)
    segment = Model(root, "demo").attach()
    with pytest.raises(
        LoaderError,
        match=r"the features pool by mean and sum, a module by one; make one of each, or name a pooling",
    ):
        fbgemm_module(segment, ["user", "mean"])
    with pytest.raises(
        LoaderError, match=r"has no feature or table 'x'; it has: user, item, seen, mean, a, b"
    ):
        fbgemm_module(segment, ["x"])
    raw = RawTable(np.array([10**12, 5, 7]), rows_of(3, 16))
    publish_tables(root, {"r": raw}, "raw")
    with pytest.raises(
        LoaderError,
        match=r"table 'r' of .* has raw ids; FBGEMM's modules take row numbers alone, serve it instead",
    ):
        fbgemm_module(Model(root, "raw").attach(), ["r"])


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_the_backend_looks_up_as_the_module_does(
    publish: Publish, root: Path, monkeypatch: pytest.MonkeyPatch, pooling: Pooling
) -> None:
    """`--backend fbgemm`: pooled lookups of as many bags are one call of FBGEMM's operator, bit for bit those
    of one module.

    A lookup of another number of bags is a call of its own.
    """
    names, bags = ["a", "b", "c"], 4
    publish({"a": rows_of(50, 64), "b": rows_of(70, 32), "c": rows_of(20, 16)}, formats=FORMATS)
    segment = Model(root, "demo").attach()
    calls: list[int] = []
    bound = fbgemm.operator
    monkeypatch.setattr(
        fbgemm, "operator", lambda tables, half=False: (calls.append(len(tables)), bound(tables, half))[1]
    )
    generator = np.random.default_rng(0)
    lengths = [generator.integers(0, 5, bags).astype(np.int32) for _ in names]
    ids = [
        generator.integers(0, segment.tables[n].rows, size.sum())
        for n, size in zip(names, lengths, strict=True)
    ]
    inputs, lookups, at, out_at = b"", [], 0, 0
    for name, its_ids, its_lengths in [
        *zip(names, ids, lengths, strict=True),
        ("c", np.array([3]), np.array([1], np.int32)),
    ]:
        inputs += its_ids.tobytes() + its_lengths.tobytes()
        table, lengths_at = segment.tables[name], at + its_ids.nbytes
        lookups.append(
            Lookup(table, pooling, at, its_ids.size, out_at, bags=its_lengths.size, lengths_at=lengths_at)
        )
        at, out_at = len(inputs), out_at + lookups[-1].out_bytes
    out = np.empty(out_at, np.uint8)
    choose("fbgemm").plan(lookups).run(inputs, out)
    assert calls == [3, 1]
    offsets = torch.from_numpy(np.concatenate([[0], *lengths]).cumsum())
    wanted = fbgemm_module(segment, names, pooling=pooling)(
        torch.from_numpy(np.concatenate(ids)), offsets
    ).numpy()
    found = [out[k.out_at :][: k.out_bytes].view(np.float32).reshape(bags, -1) for k in lookups[:3]]
    np.testing.assert_array_equal(np.concatenate(found, axis=1), wanted)


def test_tables_of_two_alignments_need_two_modules(root: Path, tmp_path: Path) -> None:
    """FBGEMM's module has one alignment, and takes that of the segment; the backend asks it once for each."""
    np.savez(tmp_path / "c.npz", a=rows_of(50, 64), b=rows_of(50, 64, 1))
    sections = {"a": {"key": "a", "row_alignment": 4}, "b": {"key": "b", "row_alignment": 16}}
    load(parse_model({"name": "demo", "checkpoint": "c.npz", "tables": sections}, tmp_path), root)
    segment = Model(root, "demo").attach()
    with pytest.raises(LoaderError, match=r"no row alignment .* row_alignment = 16, or make a module"):
        fbgemm_module(segment, ["a", "b"])
    ids, offsets = torch.tensor([3, 49, 0]), torch.tensor([0, 2, 3])
    lookups = []
    for number, (name, alignment) in enumerate((("a", 4), ("b", 16))):
        module = fbgemm_module(segment, [name])
        assert module.row_alignment == alignment
        table = segment.tables[name]
        expected = choose().lookup(table, ids.numpy(), np.array([2, 1], np.int32), pooling=Pooling.SUM)
        np.testing.assert_array_equal(module(ids, offsets).numpy(), expected)
        lookups.append(Lookup(table, Pooling.SUM, 0, 3, number * 2 * 256, bags=2, lengths_at=24))
    out = np.empty((2, 2, 64), np.float32)
    inputs = ids.numpy().tobytes() + np.array([2, 1], np.int32).tobytes()
    choose("fbgemm").plan(lookups).run(inputs, out.reshape(-1).view(np.uint8))
    for name, found in zip(("a", "b"), out, strict=True):
        expected = choose().lookup(segment.tables[name], ids.numpy(), np.array([2, 1], np.int32))
        np.testing.assert_array_equal(found, expected)
