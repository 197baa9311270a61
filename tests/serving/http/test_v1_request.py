"""JSON that is laid out all at once against features taken one by one: the same answer byte for byte, or
the same error."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import Sum, engine_of
from support import rows_of

from tableside.quant.contract import matrices_in
from tableside.serving.errors import ApiError
from tableside.serving.http.inputs.json_lists import packed
from tableside.serving.http.v1 import request as v1_request
from tableside.serving.http.v1 import routes as v1
from tableside.serving.http.v1.request import JsonRequest
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.service import Service
from tableside.serving.settings import ServerSettings

Publish = Callable[..., Any]
FEATURES = {
    "user": {"table": "t"},
    "item": {"table": "u", "pooling": "mean"},
    "half": {"table": "t", "output": "fp16"},
    "other": {"table": "t", "output": "fp16"},
    "words": {"table": "u", "pooling": "none"},
    "true": {"table": "t"},
}
GOOD = {
    "user": [[1, 2], [], [7]],
    "item": [[3], [4, 4, 4], []],
    "half": [[0], [49], [1]],
    "words": [[5], [], [6, 7]],
}


def attached(publish: Publish, root: Path) -> ServedVersion:
    publish({"t": rows_of(50, 8), "u": rows_of(40, 6)}, features=FEATURES)
    served = engine_of(root, 4096).attach()
    served.scorer = Sum()
    return served


@pytest.fixture
def version(publish: Publish, root: Path) -> ServedVersion:
    return attached(publish, root)


def text_of(features: Any, **more: Any) -> bytes:
    return orjson.dumps({"model": "demo", "features": features, **more})


def jagged(bags: list[list[int]], weights: bool = False) -> dict[str, Any]:
    """The same ids as values and lengths."""
    values = [i for bag in bags for i in bag]
    found: dict[str, Any] = {"values": values, "lengths": [len(bag) for bag in bags]}
    return found | ({"weights": [0.5 + n for n in range(len(values))]} if weights else {})


def laid_out(served: ServedVersion, text: bytes, score: bool = False) -> JsonRequest:
    return v1_request.lay_out(served, v1_request.parse(text, ("dense",)), score)


def answer(served: ServedVersion, lay_out: Callable[[], JsonRequest]) -> bytes | str:
    """The whole response, or what is wrong."""
    try:
        found = lay_out()
        found.request.check(found.inputs)
        return v1_request.encode(served, found, found.request.run(found.inputs))
    except ApiError as error:
        return error.message


def both(served: ServedVersion, text: bytes) -> tuple[bytes | str, bytes | str]:
    """What the request gets as it is served, and what it gets with its features taken one by one."""
    features = orjson.loads(text)["features"]
    return answer(served, lambda: laid_out(served, text)), answer(
        served, lambda: v1_request._one_by_one(served, features, {}, False)
    )


POOLED = {name: bags for name, bags in GOOD.items() if name != "words"}


@pytest.mark.parametrize(
    "features",
    [
        GOOD,
        {"user": GOOD["user"], "true": GOOD["half"]},
        {"half": GOOD["half"], "other": GOOD["user"]},
        {"words": [[]]},
        {"user": []},
        {name: jagged(bags) for name, bags in POOLED.items()},
        {name: jagged(bags, weights=True) for name, bags in POOLED.items()},
        {"user": {"lengths": [2], "values": [1, 2]}, "item": {"values": [], "lengths": [0]}},
    ],
    ids=["bags", "alike", "fp16 alike", "empty bag", "no bags", "jagged", "weighted", "keys in any order"],
)
def test_features_of_one_form_are_laid_out_together(version: ServedVersion, features: Any) -> None:
    """That is the fast way; it gives what the slow one gives, the counts for the metrics too."""
    text = text_of(features)
    body = v1_request.Body(
        orjson.loads(text), has_booleans=False
    )  # a feature's name is no boolean, if it looks like one
    fast = v1_request.lay_out(version, body, False)
    assert fast.vectors is not None
    slow = v1_request._one_by_one(version, features, {}, False)
    assert slow.vectors is None
    assert answer(version, lambda: fast) == answer(version, lambda: slow)
    for count in ("ids", "vectors", "row_bytes", "out_bytes", "numbers"):
        assert getattr(fast.request, count) == getattr(slow.request, count)


ODD: list[Any] = [
    None,
    True,
    False,
    1.0,
    1.5,
    "1",
    "",
    {},
    [],
    [1],
    [[]],
    [[1]],
    [1, 2],
    -1,
    50,
    2**31,
    2**63,
    2**63 - 1,
    1e300,
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_wrong_the_error_is_that_of_the_slow_way(
    version: ServedVersion, data: st.DataObject
) -> None:
    """A value, a length, a bag, a feature or a key is replaced by something odd, or dropped."""
    names = data.draw(st.lists(st.sampled_from([*FEATURES]), min_size=1, max_size=4, unique=True))
    form = data.draw(st.sampled_from([lambda bags: bags, jagged, lambda bags: jagged(bags, weights=True)]))
    bags = st.lists(st.lists(st.integers(0, 39), max_size=4), min_size=0, max_size=3)
    features: dict[str, Any] = {name: form(data.draw(bags)) for name in names}
    if data.draw(st.integers(0, 3)) == 0:
        features["nope"] = [[1]]
    at: Any = features
    while data.draw(st.integers(0, 5)) and isinstance(at, dict | list) and at:
        key = data.draw(st.sampled_from([*at] if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            at[key] = data.draw(st.sampled_from(ODD))
            break
        at = at[key]
    if not features or not isinstance(features, dict):
        return
    found, expected = both(version, text_of(features))
    assert found == expected


@pytest.mark.parametrize(("bags", "is_refused"), [(128, False), (129, True)])
def test_answers_beyond_the_limit_say_what_the_limit_is(
    version: ServedVersion, bags: int, is_refused: bool
) -> None:
    """4096 bytes are 128 vectors of 8 fp32 values."""
    found, expected = both(version, text_of({"user": [[]] * bags}))
    assert found == expected
    assert ("max_response_bytes" in str(found)) is is_refused


@pytest.mark.parametrize("is_large", [False, True])
def test_long_json_is_parsed_beside_the_event_loop(publish: Publish, root: Path, is_large: bool) -> None:
    """Beyond 64 KiB, so that health checks do not wait for it; shorter JSON is parsed where it is."""
    publish({"t": np.ones((10, 8), np.float32)}, features={"user": {"table": "t"}})
    text = orjson.dumps({"model": "demo", "features": {"user": [[1] * (40_000 if is_large else 10)]}})
    assert (len(text) > 1 << 16) == is_large
    parsed_on: list[str] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": text}

    async def ask() -> bytes:
        service = Service(ServerSettings(root=root, models=("demo",), scrub_hours=0))
        await service.start()
        try:
            v1_app = v1.V1(service)
            understand = v1_app._understand

            def watched(*arguments: Any) -> Any:
                parsed_on.append(threading.current_thread().name)
                return understand(*arguments)

            v1_app._understand = watched  # type: ignore[method-assign]
            return await v1_app.answer({"type": "http", "headers": []}, receive, False)
        finally:
            await service.stop()

    assert orjson.loads(asyncio.run(ask()))["vectors"]["user"] == [[40_000.0 if is_large else 10.0] * 8]
    assert [name.startswith("tableside-beside") for name in parsed_on] == [is_large]


@pytest.mark.parametrize("form", [list, jagged], ids=["bags", "jagged"])
def test_scores_are_the_same_whatever_the_form(version: ServedVersion, form: Callable[[Any], Any]) -> None:
    features = {"user": [[1, 2], [3]], "item": [[4], []]}
    dense = {"context": [[0.5, 1, 2], [3, 4, 5]]}
    text = text_of({name: form(bags) for name, bags in features.items()}, dense=dense)
    found = laid_out(version, text, score=True)
    expected = v1_request._one_by_one(version, features, dense, True)
    assert found.request.scoring is not None and expected.request.scoring is not None
    arrays = [[s.view(r.request.run(r.inputs)) for s in r.request.outputs[:2]] for r in (found, expected)]
    for one, other in zip(*arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    at = int(matrices_in(found.request.scoring.sources)[1][1])
    np.testing.assert_array_equal(np.frombuffer(found.inputs, np.float32, 6, at), [0.5, 1, 2, 3, 4, 5])


def test_vectors_come_back_as_they_are(version: ServedVersion) -> None:
    """Each number of the JSON is the shortest that reads as the vector's fp32."""
    found = laid_out(version, text_of(GOOD))
    buffer = found.request.run(found.inputs)
    sent = orjson.loads(v1_request.encode(version, found, buffer))["vectors"]
    slow = v1_request._one_by_one(version, GOOD, {}, False).request
    for output in slow.outputs:
        np.testing.assert_array_equal(
            np.array(sent[output.feature], np.float32).reshape(output.shape), output.view(buffer)
        )
    assert all(repr(np.float32(x)) == f"np.float32({x!r})" for x in sent["user"][0])


@pytest.mark.parametrize(
    ("code", "numbers", "expected"),
    [
        ("q", [1, -(2**63), 2**63 - 1], np.array([1, -(2**63), 2**63 - 1]).tobytes()),
        ("q", [2**63], None),
        ("q", [1.0], None),
        ("q", ["1"], None),
        ("i", [2**31], None),
        ("f", [1, 0.1], np.array([1, 0.1], np.float32).tobytes()),
        ("f", [1e39], None),
        ("f", ["1"], None),
        ("f", [None], None),
        ("q", [], b""),
    ],
)
def test_packing(code: str, numbers: list[Any], expected: bytes | None) -> None:
    """The numbers as C has them, or None where one is none."""
    assert packed(code, numbers) == expected
