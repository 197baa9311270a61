"""What tests of the reader in C share: a model, requests of it, and what the reader's specification makes of
a request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from served import engine_of
from string_tables import publish_strings, texts
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.quant import Place
from tableside.quant.contract import matrices_in
from tableside.serving.errors import ApiError
from tableside.serving.http.asgi import json_object
from tableside.serving.http.v2 import answer as v2_answer
from tableside.serving.http.v2 import reader
from tableside.serving.http.v2 import request as v2_request
from tableside.serving.http.v2.answer import InferRequest
from tableside.serving.model.version import ServedVersion

FEATURES = {
    "user": {"table": "t"},
    "item": {"table": "u", "pooling": "mean"},
    "half": {"table": "t", "output": "fp16"},
    "words": {"table": "u", "pooling": "none"},
    "a:b-c": {"table": "t"},
}
PARTS = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}
ROWS = 40
MOST_BYTES = 1 << 16  # of a response


def attached(root: Path, folder: Path, features: dict[str, Any]) -> ServedVersion:
    """A version with these features of the tables t and u, or, of string ids, s and v."""
    values = {"t": rows_of(ROWS, 8), "u": rows_of(ROWS, 6)}
    if any(of["table"] in "sv" for of in features.values()):
        ids = {"t": np.arange(ROWS), "u": np.arange(ROWS), "s": texts(ROWS), "v": texts(ROWS)}
        tables = {t: (ids[t], values[{"s": "t", "v": "u"}.get(t, t)]) for t in ids}
        publish_strings(folder, root, tables, features=features)
        return engine_of(root, MOST_BYTES).attach()
    np.savez(folder / "c.npz", **values)
    tables = {t: {"key": t, "row_format": "int8"} for t in values}
    raw = {"name": "demo", "checkpoint": "c.npz", "tables": tables, "features": features}
    load(parse_model(raw, folder), root)
    return engine_of(root, MOST_BYTES).attach()


def body_of(header: bytes, arrays: list[np.ndarray]) -> tuple[bytes, int]:
    return header + b"".join(a.tobytes() for a in arrays), len(header)


def answer(infer: InferRequest) -> bytes | str:
    """The whole response, or what is wrong with its ids."""
    request = infer.request
    try:
        buffer = request.run(infer.inputs)
        if request.scoring is not None:
            request.scoring.run(infer.inputs, buffer)
    except ApiError as error:
        return error.message
    assert buffer.size == request.out_bytes
    head, parts = v2_answer.encode(infer, buffer)
    counts = request.ids, request.vectors, request.row_bytes, infer.has_binary, infer.json_bytes
    alone = request.scoring is not None and request.scoring.is_alone
    return b"|".join([head, b"".join(parts), repr((counts, alone, request.numbers)).encode()])


def slowly(served: ServedVersion, body: bytes, header_bytes: int) -> InferRequest | str:
    try:
        header = json_object(body[:header_bytes])
        return v2_request.understand(served, header, memoryview(body)[header_bytes:])
    except ApiError as error:
        return error.message


def places_of(infer: InferRequest, base: int) -> bytes:
    """The places of lookups and of the scorer's inputs in the request's inputs. base: where these begin in
    their buffer. The reader has an order of its own in the outputs."""
    places = np.frombuffer(infer.request.places, np.int64).reshape(-1, len(Place._fields)).copy()
    for name in ("ids_at", "lengths_at", "weights_at"):
        column = places[:, Place._fields.index(name)]
        column[column >= 0] -= base
    for name in ("out_at", "found_at"):
        column = places[:, Place._fields.index(name)]
        column[column >= 0] = 0
    sources = b"" if infer.request.scoring is None else infer.request.scoring.sources
    matrices = matrices_in(sources).copy()
    matrices[:, 1] = np.where(matrices[:, 0] == 0, matrices[:, 1] - base, 0)
    return places.tobytes() + matrices.tobytes()


def check_alike(served: ServedVersion, body: bytes, header_bytes: int) -> bool:
    """The reader takes what its specification takes, and says the same; returns whether it took it."""
    found, expected = reader.read(served, body, header_bytes), slowly(served, body, header_bytes)
    if found is None:
        assert isinstance(expected, str), f"not taken: {body[:header_bytes]!r}"
        return False
    assert isinstance(found, InferRequest)
    assert not isinstance(expected, str), f"taken, though {expected}: {body[:header_bytes]!r}"
    assert places_of(found, header_bytes if found.inputs is body else 0) == places_of(expected, 0)
    assert answer(found) == answer(expected), body[:header_bytes]
    return True


def request(tensors: dict[str, np.ndarray], change: Callable[[bytes], bytes] = bytes) -> tuple[bytes, int]:
    """A request of these tensors, which asks for everything; its header changed."""
    kinds = {np.dtype(dtype): name for name, dtype in PARTS.items()}
    inputs = [
        {
            "name": n,
            "datatype": kinds[a.dtype],
            "shape": list(a.shape),
            "parameters": {"binary_data_size": a.nbytes},
        }
        for n, a in tensors.items()
    ]
    header = change(orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}))
    return body_of(header, list(tensors.values()))


def of_user(header: bytes) -> bytes:
    return header.replace(b'"parameters":{"bi', b'"parameters":{"kjt.features":"user","bi')


def ask(inputs: Any, **more: Any) -> tuple[bytes, int]:
    header = orjson.dumps({"inputs": inputs, **more})
    return header, len(header)


def tensor(name: str, data: Any, datatype: str = "INT64", shape: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data, **more}


USER = {"name": "user", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
