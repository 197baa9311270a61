"""The client over asyncio: `serving.client.client` for one event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from tableside.serving.client import streams
from tableside.serving.client.address import Address
from tableside.serving.client.attempts import Attempts
from tableside.serving.client.base import BaseClient, HowToAsk, HowToGather, HowToScore
from tableside.serving.client.calls import LookedUp
from tableside.serving.client.keyed import KeyedJagged, KeyedVectors
from tableside.serving.client.messages import Call
from tableside.serving.client.types import (
    AnyTensor,
    Features,
    Mask,
    ModelInfo,
    ModelMetadata,
    Scores,
    TensorFeatures,
    Vectors,
)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class AsyncClient(BaseClient[streams.StreamPool]):
    """`Client` for one event loop: the same calls, awaited; at most 100 run at a time.

        async with AsyncClient() as client:
            vectors = await client.lookup("ads", {"clicked": [[1, 2, 3], [7]]})
            many = await asyncio.gather(*(client.lookup("ads", {"user": [[n]]}) for n in range(8)))

    It belongs to the loop that it is first awaited in.
    """

    def _open(self, address: Address, timeout_s: float) -> streams.StreamPool:
        return streams.StreamPool(address)

    @overload
    async def lookup(
        self,
        model: str,
        features: TensorFeatures,
        *,
        found: Literal[False] = False,
        **how: Unpack[HowToAsk],
    ) -> "dict[str, Tensor]": ...

    @overload
    async def lookup(
        self, model: str, features: TensorFeatures, *, found: Literal[True], **how: Unpack[HowToAsk]
    ) -> "LookedUp[dict[str, Tensor], Tensor]": ...

    @overload
    async def lookup(
        self, model: str, features: Features, *, found: Literal[False] = False, **how: Unpack[HowToAsk]
    ) -> dict[str, Vectors]: ...

    @overload
    async def lookup(
        self, model: str, features: Features, *, found: Literal[True], **how: Unpack[HowToAsk]
    ) -> LookedUp[dict[str, Vectors], Mask]: ...

    @overload
    async def lookup(
        self, model: str, features: KeyedJagged, *, found: Literal[False] = False, **how: Unpack[HowToAsk]
    ) -> KeyedVectors: ...

    @overload
    async def lookup(
        self, model: str, features: KeyedJagged, *, found: Literal[True], **how: Unpack[HowToAsk]
    ) -> "LookedUp[KeyedVectors, Tensor]": ...

    async def lookup(
        self,
        model: str,
        features: Features | KeyedJagged,
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: bool = False,
    ) -> Any:
        """As Client.lookup."""
        return await self._run(self._calls.lookup(model, features, outputs, version, compact, found))

    @overload
    async def score(
        self,
        model: str,
        features: TensorFeatures,
        dense: Mapping[str, Any] | None = None,
        **how: Unpack[HowToScore],
    ) -> "Tensor": ...

    @overload
    async def score(
        self,
        model: str,
        features: Features,
        dense: Mapping[str, AnyTensor],
        **how: Unpack[HowToScore],
    ) -> "Tensor": ...

    @overload
    async def score(
        self,
        model: str,
        features: Features,
        dense: Mapping[str, Any] | None = None,
        **how: Unpack[HowToScore],
    ) -> Scores: ...

    async def score(
        self,
        model: str,
        features: Features,
        dense: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        compact: bool | None = None,
    ) -> Any:
        """As Client.score."""
        return await self._run(self._calls.score(model, features, dense, version, compact))

    @overload
    async def gather(
        self, model: str, feature: str, ids: AnyTensor, **how: Unpack[HowToGather]
    ) -> "Tensor": ...

    @overload
    async def gather(self, model: str, feature: str, ids: Any, **how: Unpack[HowToGather]) -> Vectors: ...

    async def gather(
        self, model: str, feature: str, ids: Any, *, at_once: int = 16384, version: int | None = None
    ) -> Any:
        """As Client.gather."""
        return await self._run(self._calls.gather(model, feature, ids, at_once, version))

    async def models(self) -> list[ModelInfo]:
        """As Client.models."""
        return await self._run(self._calls.models())

    async def metadata(self, model: str) -> ModelMetadata:
        """As Client.metadata."""
        return await self._run(self._calls.metadata(model))

    async def metrics(self) -> str:
        """As Client.metrics."""
        return await self._run(self._calls.metrics())

    async def is_ready(self) -> bool:
        """As Client.is_ready."""
        return await self._run(self._calls.is_ready())

    async def _run(self, call: Call[T]) -> T:
        attempts = Attempts(self._options)
        try:
            request = next(call)
            while True:
                try:
                    response = await self._pool.send(request, attempts)
                except OSError as error:
                    if (refusal := attempts.failed(error)) is not None:
                        request = call.throw(refusal)
                    continue
                if (pause := attempts.pause_s(request, response)) is None:
                    request = call.send(response)
                else:
                    await asyncio.sleep(pause)
        except StopIteration as end:
            found: T = end.value
            return found

    async def close(self) -> None:
        self._pool.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
