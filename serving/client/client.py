"""The client over blocking sockets. A call on a broken connection is retried."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from tableside.serving.client import sockets
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


class Client(BaseClient[sockets.SocketPool]):
    """A client of one server. Any thread may call. Close it, or use it as a context manager.

    base_url: http, https, or unix:PATH; None: TABLESIDE_URL of the environment, else port 8000 of this host.
    timeout_s: of connecting, and of each wait. retries: after a broken connection, not after a timeout.
    deadline_s: of a whole call; with one, a server that is too busy is asked again as well, when it says
    (Retry-After), if that is in time; None: any. disk_timeout_s: for which the server waits for rows of a
    disk or another host, 0: takes what is in memory; None: as long as it says. headers: sent with every
    request. ca: a PEM file for https; None: the system's. Proxies of the environment are ignored. ValueError:
    an option cannot be used.

        with Client(retries=3) as client:
            client.lookup("ads", {"clicked": [[1, 2, 3], [7]]})
    """

    def _open(self, address: Address, timeout_s: float) -> sockets.SocketPool:
        return sockets.SocketPool(address, timeout_s)

    @overload
    def lookup(
        self,
        model: str,
        features: TensorFeatures,
        *,
        found: Literal[False] = False,
        **how: Unpack[HowToAsk],
    ) -> "dict[str, Tensor]": ...

    @overload
    def lookup(
        self, model: str, features: TensorFeatures, *, found: Literal[True], **how: Unpack[HowToAsk]
    ) -> "LookedUp[dict[str, Tensor], Tensor]": ...

    @overload
    def lookup(
        self, model: str, features: Features, *, found: Literal[False] = False, **how: Unpack[HowToAsk]
    ) -> dict[str, Vectors]: ...

    @overload
    def lookup(
        self, model: str, features: Features, *, found: Literal[True], **how: Unpack[HowToAsk]
    ) -> LookedUp[dict[str, Vectors], Mask]: ...

    @overload
    def lookup(
        self, model: str, features: KeyedJagged, *, found: Literal[False] = False, **how: Unpack[HowToAsk]
    ) -> KeyedVectors: ...

    @overload
    def lookup(
        self, model: str, features: KeyedJagged, *, found: Literal[True], **how: Unpack[HowToAsk]
    ) -> "LookedUp[KeyedVectors, Tensor]": ...

    def lookup(
        self,
        model: str,
        features: Features | KeyedJagged,
        *,
        outputs: Sequence[str] | None = None,
        version: int | None = None,
        compact: bool | None = None,
        found: bool = False,
    ) -> Any:
        """Returns feature -> vectors, fp32 or fp16 [bags, dim], or [ids, dim] for an unpooled feature.

        features: name -> an array of integers or strings, or a tensor, [bags, ids a bag], a list of bags, or
        Jagged(values, lengths, weights); if any is a torch tensor, so are all vectors, which share memory. Or
        a TorchRec KeyedJaggedTensor: returns KeyedVectors. outputs: the wanted features; None: all. compact:
        send all features in two tensors, which is faster for many; None: do if there are many, all jagged
        with equally many bags. found: return LookedUp(vectors, found), with masks of ids that have rows.
        FeatureError: ids have another type or shape, or do not fit the compact form. ClientError: the server
        refused.

            client.lookup("ads", {"clicked": [[1, 2, 3], [7]]})["clicked"]  # fp32 [2, dim]
            vectors, found = client.lookup("ads", {"user": Jagged([1, 7], [2])}, found=True)
        """
        return self._run(self._calls.lookup(model, features, outputs, version, compact, found))

    @overload
    def score(
        self,
        model: str,
        features: TensorFeatures,
        dense: Mapping[str, Any] | None = None,
        **how: Unpack[HowToScore],
    ) -> "Tensor": ...

    @overload
    def score(
        self,
        model: str,
        features: Features,
        dense: Mapping[str, AnyTensor],
        **how: Unpack[HowToScore],
    ) -> "Tensor": ...

    @overload
    def score(
        self,
        model: str,
        features: Features,
        dense: Mapping[str, Any] | None = None,
        **how: Unpack[HowToScore],
    ) -> Scores: ...

    def score(
        self,
        model: str,
        features: Features,
        dense: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        compact: bool | None = None,
    ) -> Any:
        """Returns a model's scores, fp32 [batch] or [batch, n]; a torch tensor if any input is. features: as
        for `lookup`, one bag a row. dense: name -> [batch, n].

            client.score("ads", {"user": [[1], [2]], "clicked": [[1, 2, 3], [7]]})  # fp32 [2]
        """
        return self._run(self._calls.score(model, features, dense, version, compact))

    @overload
    def gather(self, model: str, feature: str, ids: AnyTensor, **how: Unpack[HowToGather]) -> "Tensor": ...

    @overload
    def gather(self, model: str, feature: str, ids: Any, **how: Unpack[HowToGather]) -> Vectors: ...

    def gather(
        self, model: str, feature: str, ids: Any, *, at_once: int = 16384, version: int | None = None
    ) -> Any:
        """Returns the vector of each id of a long list, [ids, dim], numpy or, as the ids, torch; all of one
        version; `late_rows` counts those of all parts. at_once: ids of a request. FeatureError: the ids are
        not integers or strings [ids]. ValueError: at_once is no number from 1.

            vectors = client.gather("ads", "item", np.arange(1000))
        """
        return self._run(self._calls.gather(model, feature, ids, at_once, version))

    def models(self) -> list[ModelInfo]:
        """The models that the server serves, each with its versions, tables, features and bytes.

            {model["name"]: model["version"] for model in client.models()}

        ClientError: the server refused.
        """
        return self._run(self._calls.models())

    def metadata(self, model: str) -> ModelMetadata:
        """The model's inputs and outputs, as the protocol describes them.

            [one["name"] for one in client.metadata("ads")["inputs"]]

        NotFound: there is no such model.
        """
        return self._run(self._calls.metadata(model))

    def metrics(self) -> str:
        """The text of /metrics.

            [line for line in client.metrics().splitlines() if line.startswith("tableside_ids_total")]

        ClientError: the server refused.
        """
        return self._run(self._calls.metrics())

    def is_ready(self) -> bool:
        """Whether the server answers and takes requests.

            if not client.is_ready():
                raise SystemExit("there is no server")

        False as well where nobody answers.
        """
        return self._run(self._calls.is_ready())

    def _run(self, call: Call[T]) -> T:
        attempts = Attempts(self._options)
        try:
            request = next(call)
            while True:
                try:
                    response = self._pool.send(request, attempts)
                except OSError as error:
                    if (refusal := attempts.failed(error)) is not None:
                        request = call.throw(refusal)
                    continue
                if (pause := attempts.pause_s(request, response)) is None:
                    request = call.send(response)
                else:
                    time.sleep(pause)
        except StopIteration as end:
            found: T = end.value
            return found

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
