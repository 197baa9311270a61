"""JSON that the C extension reads against features taken one by one: the same answer byte for byte; what the
extension does not take is wrong."""

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
from json_requests import compare, jagged, laid_out, laid_out_slowly, text_of
from served import Sum, engine_of
from support import rows_of

from tableside.quant.contract import matrices_in
from tableside.serving.errors import ApiError
from tableside.serving.executors.admission import Hold
from tableside.serving.http.asgi import HOLD
from tableside.serving.http.v1 import request as v1_request
from tableside.serving.http.v1 import routes as v1
from tableside.serving.http.v2 import _reader
from tableside.serving.http.v2 import request as v2_request
from tableside.serving.http.v2.reader import names_of
from tableside.serving.model.request import Answer
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
@pytest.mark.drawn(4)
def test_features_of_one_form(version: ServedVersion, features: Any) -> None:
    """The extension takes them, with their found masks too."""
    for more in ({}, {"found": True}, {"found": False, "version": None}):
        assert isinstance(compare(version, text_of(features, **more)), bytes)
        assert laid_out(version, text_of(features, **more)) is not None


@pytest.mark.parametrize(
    "text",
    [
        b' { "features" : {"user" : [ [ 1 , 2 ] , [ ] ]} ,\n"model":"demo"\t} ',
        b'{"model":"demo","features":{"us\\u0065r":[[1,2],[-0]]}}',
        b'{"features":{"user":{"lengths":null,"weights":null,"values":[]},"words":{"values":[1]}},"model":"demo"}',
        b'{"model":"demo","features":{"words":{"values":[1,2],"lengths":null},"user":[]},"found":true}',
    ],
)
def test_any_spelling(version: ServedVersion, text: bytes) -> None:
    compare(version, text)
    found = v1_request.read(text, False)
    assert found is not None and (found.model, found.version) == ("demo", None)


TWICE = [
    b'{"model":"x","model":"demo","features":{"user":[[1]]}}',
    b'{"model":"demo","features":{"user":[[1]]},"features":{"user":[[1]]}}',
    b'{"model":"demo","features":{"user":[[1]]},"found":true,"found":false}',
    b'{"model":"demo","features":{"user":[[1]]},"version":1,"version":null}',
    b'{"model":"demo","features":{"user":[[1]],"us\\u0065r":[[2]]}}',
    b'{"model":"demo","features":{"user":{"values":[1],"lengths":[1],"values":[2]}}}',
]


@pytest.mark.parametrize("text", TWICE)
def test_a_key_that_comes_twice(version: ServedVersion, text: bytes) -> None:
    """One of the two would be ignored."""
    with pytest.raises(ApiError, match=r"key '.+' came twice in an object; send each key once"):
        laid_out_slowly(version, text)
    assert laid_out(version, text) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"model":"demo"}',
        b'{"model":"demo","features":{}}',
        b'{"model":"demo","features":[]}',
        b'{"model":"demo","features":{"user":[[1]]},"version":1.5}',
        b'{"model":"demo","features":{"user":[[1]]},"version":"1"}',
        b'{"model":"demo","features":{"user":[[1]]},"found":null}',
        b'{"model":"demo","features":{"user":[[1]]},"dense":{}}',
        b'{"model":"demo","features":{"user":[[1]]},"more":1}',
        b'{"model":"demo","features":{"user":[[1]]}} x',
        b'{"model":"demo","features":{"user":[[1]]}',
        b'{"model":"demo","features":{"user":[[1,]]}}',
        b'{"model":"demo","features":{"user":[[01]]}}',
        b'{"model":"demo","features":{"user":[[1.0]]}}',
        b'{"model":"demo","features":{"user":[[9223372036854775808]]}}',
        b'{"model":"demo","features":{"user":[[true]]}}',
        b'{"model":"demo","features":{"user":{"lengths":[1]}}}',
        b'{"model":"demo","features":{"user":{"values":[1],"lengths":[1],"weights":[1e39]}}}',
        b'{"model":"demo","features":{"user":{"values":[1],"lengths":[2147483648]}}}',
        b'{"model":"demo","features":{"user":{"values":[[1]],"lengths":[1]}}}',
        b'{"model":"demo","features":{"user":{"values":[1],"lengths":[1],"more":[]}}}',
        b'{"model":"demo","features":{"\xff":[[1]]}}',
        b'{"model":"demo","features":{"user":' + b"[" * 2000 + b"]" * 2000 + b"}}",
    ],
)
@pytest.mark.drawn(12)
def test_what_is_no_request(version: ServedVersion, text: bytes) -> None:
    assert v1_request.read(text, False) is None
    with pytest.raises(ApiError):
        laid_out_slowly(version, text)


@pytest.mark.parametrize("seed", range(4))
def test_texts_with_other_bytes(version: ServedVersion, seed: int) -> None:
    """Some bytes of a request are replaced, left out or doubled."""
    rng = np.random.default_rng(seed)
    jagged_user = {"user": jagged(GOOD["user"], weights=True), "item": GOOD["item"]}
    texts = [text_of(GOOD, found=True), text_of(jagged_user, version=None)]
    for _ in range(500):
        text = bytearray(texts[rng.integers(2)])
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(text)))
            text[at : at + int(rng.integers(2))] = rng.choice(
                list(b'{}[],:"0123456789.-e\\nul '), 1
            ).tobytes()[:1]
        compare(version, bytes(text))


def test_a_request_is_laid_out_once(version: ServedVersion) -> None:
    came = v1_request.read(text_of(GOOD), False)
    assert came is not None
    assert v1_request.lay_out(version, came) is not None
    assert v1_request.lay_out(version, came) is None


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
@pytest.mark.drawn(0.5)
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
    more: dict[str, Any] = {"found": True} if data.draw(st.booleans()) else {}
    compare(version, text_of(features, **more))


@pytest.mark.parametrize(("bags", "is_refused"), [(128, False), (129, True)])
def test_answers_beyond_the_limit_say_what_the_limit_is(
    version: ServedVersion, bags: int, is_refused: bool
) -> None:
    """4096 bytes are 128 vectors of 8 fp32 values."""
    found = compare(version, text_of({"user": [[]] * bags}))
    assert ("max_response_bytes" in str(found)) is is_refused


@pytest.mark.parametrize("is_large", [False, True])
def test_long_json_is_read_beside_the_event_loop(
    publish: Publish, root: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 256 KiB, so that health checks do not wait for it; shorter JSON is read where it is."""
    publish({"t": np.ones((10, 8), np.float32)}, features={"user": {"table": "t"}})
    text = orjson.dumps({"model": "demo", "features": {"user": [[1] * (140_000 if is_large else 10)]}})
    assert (len(text) > 1 << 18) == is_large
    read_on: list[str] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": text}

    async def ask() -> bytes:
        service = Service(ServerSettings(root=root, models=("demo",), scrub_hours=0))
        await service.start()
        try:
            read = v1_request.read

            def watched(*arguments: Any) -> Any:
                read_on.append(threading.current_thread().name)
                return read(*arguments)

            monkeypatch.setattr(v1, "read", watched)
            scope = {"type": "http", "headers": [], HOLD: Hold(service.in_flight)}
            return b"".join((await v1.V1(service).answer(scope, receive, False)).parts)
        finally:
            await service.stop()

    assert orjson.loads(asyncio.run(ask()))["vectors"]["user"] == [[140_000.0 if is_large else 10.0] * 8]
    assert [name.startswith("tableside-beside") for name in read_on] == [is_large]


@pytest.mark.parametrize(
    ("lengths", "wrong"),
    [
        ([1, 3], "the 2 lengths add up to 4, but there are 2 ids"),
        ([3, -1], "length -1 at position 1 is negative"),
    ],
)
def test_lengths_of_unpooled_features_are_checked(
    version: ServedVersion, lengths: list[int], wrong: str
) -> None:
    """No kernel reads them: by those who say what is wrong, over both protocols."""
    given = {"values": ("INT64", [1, 2]), "lengths": ("INT32", lengths)}
    with pytest.raises(ApiError, match=f"feature 'words': {wrong}"):
        laid_out_slowly(version, text_of({"words": {part: data for part, (_, data) in given.items()}}))
    inputs = [
        {"name": f"words.{part}", "datatype": datatype, "shape": [2], "data": data}
        for part, (datatype, data) in given.items()
    ]
    with pytest.raises(ApiError, match=f"feature 'words': {wrong}"):
        v2_request.understand(version, {"inputs": inputs}, b"")


@pytest.mark.parametrize("form", [list, jagged], ids=["bags", "jagged"])
def test_scores_are_the_same_whatever_the_form(version: ServedVersion, form: Callable[[Any], Any]) -> None:
    features = {"user": [[1, 2], [3]], "item": [[4], []]}
    dense = {"context": [[0.5, 1, 2], [3, 4, 5]]}
    text = text_of({name: form(bags) for name, bags in features.items()}, dense=dense)
    found, expected = laid_out(version, text, score=True), laid_out_slowly(version, text, score=True)
    assert found is not None
    assert found.request.scoring is not None and expected.request.scoring is not None
    names = names_of(version)
    both = [
        _reader.vectors(names, one.request.places, one.request.run(one.inputs)) for one in (found, expected)
    ]
    assert both[0] == both[1]
    at = int(matrices_in(found.request.scoring.sources)[1][1])
    np.testing.assert_array_equal(np.frombuffer(found.inputs, np.float32, 6, at), [0.5, 1, 2, 3, 4, 5])


def test_vectors_come_back_as_they_are(version: ServedVersion) -> None:
    """Each number of the JSON is the shortest that reads as the vector's fp32."""
    found = laid_out(version, text_of(GOOD))
    assert found is not None
    buffer = found.request.run(found.inputs)
    sent = orjson.loads(b"".join(v1_request.encode(version, names_of(version), found, Answer(buffer))))[
        "vectors"
    ]
    slow = laid_out_slowly(version, text_of(GOOD)).request
    for output in slow.outputs:
        np.testing.assert_array_equal(
            np.array(sent[output.feature], np.float32).reshape(output.shape), output.view(buffer)
        )
    assert all(repr(np.float32(x)) == f"np.float32({x!r})" for x in sent["user"][0])


@pytest.mark.parametrize(
    "dense",
    [
        {},
        {"context": []},
        {"context": [[1, 2, 3]]},
        {"context": [[1, 2]], "more": []},
        {"context": [[1, 2, 3], [4, 5]]},
        {"context": [[1, 2], [4, 5]]},
        {"context": [[1, 2, 1e39], [4, 5, 6]]},
        {"context": [1, 2, 3]},
        {"user": [[1, 2, 3], [1, 2, 3]]},
    ],
)
@pytest.mark.drawn(4)
def test_dense_inputs_that_are_wrong(version: ServedVersion, dense: Any) -> None:
    text = text_of({"user": [[1, 2], [3]], "item": [[4], []]}, dense=dense)
    assert laid_out(version, text, score=True) is None
    with pytest.raises(ApiError):
        laid_out_slowly(version, text, score=True)


# ---- string ids ----
