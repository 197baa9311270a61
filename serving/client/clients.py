"""The two clients: the same calls over blocking sockets and over asyncio.

A lookup changes nothing. So it is tried again, up to `retries` times, where a connection broke because a
worker was replaced.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from tableside.serving.client import sockets, streams
from tableside.serving.client.address import Address
from tableside.serving.client.calls import AnsweredBy, Calls, answered_by
from tableside.serving.client.features import Ids
from tableside.serving.client.found import LookedUp
from tableside.serving.client.keyed import KeyedJagged, KeyedVectors
from tableside.serving.client.messages import Call

T = TypeVar("T")


class Client:
    """A client of one server. Any thread may call: each call has a connection for itself, which later calls
    use again.

    base_url: http, https, or unix:PATH for a Unix socket; None: TABLESIDE_URL of the environment, else port
    8000 of this machine. timeout_s: of making a connection, and of each wait for the server. retries: how
    often a request is sent again where its connection broke; not where it timed out. headers: sent with every
    request, such as Authorization. ca: a PEM file of the authorities that https trusts; None: the system's.
    Proxies that the environment names are not used. Close it, or use it as a context manager. ValueError:
    base_url, headers or ca cannot be used.
    """

    def __init__(
        self,
        base_url: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        *,
        headers: Mapping[str, str] | None = None,
        ca: str | Path | None = None,
    ) -> None:
        address = Address.parse(base_url, headers, ca)
        self._calls = Calls(address.base_url, retries)
        self._pool = sockets.SocketPool(address, timeout_s)

    @overload
    def lookup(
        self,
        model: str,
        features: Mapping[str, Ids],
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: Literal[False] = False,
    ) -> dict[str, Any]: ...

    @overload
    def lookup(
        self,
        model: str,
        features: Mapping[str, Ids],
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: Literal[True],
    ) -> LookedUp[dict[str, Any]]: ...

    @overload
    def lookup(
        self,
        model: str,
        features: KeyedJagged,
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: Literal[False] = False,
    ) -> KeyedVectors: ...

    @overload
    def lookup(
        self,
        model: str,
        features: KeyedJagged,
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: Literal[True],
    ) -> LookedUp[KeyedVectors]: ...

    def lookup(
        self,
        model: str,
        features: Mapping[str, Ids] | KeyedJagged,
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: bool = False,
    ) -> Any:
        """feature -> vectors: fp32 or fp16 [bags, dim], [ids, dim] where the feature is not pooled.

        features: name -> an integer array or tensor [bags, ids a bag], a list of bags, or Jagged(values,
        lengths, weights). The vectors are torch tensors where any ids are; all of a response share its
        memory. Or TorchRec's KeyedJaggedTensor: then the answer is KeyedVectors, of a KeyedTensor and
        JaggedTensors. outputs: the features whose vectors are wanted; None: all. compact: whether all
        features go in two tensors, which takes less time the more features there are. None: where they are
        many, and all jagged with the same number of bags. The first time the model's metadata is read for it.
        found: whether to say which ids the tables have as well: then the answer is LookedUp(vectors, found).
        FeatureError: ids are no integers, have another shape, or cannot go in the compact form that was asked
        for. ClientError: the server refused, with its message.
        """
        return self._run(self._calls.lookup(model, features, outputs, version, compact, found))

    def score(
        self,
        model: str,
        features: Mapping[str, Ids],
        dense: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        compact: bool | None = None,
    ) -> Any:
        """The scores of a model that has a scorer: fp32 [batch], or [batch, n].

        features: as for `lookup`, with one bag for each row. dense: name -> [batch, n]. The scores are a
        torch tensor where any input is.
        """
        return self._run(self._calls.score(model, features, dense, version, compact))

    @staticmethod
    def answered_by() -> AnsweredBy:
        """The state, version and sequence, that answered the last lookup or score of this thread.
        ClientError: none was yet."""
        return answered_by()

    def models(self) -> list[dict[str, Any]]:
        """The models that the server serves, each with its versions, tables, features and bytes."""
        return self._run(self._calls.models())

    def metadata(self, model: str) -> dict[str, Any]:
        """The model's inputs and outputs, as the protocol describes them."""
        return self._run(self._calls.metadata(model))

    def metrics(self) -> str:
        """The text of /metrics."""
        return self._run(self._calls.metrics())

    def is_ready(self) -> bool:
        """Whether the server answers and takes requests."""
        return self._run(self._calls.is_ready())

    def _run(self, call: Call[T]) -> T:
        try:
            request = next(call)
            while True:
                try:
                    response = self._pool.send(request)
                except OSError as error:
                    request = call.throw(error)
                else:
                    request = call.send(response)
        except StopIteration as end:
            found: T = end.value
            return found

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for the tasks of one event loop: the same calls, awaited. At most 100 of them are under way
    at a time."""

    def __init__(
        self,
        base_url: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        *,
        headers: Mapping[str, str] | None = None,
        ca: str | Path | None = None,
    ) -> None:
        address = Address.parse(base_url, headers, ca)
        self._calls = Calls(address.base_url, retries)
        self._pool = streams.StreamPool(address, timeout_s)

    @overload
    async def lookup(
        self,
        model: str,
        features: Mapping[str, Ids],
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: Literal[False] = False,
    ) -> dict[str, Any]: ...

    @overload
    async def lookup(
        self,
        model: str,
        features: Mapping[str, Ids],
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: Literal[True],
    ) -> LookedUp[dict[str, Any]]: ...

    @overload
    async def lookup(
        self,
        model: str,
        features: KeyedJagged,
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: Literal[False] = False,
    ) -> KeyedVectors: ...

    @overload
    async def lookup(
        self,
        model: str,
        features: KeyedJagged,
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: Literal[True],
    ) -> LookedUp[KeyedVectors]: ...

    async def lookup(
        self,
        model: str,
        features: Mapping[str, Ids] | KeyedJagged,
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: bool = False,
    ) -> Any:
        """As Client.lookup."""
        return await self._run(self._calls.lookup(model, features, outputs, version, compact, found))

    async def score(
        self,
        model: str,
        features: Mapping[str, Ids],
        dense: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        compact: bool | None = None,
    ) -> Any:
        """As Client.score."""
        return await self._run(self._calls.score(model, features, dense, version, compact))

    @staticmethod
    def answered_by() -> AnsweredBy:
        """As Client.answered_by, of this task."""
        return answered_by()

    async def models(self) -> list[dict[str, Any]]:
        """As Client.models."""
        return await self._run(self._calls.models())

    async def metadata(self, model: str) -> dict[str, Any]:
        """As Client.metadata."""
        return await self._run(self._calls.metadata(model))

    async def metrics(self) -> str:
        """As Client.metrics."""
        return await self._run(self._calls.metrics())

    async def is_ready(self) -> bool:
        """As Client.is_ready."""
        return await self._run(self._calls.is_ready())

    async def _run(self, call: Call[T]) -> T:
        try:
            request = next(call)
            while True:
                try:
                    response = await self._pool.send(request)
                except OSError as error:
                    request = call.throw(error)
                else:
                    request = call.send(response)
        except StopIteration as end:
            found: T = end.value
            return found

    async def close(self) -> None:
        self._pool.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
