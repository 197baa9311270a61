"""The client, sync and async: ids in, vectors out, numpy, torch or TorchRec, over the binary protocol.

    from tableside import Client, Jagged
    with Client("http://127.0.0.1:8000") as client:
        vectors = client.lookup("demo", {"clicked": [[1, 2, 3], [7]], "user": Jagged(ids, lengths)})

A call is a generator in `calls`: it yields requests, takes responses and returns the result. `Client` runs it
over blocking sockets, `AsyncClient` over asyncio. `named` and `compact` are the two forms on the wire.
"""

from tableside.serving.client.async_client import AsyncClient
from tableside.serving.client.calls import LookedUp
from tableside.serving.client.client import Client
from tableside.serving.client.features import Jagged
from tableside.serving.client.keyed import KeyedVectors
from tableside.serving.client.messages import (
    BadRequest,
    ClientError,
    Denied,
    FeatureError,
    NotFound,
    Overloaded,
    TimedOut,
    Unreachable,
)

__all__ = [
    "AsyncClient",
    "BadRequest",
    "Client",
    "ClientError",
    "Denied",
    "FeatureError",
    "Jagged",
    "KeyedVectors",
    "LookedUp",
    "NotFound",
    "Overloaded",
    "TimedOut",
    "Unreachable",
]
