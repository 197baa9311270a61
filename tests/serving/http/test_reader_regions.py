"""Tensors in regions of shared memory: the reader in C against its specification."""

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infer_headers import DrawnModel, DrawnRequest, sent
from read_headers import FEATURES, PARTS, ROWS, answer, ask, attached

from tableside.serving.errors import ApiError
from tableside.serving.http.asgi import json_object
from tableside.serving.http.v2 import answer as v2_answer
from tableside.serving.http.v2 import reader
from tableside.serving.http.v2 import request as v2_request
from tableside.serving.http.v2.answer import InferRequest
from tableside.serving.http.v2.reader import ReadBeside
from tableside.serving.model.version import ServedVersion
from tableside.serving.shm.regions import RegionRegistry, Regions

pytestmark = pytest.mark.quick


@pytest.fixture
def shared() -> Iterator[tuple[Regions, Path]]:
    yield from _shared()


def _shared() -> Iterator[tuple[Regions, Path]]:
    """A region `r` of 64 KiB, and its object."""
    path = Path(f"/dev/shm/test-{uuid.uuid4().hex[:12]}")
    path.write_bytes(bytes(65536))
    known = Regions(RegionRegistry())
    known.register("r", path.name, 0, 65536)
    yield known, path
    path.unlink()


def at(offset: int, size: int, region: str = "r") -> dict[str, Any]:
    return {
        "shared_memory_region": region,
        "shared_memory_byte_size": size,
        "shared_memory_offset": offset,
    }


def in_region(name: str, datatype: str, shape: list[int], offset: int) -> dict[str, Any]:
    size = int(np.prod(shape)) * np.dtype(PARTS[datatype]).itemsize
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": at(offset, size)}


@pytest.fixture(scope="module")
def shared_by_all() -> Iterator[tuple[Regions, Path]]:
    yield from _shared()


@pytest.mark.parametrize("item_at", [16384 + 3 * 32, 16384 + 3 * 32 + 8])
def test_vectors_are_written_into_their_region(
    version: ServedVersion, shared: tuple[Regions, Path], item_at: int
) -> None:
    """In one piece and in two; ids are copied before, and where one is wrong nothing is written."""
    known, path = shared
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    header, size = ask(
        [in_region(n, "INT64", [3, 4], 0) for n in ("user", "item")],
        outputs=[
            {"name": "user", "parameters": at(16384, 96)},
            {"name": "item", "parameters": at(item_at, 72)},
        ],
    )
    with path.open("r+b") as file:
        file.write(ids.tobytes())
    expected = v2_request.understand(version, json_object(header), b"", known)
    buffer = expected.request.run(expected.inputs)
    found = reader.read(version, header, size, known)
    assert isinstance(found, InferRequest)
    with path.open("r+b") as file:
        file.write(ids[::-1].tobytes())  # too late
    answered = found.request.run(found.inputs)
    assert v2_answer.encode(found, answered) == (expected.head, [])
    written = path.read_bytes()
    assert written[16384 : 16384 + 96] == buffer[:96].tobytes()
    assert written[item_at : item_at + 72] == buffer[96:].tobytes()
    with path.open("r+b") as file:
        file.write((ids + 50).tobytes())
    refused = reader.read(version, header, size, known)
    assert isinstance(refused, InferRequest)
    with pytest.raises(ApiError, match="outside the table"):
        refused.request.run(refused.inputs)
    assert path.read_bytes()[16384:] == written[16384:]


BOTH_KINDS = {**FEATURES, "name": {"table": "s"}, "texts": {"table": "v", "pooling": "none"}}


@pytest.fixture(scope="module")
def of_both_kinds(root_of_module: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedVersion:
    """A version with features of string ids."""
    return attached(root_of_module / "strings", tmp_path_factory.mktemp("strings"), BOTH_KINDS)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_tensors_in_regions_are_read_as_specified(
    of_both_kinds: ServedVersion, shared_by_all: tuple[Regions, Path], seed: int
) -> None:
    """Some in the body or the JSON, with INT32 ids and strings among them, outputs to the region and not."""
    known, path = shared_by_all
    version, rng = of_both_kinds, random.Random(seed)
    features = {n: (f.get("pooling", "sum"), f.get("output", "fp32")) for n, f in BOTH_KINDS.items()}
    model = DrawnModel(features, strings=frozenset({"name", "texts"}))
    drawn = DrawnRequest(rng, model, ROWS, plain=True)
    drawn.in_text = False
    arrays = drawn.arrays()
    header, memory, body, end = drawn.header(arrays), bytearray(65536), b"", 0
    way = rng.choice(["body", "text"])
    for entry, (_, values) in zip(header["inputs"], arrays, strict=True):
        data = sent(values)
        if rng.random() < 0.6 and end + len(data) <= 32768:
            memory[end : end + len(data)] = data
            entry["parameters"] = at(end, len(data))
            end += len(data) + rng.choice([0, 0, 8])
        elif way == "text":
            del entry["parameters"]
            entry["data"] = values.reshape(-1).tolist()
        else:
            body += data
    out_at = 32768
    for output in header.get("outputs", ()):
        if rng.random() < 0.5:
            output["parameters"] = at(out_at, rng.choice([4096, 4096, 64]))
            out_at += rng.choice([4096, 4096, 4096, 100])
    path.write_bytes(memory)
    text = orjson.dumps(header)
    try:
        expected: Any = v2_request.understand(version, json_object(text), memoryview(body), known)
    except ApiError as error:
        expected = error.message
    found = reader.read(version, text + body, len(text), known)
    if found is None:
        assert isinstance(expected, str), text
        return
    assert isinstance(found, InferRequest) and not isinstance(expected, str), (expected, text)
    answers, written = [], []
    for one in (found, expected):
        path.write_bytes(memory)
        answers.append(answer(one))
        written.append(path.read_bytes())
    assert answers[0] == answers[1] and written[0] == written[1]


def test_many_bytes_in_regions_are_left_to_a_thread(
    version: ServedVersion, shared: tuple[Regions, Path]
) -> None:
    known, _ = shared
    header, size = ask([in_region("words.values", "INT64", [100], 0)])
    assert reader.read(version, header, size, known, 799) == ReadBeside(800)
    assert isinstance(reader.read(version, header, size, known, 800), InferRequest)
    with pytest.raises(ApiError, match="is not registered"):
        reader.read(version, header.replace(b'"r"', b'"s"'), size, known)
