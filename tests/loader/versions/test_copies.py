"""Copies and pickles of what lies in shared memory: copies share it, pickles attach it again or refuse."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import rows_of

from tableside.loader.errors import LoaderError, SegmentError
from tableside.loader.load.load import Loaded
from tableside.loader.segment.segment import Segment
from tableside.loader.tbe.tbe import TbeTable, bind, init_tbe
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat

Publish = Callable[..., Loaded]
WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy}

OUTLIVED = """
import copy, gc, sys
from pathlib import Path
from typing import Any
from tableside.loader.segment.segment import Segment
from tableside.loader.tbe.tbe import TbeTable, bind, init_tbe
from tableside.quant import RowFormat, choose
import torch

segment = Segment(Path(sys.argv[1]))
module = init_tbe([TbeTable("a", 50, 64, RowFormat.INT8)])
bind(module, segment, ["a"])
ids, offsets = torch.arange(50), torch.arange(51)
expected = module(ids, offsets)
for way in (copy.copy, copy.deepcopy):
    for what in (segment.mapping, segment, module):
        copied = way(what)
        del copied
        gc.collect()
    assert torch.equal(module(ids, offsets), expected)
copied = copy.deepcopy(module)
del module, segment, what
gc.collect()
assert torch.equal(copied(ids, offsets), expected)
"""


def run(script: str, *arguments: object) -> None:
    """A script in a process of its own: what reads unmapped memory ends that process, with -11."""
    found = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, (found.returncode, found.stderr)


def bound(segment: Segment) -> Any:
    module = init_tbe([TbeTable("a", 50, 64, RowFormat.INT8)])
    bind(module, segment, ["a"])
    return module


@pytest.mark.thorough
def test_what_was_copied_outlives_its_copies_and_they_it(publish: Publish) -> None:
    """Of a mapping, a segment and a bound module: rows are read when the copy is gone, and by the copy
    when the original is."""
    run(OUTLIVED, publish({"a": rows_of(50, 64)}).path)


@pytest.mark.parametrize("way", WAYS)
def test_copies_share_the_mapping(way: str, publish: Publish, root: Path) -> None:
    """No byte of a row is copied, not even by deepcopy of a bound module."""
    publish({"a": rows_of(50, 64)})
    segment = Model(root, "demo").attach()
    assert WAYS[way](segment).mapping is segment.mapping
    assert WAYS[way](segment.mapping) is segment.mapping
    module = WAYS[way](bound(segment))
    assert module.weights_host.data_ptr() == segment.mapping.address
    assert module.segment is segment


def test_a_pickled_segment_is_attached_again(publish: Publish, root: Path) -> None:
    """The pickle is small, whatever the rows take."""
    publish({"a": rows_of(5000, 64)})
    segment = Model(root, "demo").attach()
    data = pickle.dumps(segment)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert again.mapping is not segment.mapping
    np.testing.assert_array_equal(again.tables["a"].packed, segment.tables["a"].packed)


def test_a_pickled_module_is_bound_again(publish: Publish, root: Path) -> None:
    import torch

    publish({"a": rows_of(50, 64)})
    segment = Model(root, "demo").attach()
    module = bound(segment)
    again = pickle.loads(pickle.dumps(module))
    assert again.weights_host.data_ptr() == again.segment.mapping.address != segment.mapping.address
    ids, offsets = torch.arange(50), torch.arange(51)
    assert torch.equal(again(ids, offsets), module(ids, offsets))


def test_a_pickle_of_a_segment_that_was_replaced_or_removed_is_refused(publish: Publish) -> None:
    loaded, other = publish({"a": rows_of(50, 64)}), publish({"a": rows_of(50, 64, 1)})
    data = pickle.dumps(Segment(loaded.path))
    other.path.rename(loaded.path)
    with pytest.raises(SegmentError, match="another version was published there"):
        pickle.loads(data)
    loaded.path.unlink()
    with pytest.raises(SegmentError, match="no longer published"):
        pickle.loads(data)


def test_a_mapping_and_a_devices_weights_are_not_pickled(publish: Publish) -> None:
    """Their addresses mean nothing elsewhere; the error says what to pickle."""
    segment = Segment(publish({"a": rows_of(50, 64)}).path)
    with pytest.raises(TypeError, match="pickle the Segment"):
        pickle.dumps(segment.mapping)
    module = init_tbe([TbeTable("a", 50, 64, RowFormat.INT8)])
    import torch

    bind(module, segment, ["a"], torch.zeros(segment.size, dtype=torch.uint8))
    with pytest.raises(LoaderError, match="pickle the segment"):
        pickle.dumps(module)
