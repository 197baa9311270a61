"""The client: sync and async, numpy, lists and torch, errors."""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tableside.serving.client import AsyncClient, BadRequest, Client, ClientError, FeatureError, Jagged
from tableside.serving.client.features import columns

pytestmark = pytest.mark.quick


def test_lists_arrays_and_jagged_give_the_same(server: Any) -> None:
    with Client(server.url) as client:
        asked = [
            [[1, 2], [3, 4]],
            np.array([[1, 2], [3, 4]], np.int32),
            Jagged([1, 2, 3, 4], [2, 2]),
            Jagged(np.arange(1, 5), np.array([2, 2])),
        ]
        found = [client.lookup("demo", {"user": ids})["user"] for ids in asked]
        assert all(f.shape == (2, 64) and np.array_equal(f, found[0]) for f in found)
        ragged = client.lookup("demo", {"user": [[1, 2], [], [3]]})["user"]
        np.testing.assert_array_equal(ragged[1], np.zeros(64))


def test_weights_unpooled_and_fp16(server: Any) -> None:
    with Client(server.url) as client:
        found = client.lookup(
            "demo", {"text": Jagged([1, 2, 3]), "liked": [[1]], "clicked": Jagged([1, 1], [2], [1.0, -1.0])}
        )
        assert found["text"].shape == (3, 16)
        assert found["liked"].dtype == np.float16
        np.testing.assert_array_equal(found["clicked"], np.zeros((1, 32)))
        assert list(client.lookup("demo", {"user": [[1]], "liked": [[1]]}, outputs=["liked"])) == ["liked"]


def test_torch_in_torch_out(server: Any) -> None:
    with Client(server.url) as client:
        found = client.lookup("demo", {"user": torch.tensor([[1, 2], [3, 4]])})["user"]
        assert isinstance(found, torch.Tensor)
        np.testing.assert_array_equal(
            found.numpy(), client.lookup("demo", {"user": [[1, 2], [3, 4]]})["user"]
        )


def test_async(server: Any) -> None:
    async def run() -> None:
        async with AsyncClient(server.url) as client:
            found = await asyncio.gather(*(client.lookup("demo", {"user": [[i]]}) for i in range(20)))
            assert {f["user"].shape for f in found} == {(1, 64)}
            assert (await client.models())[0]["name"] == "demo"
            assert (await client.metadata("demo"))["platform"] == "tableside"
            assert await client.is_ready()
            with pytest.raises(ClientError, match="404: model 'nope'"):
                await client.lookup("nope", {"user": [[1]]})

    asyncio.run(run())


def test_errors_carry_status_and_message(server: Any) -> None:
    with Client(server.url) as client:
        with pytest.raises(ClientError) as caught:
            client.lookup("demo", {"user": [[1000]]})
        assert caught.value.status == 400
        assert "id 1000 at position 0" in caught.value.message
        with pytest.raises(BadRequest, match="datatype is 'BYTES'; expected INT64"):
            client.lookup("demo", {"user": [["x"]]})
        for bad in ([[1.5]], np.array([[1.0]]), np.array([[True]])):
            with pytest.raises(FeatureError, match="expected int64"):
                client.lookup("demo", {"user": bad})
        with pytest.raises(FeatureError, match=r"user.lengths: values do not fit in int32"):
            client.lookup("demo", {"user": Jagged([1], np.array([2**40]))})
        with pytest.raises(FeatureError, match=r"shape \[3\]; expected \[bags, ids a bag\].*ids\[:, None\]"):
            client.lookup("demo", {"user": np.arange(3)})
        with pytest.raises(FeatureError, match=r"expected a list of bags.*\[\[id\] for id in ids\]"):
            client.lookup("demo", {"user": [1, 2]})
        assert client.lookup("demo", {"user": []})["user"].shape == (0, 64)


def test_no_server_says_so() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert not client.is_ready()
        with pytest.raises(ClientError, match="cannot be reached") as caught:
            client.models()
        assert caught.value.status == 0


COLUMNS = [[1, 2, 3], [7], [], [5, 5]]


def _columns() -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow", reason="the eval extra brings it")
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    lists = pa.array(COLUMNS)
    return {
        "pyarrow": lists,
        "a part of pyarrow's": pa.array([[9], *COLUMNS, [9, 9]]).slice(1, 4),
        "pyarrow's with large offsets": lists.cast(pa.large_list(pa.int32())),
        "pyarrow's in chunks": pa.chunked_array([COLUMNS[:1], COLUMNS[1:]]),
        "polars": pl.Series("x", COLUMNS),
        "pandas": pd.Series(COLUMNS),
        "pandas behind a pickle": pickle.loads(pickle.dumps(pd.Series(COLUMNS))),
        "a class of the user's": type("Mine", (pd.Series,), {})(COLUMNS),
        "pandas over arrow": pd.Series(COLUMNS, dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
    }


def test_columns_of_lists(server: Any) -> None:
    with Client(server.url) as client:
        expected = client.lookup("demo", {"user": COLUMNS})["user"]
        for name, column in _columns().items():
            np.testing.assert_array_equal(client.lookup("demo", {"user": column})["user"], expected, name)
        pa, pl = pytest.importorskip("pyarrow"), pytest.importorskip("polars")
        fixed = [[1, 2], [3, 4]]
        expected = client.lookup("demo", {"user": fixed})["user"]
        for column in (
            pa.array(fixed, pa.list_(pa.int32(), 2)),
            pl.Series(fixed, dtype=pl.Array(pl.Int64, 2)),
        ):
            np.testing.assert_array_equal(client.lookup("demo", {"user": column})["user"], expected)
        for wrong, why in [
            (pa.array([[1, None], [2]]), r"0 lists and 1 ids are null"),
            (pa.array([[1], None]), r"1 lists and 0 ids are null"),
            (pl.Series([1, 2]), r"a column of int64; expected lists of integers or strings"),
            (pa.array([[[1]]]), "object; expected int64"),
            (pl.Series([[0.5]]), "float64; expected int64"),
            (pl.Series([["a"]], dtype=pl.List(pl.Categorical)), "no column of lists of integers"),
            ([[1], [True]], "bools are among the ids"),
            ([np.array(1), np.array(2)], "a bag is no list"),
        ]:
            with pytest.raises(FeatureError, match=f"user.*{why}"):
                client.lookup("demo", {"user": wrong})


def test_the_ids_of_a_column_are_not_copied() -> None:
    pa = pytest.importorskip("pyarrow", reason="the eval extra brings it")
    column = pa.array(COLUMNS)
    values = columns({"user": column}).values[0]
    assert np.shares_memory(values, column.values.to_numpy())


def test_masked_arrays_are_refused(server: Any) -> None:
    """What is masked would be sent as if it were not."""
    masked = np.ma.masked_array([[1, 2]], [[False, True]])
    with Client(server.url) as client:
        for given in (masked, Jagged(masked[0], [2]), Jagged([1, 2], np.ma.masked_array([2]))):
            with pytest.raises(FeatureError, match="a masked array; expected values alone"):
                client.lookup("demo", {"user": given})


def test_bags_of_offsets() -> None:
    """As torch.nn.EmbeddingBag's, with and without the last one."""
    for offsets, is_last, lengths in [
        ([0, 3], False, [3, 1]),
        ([0, 3, 4], True, [3, 1]),
        ([0, 0, 4], False, [0, 4, 0]),
        (torch.tensor([0, 4]), True, [4]),
        (np.array([0], np.int32), False, [4]),
    ]:
        made = Jagged.from_offsets([1, 2, 3, 7], offsets, include_last_offset=is_last)
        assert made.lengths.tolist() == lengths and made.values == [1, 2, 3, 7]
    weighted = Jagged.from_offsets([1], [0], [0.5])
    assert weighted.weights == [0.5] and Jagged.from_offsets([], []).lengths.size == 0
    for values in (None, 7, iter([1])):
        with pytest.raises(FeatureError, match="expected \\[ids\\]"):
            Jagged.from_offsets(values, [0])
    for offsets, is_last in [
        ([1, 3], False), ([0, 5], False), ([0, 3], True), ([0, 3, 2], False), ([], False), ([], True),
        ([[0, 3]], False), ([0.0, 1.5], False), ([0, -1, 4], True),
    ]:  # fmt: skip
        with pytest.raises(FeatureError, match="offsets"):
            Jagged.from_offsets([1, 2, 3, 7], offsets, include_last_offset=is_last)


@pytest.mark.parametrize("feature", ["user", "text"])
def test_a_long_list_of_ids(server: Any, feature: str) -> None:
    """In several requests, pooled or not, into one array."""
    ids = np.random.default_rng(0).integers(0, 50, 1000)
    with Client(server.url) as client:
        expected = client.lookup("demo", {feature: ids[:, None]})[feature]
        for at_once in (1000, 999, 64, 10**6):
            np.testing.assert_array_equal(client.gather("demo", feature, ids, at_once=at_once), expected)
        assert client.gather("demo", feature, ids[:0]).shape == (0, expected.shape[1])
        got = client.gather("demo", feature, torch.from_numpy(ids), version=1)
        assert isinstance(got, torch.Tensor) and np.array_equal(got.numpy(), expected)
        for at_once in (0, -1, 2.5):
            with pytest.raises(ValueError, match="at_once is"):
                client.gather("demo", feature, ids, at_once=at_once)
        for wrong in (ids[:, None], ids * 0.5):
            with pytest.raises(FeatureError, match=rf"{feature}\.ids"):
                client.gather("demo", feature, wrong)

    async def run() -> Any:
        async with AsyncClient(server.url) as client:
            return await client.gather("demo", feature, ids, at_once=300)

    np.testing.assert_array_equal(asyncio.run(run()), expected)
