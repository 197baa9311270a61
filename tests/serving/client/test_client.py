"""The client: sync and async, numpy, lists and torch, errors."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tableside.serving.client import AsyncClient, Client, ClientError, FeatureError, Jagged

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
        for bad in ([[1.5]], np.array([[1.0]]), [["x"]], np.array([[True]])):
            with pytest.raises(FeatureError, match="expected int64"):
                client.lookup("demo", {"user": bad})
        with pytest.raises(FeatureError, match=r"user.lengths: values do not fit in int32"):
            client.lookup("demo", {"user": Jagged([1], np.array([2**40]))})
        with pytest.raises(FeatureError, match=r"user: shape \[3\]; expected \[bags, ids a bag\]"):
            client.lookup("demo", {"user": np.arange(3)})
        with pytest.raises(FeatureError, match="expected a list of bags"):
            client.lookup("demo", {"user": [1, 2]})
        assert client.lookup("demo", {"user": []})["user"].shape == (0, 64)


def test_no_server_says_so() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert not client.is_ready()
        with pytest.raises(ClientError, match="cannot be reached") as caught:
            client.models()
        assert caught.value.status == 0
