"""The memory of headers that were understood: bounded, and gone with the version."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import rows_of

from tableside.loader.versions import Model
from tableside.quant import choose
from tableside.serving.engine import Engine
from tableside.serving.http.v2_memory import REMEMBERED_HEADER_BYTES, REMEMBERED_HEADERS, HeaderMemory
from tableside.serving.http.v2_request import InferRequest, understand
from tableside.serving.placement import Placer
from tableside.serving.settings import ServerSettings
from tableside.serving.version import ServedVersion

Publish = Callable[..., Any]


@pytest.fixture
def engine(publish: Publish, root: Path) -> Engine:
    publish({"t": rows_of(10, 8)})
    return Engine(
        Model(root, "demo"), choose(), Placer(ServerSettings(), choose()), threads=1, verify="full", max_response_bytes=1 << 20
    )


def infer_of(version: ServedVersion) -> InferRequest:
    """One id, as a binary tensor."""
    parameters = {"binary_data_size": 8}
    header = {"inputs": [{"name": "t", "datatype": "INT64", "shape": [1, 1], "parameters": parameters}]}
    return understand(version, header, 8)[0]


def test_a_header_is_recalled_for_its_version_alone(engine: Engine) -> None:
    """Another version that gets the same bytes understands them itself."""
    memory, first, second = HeaderMemory(), engine.attach(), engine.attach()
    infer = infer_of(first)
    memory.remember(first, b"head", infer)
    assert memory.recall(first, b"head") is infer
    assert memory.recall(first, b"other") is None and memory.recall(second, b"head") is None


def test_the_header_that_was_not_used_for_longest_is_forgotten(engine: Engine) -> None:
    """A version keeps REMEMBERED_HEADERS of them; a recall is a use. A header that is too long is not kept at all."""
    memory, version = HeaderMemory(), engine.attach()
    infer = infer_of(version)
    for n in range(REMEMBERED_HEADERS):
        memory.remember(version, b"%d" % n, infer)
    assert memory.recall(version, b"0") is infer
    memory.remember(version, b"one more", infer)
    assert memory.recall(version, b"1") is None
    known = [b"0", b"one more", *(b"%d" % n for n in range(2, REMEMBERED_HEADERS))]
    assert all(memory.recall(version, head) is infer for head in known) and len(known) == REMEMBERED_HEADERS
    memory.remember(version, bytes(REMEMBERED_HEADER_BYTES + 1), infer)
    assert memory.recall(version, bytes(REMEMBERED_HEADER_BYTES + 1)) is None


def test_what_is_remembered_keeps_no_replaced_version(engine: Engine) -> None:
    """Version, segment and mapping go when the version is let go, although its headers are remembered."""
    memory = HeaderMemory()
    version = engine.attach()
    memory.remember(version, b"head", infer_of(version))
    gone = [weakref.ref(x) for x in (version, version.segment, version.segment.mapping, memory.recall(version, b"head"))]
    assert all(ref() is not None for ref in gone)
    del version
    gc.collect()
    assert all(ref() is None for ref in gone)
