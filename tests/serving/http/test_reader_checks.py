"""Each check of the reader in C: what is wrong is left to the words of its specification."""

import numpy as np
import orjson
import pytest
from read_headers import USER, ask, check_alike, of_user, request, tensor

from tableside.serving.http.v2 import _reader
from tableside.serving.model.version import ServedVersion

pytestmark = pytest.mark.quick


def scored(bags: int = 2, rows: int = 2, width: int = 3, weights: int = 4) -> dict[str, np.ndarray]:
    """Features and the dense tensor of the scorer: two ids a bag."""
    ids = np.zeros((bags, 2), np.int64)
    return {
        "user": ids,
        "user.weights": np.ones(weights, np.float32),
        "item": ids,
        "context": np.zeros((rows, width), np.float32),
    }


def together(lengths: list[list[int]], ids: int, weights: int) -> dict[str, np.ndarray]:
    """A kjt of all features but the unpooled one and the half one."""
    return {
        "kjt.values": np.zeros(ids, np.int64),
        "kjt.lengths": np.array(lengths, np.int32),
        "kjt.weights": np.ones(weights, np.float32),
    }


def of_three(header: bytes) -> bytes:
    return header.replace(
        b'"parameters":{"binary_data_output"',
        b'"parameters":{"kjt.features":"user,item,a:b-c","binary_data_output"',
    )


def unpooled(ids: int, lengths: list[int]) -> dict[str, np.ndarray]:
    return {"words.values": np.zeros(ids, np.int64), "words.lengths": np.array(lengths, np.int32)}


LIES: dict[str, tuple[tuple[bytes, int], tuple[bytes, int]]] = {
    "weights that are not the ids'": (request(scored()), request(scored(weights=3))),
    "rows of a dense tensor that are not the bags": (request(scored()), request(scored(rows=3))),
    "a dense tensor of another width": (request(scored()), request(scored(width=4))),
    "more bytes than a response may have": (
        request({"user": np.zeros((2, 0), int)}),
        request({"user": np.zeros((3000, 0), int)}),
    ),
    "a number with a leading zero": (
        request({"user": np.zeros((2, 1), int)}),
        request({"user": np.zeros((2, 1), int)}, lambda h: h.replace(b"[2,", b"[02,")),
    ),
    "a size that is not the shape's": (
        request({"user": np.zeros((2, 1), int)}),
        request({"user": np.zeros((2, 1), int)}, lambda h: h.replace(b"[2,", b"[1,")),
    ),
    "two tensors' sizes exchanged": (
        request({"user": np.zeros((2, 1), int), "item": np.zeros((1, 1), int)}),
        request(
            {"user": np.zeros((2, 1), int), "item": np.zeros((1, 1), int)},
            lambda h: (
                h.replace(b'size":16', b'size":0')
                .replace(b'size":8', b'size":16')
                .replace(b'size":0', b'size":8')
            ),
        ),
    ),
    "a bag of more ids than a length can say": (
        request({"user": np.zeros((0, 1), int)}),
        request({"user": np.zeros((0, 1), int)}, lambda h: h.replace(b"[0,1]", b"[0,2147483648]")),
    ),
    "a kjt's weights that are not its ids'": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[1], [1], [0]], 2, 3), of_three),
    ),
    "a kjt's lengths of fewer ids": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[1], [1], [0]], 3, 3), of_three),
    ),
    "a kjt's lengths of more ids": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[1], [1], [1]], 2, 2), of_three),
    ),
    "a kjt's negative length": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[3], [-1], [0]], 2, 2), of_three),
    ),
    "a kjt of another number of features": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[1], [1]], 2, 2), of_three),
    ),
    "an unpooled feature's lengths that do not add up": (
        request(unpooled(2, [1, 1])),
        request(unpooled(2, [1, 2])),
    ),
    "an unpooled feature's negative length": (request(unpooled(2, [1, 1])), request(unpooled(2, [3, -1]))),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_wrong_is_not_taken(version: ServedVersion, lie: str) -> None:
    """The true request is taken, the false one is left to the specification's words."""
    true, false = LIES[lie]
    assert check_alike(version, *true)
    assert not check_alike(version, *false)


WRONG: dict[str, tuple[bytes, int]] = {
    "no inputs": ask([]),
    "inputs that are no list": ask({"a": USER}),
    "an input that is no object": ask([[USER]]),
    "a name that is no string": ask([{**USER, "name": 5}]),
    "an unknown feature": ask([{**USER, "name": "usr"}]),
    "a part of an unknown feature": ask([tensor("usr.values", [1])]),
    "an unknown part": ask([{**USER, "name": "user.ids"}]),
    "a part of a dense tensor": ask([tensor("context.values", [1])]),
    "no name before the dot": ask([tensor(".values", [1])]),
    "no datatype": ask([{k: v for k, v in USER.items() if k != "datatype"}]),
    "ids that are FP32": ask([{**USER, "datatype": "FP32"}]),
    "lengths that are INT64": ask([tensor("user.values", [1]), tensor("user.lengths", [1])]),
    "weights that are INT32": ask([USER, tensor("user.weights", [1, 2], "INT32")]),
    "a dense tensor of ids": ask([USER, tensor("context", [1, 2, 3], "INT64", [1, 3])]),
    "a shape that is no list": ask([{**USER, "shape": 2}]),
    "no dimension": ask([{**USER, "shape": []}]),
    "three dimensions": ask([{**USER, "shape": [1, 2, 1]}]),
    "a dimension that is a fraction": ask([{**USER, "shape": [1, 2.0]}]),
    "a dimension that is true": ask([{**USER, "shape": [True, 2]}]),
    "a negative dimension": ask([{**USER, "shape": [-1, 2]}]),
    "a dimension above 2**40": ask([{**USER, "shape": [2**40, 0], "data": []}]),
    "sizes that overflow": ask([{**USER, "shape": [2**39, 2**39]}]),
    "more numbers than the shape says": ask([{**USER, "data": [1, 2, 3]}]),
    "fewer numbers than the shape says": ask([{**USER, "data": [1]}]),
    "a shape of far more numbers than come": ask([{**USER, "shape": [2**30, 2**9], "data": [1]}]),
    "data that is no list": ask([{**USER, "data": {"a": 1}}]),
    "lists and numbers in one": ask([{**USER, "data": [[1], 2]}]),
    "numbers and lists in one": ask([{**USER, "data": [1, [2]]}]),
    "lists of lists of lists": ask([{**USER, "data": [[[1], [2]]]}]),
    "an id that is a fraction": ask([{**USER, "data": [1, 2.5]}]),
    "an id that is 1.0": ask([{**USER, "data": [1, 1.0]}]),
    "an id that is a string": ask([{**USER, "data": [1, "2"]}]),
    "an id that is true": ask([{**USER, "data": [1, True]}]),
    "an id beyond int64": ask([{**USER, "data": [1, 2**63]}]),
    "an id below int64": ask([{**USER, "data": [1, 2.0**70]}]),
    "an id beyond INT32": ask([{**USER, "datatype": "INT32", "data": [1, 2**31]}]),
    "a length beyond INT32": ask([tensor("user.values", [1]), tensor("user.lengths", [2**31], "INT32")]),
    "a weight beyond fp32": ask([USER, tensor("user.weights", [1, 1e39], "FP32")]),
    "parameters that are no object": ask([{**USER, "parameters": None}]),
    "data and a size": ask([{**USER, "parameters": {"binary_data_size": 16}}]),
    "neither data nor a size": ask([{**USER, "data": 0, "parameters": {}}]),
    "a size that is no number": (
        ask([{k: v for k, v in USER.items() if k != "data"} | {"parameters": {"binary_data_size": "16"}}])
    ),
    "one tensor in the body, one in the JSON": request(
        {"item": np.ones((1, 1), int)}, lambda h: h.replace(b"[{", b"[" + orjson.dumps(USER) + b",{", 1)
    ),
    "bytes that no tensor has": (
        orjson.dumps({"inputs": [USER]}) + b"12345678",
        len(orjson.dumps({"inputs": [USER]})),
    ),
    "a tensor twice": ask([USER, USER]),
    "ids and values": ask([USER, tensor("user.values", [1, 2])]),
    "ids and lengths": ask([USER, tensor("user.lengths", [2], "INT32")]),
    "ids of one dimension": ask([{**USER, "shape": [2]}]),
    "values of two dimensions": ask([tensor("words.values", [1, 2], shape=[1, 2])]),
    "lengths of two dimensions": ask(
        [tensor("user.values", [1, 2]), tensor("user.lengths", [2], "INT32", [1, 1])]
    ),
    "lengths alone": ask([tensor("user.lengths", [2], "INT32")]),
    "a pooled feature without lengths": ask([tensor("user.values", [1])]),
    "weights of an unpooled feature": ask(
        [tensor("words.values", [1]), tensor("words.weights", [1], "FP32")]
    ),
    "a dense tensor alone": ask([tensor("context", [1, 2, 3], "FP32", [1, 3])]),
    "a dense tensor of one dimension": ask([USER, tensor("context", [1, 2, 3], "FP32")]),
    "a dense tensor twice": ask([USER, *[tensor("context", [1, 2, 3], "FP32", [1, 3])] * 2]),
    "a kjt beside a feature": ask(
        [USER, tensor("kjt.values", []), tensor("kjt.lengths", [], "INT32", [5, 0])]
    ),
    "a kjt without lengths": ask([tensor("kjt.values", [])]),
    "a kjt without values": ask([tensor("kjt.lengths", [], "INT32", [5, 0])]),
    "a kjt of two precisions": ask([tensor("kjt.values", []), tensor("kjt.lengths", [], "INT32", [5, 0])]),
    **{
        f"a kjt's features that are {what}": ask(
            [tensor("kjt.values", []), tensor("kjt.lengths", [], "INT32", [2, 0])],
            parameters={"kjt.features": names},
        )
        for what, names in {
            "no names": 5,
            "none": [],
            "named twice": ["user", "user"],
            "unknown": ["user", "usr"],
            "numbers": ["user", 1],
            "an empty name": "user,",
            "three": "user,item,a:b-c",
            "weighted and not pooled": None,
        }.items()
    },
    "a kjt's other schema": ask(
        [tensor("kjt.values", []), tensor("kjt.lengths", [], "INT32", [1, 0])],
        parameters={"kjt.features": "user", "kjt.schema": "0" * 16},
    ),
    "a kjt's weights where one is not pooled": ask(
        [
            tensor("kjt.values", []),
            tensor("kjt.lengths", [], "INT32", [2, 0]),
            tensor("kjt.weights", [], "FP32"),
        ],
        parameters={"kjt.features": "user,words"},
    ),
    "outputs that are no list": ask([USER], outputs={}),
    "outputs that are null": ask([USER], outputs=None),
    "an output that is no object": ask([USER], outputs=["user"]),
    "an output without a name": ask([USER], outputs=[{}]),
    "an output that is unknown": ask([USER], outputs=[{"name": "usr"}]),
    "an output without its input": ask([USER], outputs=[{"name": "item"}]),
    "a mask without its input": ask([USER], outputs=[{"name": "item.found"}]),
    "a mask of nothing": ask([USER], outputs=[{"name": ".found"}]),
    "a kjt's output of named features": ask([USER], outputs=[{"name": "kjt"}]),
    "an output twice": ask([USER], outputs=[{"name": "user"}, {"name": "user"}]),
    "a classification": ask([USER], outputs=[{"name": "user", "parameters": {"classification": 3}}]),
    "a flag that is no flag": ask([USER], outputs=[{"name": "user", "parameters": {"binary_data": 1}}]),
    "an output's parameters that are no object": ask([USER], outputs=[{"name": "user", "parameters": []}]),
    "a default that is no flag": ask([USER], parameters={"binary_data_output": 1}),
    "a timeout that is no number": ask([USER], parameters={"timeout": "5"}),
    "a timeout that is negative": ask([USER], parameters={"timeout": -1}),
    "the request's parameters that are no object": ask([USER], parameters=[]),
    "scores without their inputs": ask([USER], outputs=[{"name": "score"}]),
    "an id that is no string": ask([USER], id=5),
    "a region": ask(
        [USER],
        outputs=[
            {"name": "user", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64}}
        ],
    ),
    "a list": (b"[]", 2),
    "two objects": (b"{}{}", 4),
    "nothing": (b"", 0),
    "text that is no UTF-8": (b'{"inputs":[],"\xff":1}', 19),
    "a byte order mark": (b"\xef\xbb\xbf{}", 5),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_are_not_taken(version: ServedVersion, case: str) -> None:
    assert not check_alike(version, *WRONG[case])


@pytest.mark.parametrize(
    "arguments",
    [
        (b"x",),
        (b"12345678", b""),
        (np.full(8, -1, np.int64).tobytes(), b""),
        (np.array([1, 0, 0, 0, 0, 0, 0, 9], np.int64).tobytes(), b""),
        (np.array([2**40, 0, 0, 0, 0, 0, 0, 9], np.int64).tobytes(), b""),
        (np.array([0, 0, 1, 0, 0, 0, 0, 9, 0, 0, 0], np.int64).tobytes(), b""),
        (np.array([0, 0, 0, 0, 0, 0, 0, 9, 5, 0], np.int64).tobytes(), b"1234"),
    ],
)
def test_words_that_are_no_names_are_refused(arguments: tuple[bytes, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        _reader.names(*arguments)


def test_arguments_of_the_reader_are_checked(version: ServedVersion) -> None:
    names = _reader.names(np.array([0, 0, 0, 0, 0, 0, 0, 9, 0, 0], np.int64).tobytes(), b"")
    for wrong in ((names, b"", b"{}", 3, None, None), (names, b"", b"{}", -1, None, None)):
        with pytest.raises(ValueError, match="the header is longer than the body"):
            _reader.read(*wrong)
    with pytest.raises(ValueError, match="an argument is missing"):
        _reader.read(names, b"", b"{}", 2, b"", None)
    with pytest.raises(TypeError):
        _reader.read(names, b"", "{}", 2, None, None)
    with pytest.raises(ValueError):
        _reader.read(object(), b"", b"{}", 2, None, None)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, -np.float32(np.nan)])
def test_weights_that_are_no_numbers_are_not_taken(version: ServedVersion, weight: float) -> None:
    """In named tensors and in a kjt."""
    for feature, shape in (("user", (1,)), ("kjt", (1, 1))):
        for last, is_taken in ((2.0, True), (weight, False)):
            tensors = {
                f"{feature}.values": np.array([1, 2]),
                f"{feature}.lengths": np.full(shape, 2, np.int32),
                f"{feature}.weights": np.array([1, last], np.float32),
            }
            body, size = request(tensors, of_user if feature == "kjt" else bytes)
            assert check_alike(version, body, size) is is_taken
