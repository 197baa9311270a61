"""Requests of /v1 for tables of string ids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_requests import compare, laid_out, laid_out_slowly, text_of
from served import engine_of
from string_tables import hashes, publish_strings, texts
from support import rows_of

from tableside.serving.errors import ApiError
from tableside.serving.model.version import ServedVersion


@pytest.fixture
def of_strings(root: Path, tmp_path: Path) -> ServedVersion:
    """A version with a feature of strings, and one of integers."""
    tables = {"s": (texts(50), rows_of(50, 8)), "n": (np.arange(50), rows_of(50, 8))}
    features = {"name": {"table": "s"}, "number": {"table": "n"}}
    publish_strings(tmp_path, root, tables, features=features, of={"s": {"missing": "zero"}})
    return engine_of(root, 1 << 16).attach()


@pytest.mark.parametrize(
    "features",
    [
        {"name": [["", "a\0b"], [], ["日本語", "x" * 300]], "number": [[1], [], [2, 3]]},
        {"name": {"values": ["é", "e\u0301"], "lengths": [2], "weights": [1, 2.5]}},
        {"name": [[], []], "number": [[]]},
        {"name": {"values": [], "lengths": [0]}},
        {"name": []},
    ],
)
def test_features_of_strings(of_strings: ServedVersion, features: Any) -> None:
    """The extension takes them too, with escapes or without."""
    for text in (text_of(features, found=True), json.dumps({"model": "demo", "features": features}).encode()):
        assert isinstance(compare(of_strings, text), bytes)
        assert laid_out(of_strings, text) is not None


@pytest.mark.parametrize(
    "features",
    [
        b'{"name":[[1]]}',
        b'{"number":[["1"]]}',
        b'{"name":[["a",1]]}',
        b'{"name":[["a"],[1]]}',
        b'{"name":[[null]]}',
        b'{"name":[["\\ud800"]]}',
        b'{"name":[["\xff"]]}',
        b'{"name":{"values":[["a"]],"lengths":[1]}}',
        b'{"name":{"values":["a"],"lengths":["1"]}}',
        b'{"name":{"values":["a"],"lengths":[1],"weights":["1"]}}',
    ],
)
def test_strings_that_are_wrong(of_strings: ServedVersion, features: bytes) -> None:
    """Of the other kind, of both, and what is no text."""
    text = b'{"model":"demo","features":' + features + b"}"
    assert laid_out(of_strings, text) is None
    with pytest.raises(ApiError):
        laid_out_slowly(of_strings, text)


def test_a_request_of_strings_is_no_request_of_integers(
    of_strings: ServedVersion, root: Path, tmp_path: Path
) -> None:
    """So a state whose table has other ids does not answer it."""
    tables = {"s": (hashes(texts(50)), rows_of(50, 8)), "n": (np.arange(50), rows_of(50, 8))}
    features = {"name": {"table": "s"}, "number": {"table": "n"}}
    publish_strings(tmp_path, root, tables, features=features, of={"s": {"missing": "zero"}})
    other = engine_of(root, 1 << 16).attach()
    assert other.version != of_strings.version and other.layout != of_strings.layout
