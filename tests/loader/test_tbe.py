"""TBE modules over a segment: no weights of their own, and the same answers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import rows_of

from tableside.loader.errors import LoaderError
from tableside.loader.load import Loaded
from tableside.loader.tbe import TbeTable, bind, init_tbe
from tableside.loader.versions import Model
from tableside.quant import Pooling, RowFormat, choose

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
    with pytest.raises(LoaderError, match="expected meta or cpu"):
        init_tbe([TbeTable("a", 10, 64, RowFormat.INT8)], weight_init_device="cuda")
