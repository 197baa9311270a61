"""Requests of /v1: laid out by the extension, and the slow way."""

from typing import Any

import orjson

from tableside.serving.errors import ApiError
from tableside.serving.http.v1 import request as v1_request
from tableside.serving.http.v1.request import JsonRequest
from tableside.serving.http.v2.reader import names_of
from tableside.serving.model.request import Answer
from tableside.serving.model.version import ServedVersion


def text_of(features: Any, **more: Any) -> bytes:
    return orjson.dumps({"model": "demo", "features": features, **more})


def jagged(bags: list[list[int]], weights: bool = False) -> dict[str, Any]:
    """The same ids as values and lengths."""
    values = [i for bag in bags for i in bag]
    found: dict[str, Any] = {"values": values, "lengths": [len(bag) for bag in bags]}
    return found | ({"weights": [0.5 + n for n in range(len(values))]} if weights else {})


def laid_out(served: ServedVersion, text: bytes, score: bool = False) -> JsonRequest | None:
    came = v1_request.read(text, score)
    return None if came is None else v1_request.lay_out(served, came)


def laid_out_slowly(served: ServedVersion, text: bytes, score: bool = False) -> JsonRequest:
    return v1_request.lay_out_slowly(
        served, v1_request.parse(text, ("dense",) if score else ("found",)), score
    )


def answer(served: ServedVersion, found: JsonRequest) -> bytes | str:
    """The whole response, or what is wrong with ids or lengths."""
    try:
        return b"".join(
            v1_request.encode(served, names_of(served), found, Answer(found.request.run(found.inputs)))
        )
    except ApiError as error:
        return error.message


def compare(served: ServedVersion, text: bytes, score: bool = False) -> bytes | str:
    """Compares both ways; returns the answer, or what is wrong."""
    found = laid_out(served, text, score)
    try:
        expected = laid_out_slowly(served, text, score)
    except ApiError as error:
        assert found is None, text
        return error.message
    if found is None:  # what the slow way finds wrong later
        wrong = answer(served, expected)
        assert isinstance(wrong, str), text
        return wrong
    for count in ("ids", "vectors", "row_bytes", "out_bytes", "numbers"):
        assert getattr(found.request, count) == getattr(expected.request, count)
    both = answer(served, found), answer(served, expected)
    assert both[0] == both[1], text
    return both[0]
