"""An unchanged kserve client is a first-class user: health, readiness, lookups with INT64 and INT32 ids in
either encoding."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from servers import TABLES

kserve = pytest.importorskip("kserve", reason="the dev extra brings KServe's client")

IDS = np.array([[1, 2, 3], [5, 5, 999]])


def ask(server: Any, calls: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `calls` returns for a client of the server."""

    async def run() -> Any:
        async with kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2")) as client:
            return await calls(client)

    return asyncio.run(run())


def test_health_is_read_from_the_bodies(server: Any) -> None:
    async def health(client: Any) -> list[Any]:
        found = [await client.is_server_live(server.url), await client.is_server_ready(server.url)]
        return [
            *found,
            await client.is_model_ready(server.url, "demo"),
            await client.is_model_ready(server.url, "nothing"),
        ]

    assert ask(server, health) == [True, True, True, False]


@pytest.mark.parametrize("is_binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_lookups(server: Any, dtype: type, is_binary: bool) -> None:
    """The third request of a header is answered by its template: as the first."""
    asked = kserve.InferInput("user", list(IDS.shape), np.dtype(dtype).name.upper())
    asked.set_data_from_numpy(IDS.astype(dtype), binary_data=is_binary)
    request = kserve.InferRequest(model_name="demo", infer_inputs=[asked], request_id="r1")

    async def lookups(client: Any) -> list[Any]:
        return [await client.infer(server.url, request, model_name="demo") for _ in range(3)]

    for found in ask(server, lookups):
        assert (found.model_name, found.id) == ("demo", "r1")
        np.testing.assert_allclose(found.outputs[0].as_numpy(), TABLES["user"][IDS].sum(1), atol=0.1)


def test_errors_reach_the_user(server: Any) -> None:
    asked = kserve.InferInput("user", [1, 1], "INT32")
    asked.set_data_from_numpy(np.array([[1000]], np.int32), binary_data=True)
    request = kserve.InferRequest(model_name="demo", infer_inputs=[asked])
    with pytest.raises(httpx.HTTPStatusError, match="id 1000 at position 0 is outside the table's rows"):
        ask(server, lambda client: client.infer(server.url, request, model_name="demo"))
