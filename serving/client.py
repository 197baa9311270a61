"""The client, sync and async: ids in, vectors out, numpy or torch, over the binary protocol.

    from tableside import Client, Jagged

    with Client("http://127.0.0.1:8000") as client:
        vectors = client.lookup("demo", {"clicked": [[1, 2, 3], [7]], "user": Jagged(ids, lengths)})

A lookup changes nothing. So it is tried again, up to `retries` times, where a connection broke because a worker was replaced.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from tableside.loader.model import SCORE
from tableside.serving import wire
from tableside.serving.wire import FeatureError, Ids, Jagged

__all__ = ["AsyncClient", "Client", "ClientError", "FeatureError", "Jagged"]


class ClientError(Exception):
    """The server refused a request. status: of the HTTP response; 0: the server could not be reached."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message if status == 0 else f"{status}: {message}")
        self.status, self.message = status, message


def _path(model: str, version: int | None) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version is not None else "")


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        message = str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = response.text or response.reason_phrase
    raise ClientError(response.status_code, message)


def _vectors(response: httpx.Response, features: Mapping[str, Ids]) -> dict[str, Any]:
    """Vectors as numpy arrays, or as torch tensors where any of the ids came as one."""
    _, vectors = wire.decode(_checked(response).headers.get(wire.HEADER_LENGTH), response.content)
    if not any(wire.is_torch(value) for value in features.values()):
        return dict(vectors)
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in vectors.items()}


def _unreachable(error: httpx.TransportError, base_url: str) -> ClientError:
    return ClientError(0, f"{base_url} cannot be reached ({error!r}); is `tableside serve` running there?")


class Client:
    """A client of one server, with a connection pool. Any thread may call. Close it, or use it as a context manager."""

    def __init__(self, base_url: str = "http://127.0.0.1:8000", timeout_s: float = 10.0, retries: int = 2) -> None:
        self._base_url, self._retries = base_url, max(0, retries)
        self._http = httpx.Client(base_url=base_url, timeout=timeout_s, trust_env=False)

    def lookup(
        self,
        model: str,
        features: Mapping[str, Ids],
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
    ) -> dict[str, Any]:
        """feature -> vectors: fp32 or fp16 [bags, dim], [ids, dim] where the feature is not pooled.

        features: name -> an integer array or tensor [bags, ids a bag], a list of bags, or Jagged(values, lengths, weights). The
        vectors are torch tensors where any ids are. FeatureError: ids are no integers, or have another shape. ClientError: the
        server refused, with its message.
        """
        headers, body = wire.encode(features, outputs)
        response = self._send("POST", f"{_path(model, version)}/infer", headers=headers, content=body)
        return _vectors(response, features)

    def score(
        self,
        model: str,
        features: Mapping[str, Ids],
        dense: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
    ) -> Any:
        """The scores of a model that has a scorer: fp32 [batch], or [batch, n].

        features: as for `lookup`, with one bag for each row. dense: name -> [batch, n]. The scores are a torch tensor where any
        input is.
        """
        headers, body = wire.encode(features, [SCORE], dense)
        response = self._send("POST", f"{_path(model, version)}/infer", headers=headers, content=body)
        return _vectors(response, {**features, **(dense or {})})[SCORE]

    def models(self) -> list[dict[str, Any]]:
        """The models that the server serves, each with its versions, tables, features and bytes."""
        return list(_checked(self._send("GET", "/v1/models")).json()["models"])

    def metadata(self, model: str) -> dict[str, Any]:
        """The model's inputs and outputs, as the protocol describes them."""
        return dict(_checked(self._send("GET", _path(model, None))).json())

    def is_ready(self) -> bool:
        """Whether the server answers and takes requests."""
        try:
            return self._http.get("/v2/health/ready").is_success
        except httpx.TransportError:
            return False

    def metrics(self) -> str:
        """The text of /metrics."""
        return _checked(self._send("GET", "/metrics")).text

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        for attempt in range(self._retries + 1):
            try:
                return self._http.request(method, path, **options)
            except httpx.TransportError as error:
                if attempt == self._retries or isinstance(error, httpx.TimeoutException):
                    raise _unreachable(error, self._base_url) from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio: the same calls, awaited."""

    def __init__(self, base_url: str = "http://127.0.0.1:8000", timeout_s: float = 10.0, retries: int = 2) -> None:
        self._base_url, self._retries = base_url, max(0, retries)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout_s, trust_env=False)

    async def lookup(
        self,
        model: str,
        features: Mapping[str, Ids],
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
    ) -> dict[str, Any]:
        """As Client.lookup."""
        headers, body = wire.encode(features, outputs)
        response = await self._send("POST", f"{_path(model, version)}/infer", headers=headers, content=body)
        return _vectors(response, features)

    async def score(
        self,
        model: str,
        features: Mapping[str, Ids],
        dense: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
    ) -> Any:
        """The scores of a model that has a scorer: fp32 [batch], or [batch, n].

        features: as for `lookup`, with one bag for each row. dense: name -> [batch, n]. The scores are a torch tensor where any
        input is.
        """
        headers, body = wire.encode(features, [SCORE], dense)
        response = await self._send("POST", f"{_path(model, version)}/infer", headers=headers, content=body)
        return _vectors(response, {**features, **(dense or {})})[SCORE]

    async def models(self) -> list[dict[str, Any]]:
        """As Client.models."""
        return list(_checked(await self._send("GET", "/v1/models")).json()["models"])

    async def metadata(self, model: str) -> dict[str, Any]:
        """As Client.metadata."""
        return dict(_checked(await self._send("GET", _path(model, None))).json())

    async def metrics(self) -> str:
        """As Client.metrics."""
        return _checked(await self._send("GET", "/metrics")).text

    async def is_ready(self) -> bool:
        """As Client.is_ready."""
        try:
            return (await self._http.get("/v2/health/ready")).is_success
        except httpx.TransportError:
            return False

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        for attempt in range(self._retries + 1):
            try:
                return await self._http.request(method, path, **options)
            except httpx.TransportError as error:
                if attempt == self._retries or isinstance(error, httpx.TimeoutException):
                    raise _unreachable(error, self._base_url) from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
