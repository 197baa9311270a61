"""Quantized embedding tables in shared memory: published once, read by all processes of a host, served over
HTTP.

    from tableside import Client
    client = Client("http://localhost:8000")
    client.lookup("ads", {"clicked": [[1, 2, 3], [7]]})       # {"clicked": fp32 [2, dim]}

`__all__` is the public interface. A name is imported at its first use, so a client does not import the
server.

    load, read_model, parse_model, LoadSettings             a model.toml into a published version
    Model, Segment, Table, RowFormat, Pooling               published versions, and their contents
    string_ids                                              the int64 that string ids are
    Client, AsyncClient, Jagged, KeyedVectors, LookedUp     a server's answers
    stash_embedding_weights                                 frees a GPU's tables during a training step
    LoaderError, QuantError, ClientError, FeatureError      errors, in one line each
    BadRequest, NotFound, Denied, Overloaded, TimedOut, Unreachable     kinds of ClientError
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tableside.loader.errors import LoaderError as LoaderError
    from tableside.loader.load.load import load as load
    from tableside.loader.load.settings import LoadSettings as LoadSettings
    from tableside.loader.model.model import parse_model as parse_model
    from tableside.loader.model.model import read_model as read_model
    from tableside.loader.segment.segment import Segment as Segment
    from tableside.loader.string_ids import string_ids as string_ids
    from tableside.loader.versions.versions import Model as Model
    from tableside.quant import Pooling as Pooling
    from tableside.quant import QuantError as QuantError
    from tableside.quant import RowFormat as RowFormat
    from tableside.quant import Table as Table
    from tableside.quant.stash.stash import stash_embedding_weights as stash_embedding_weights
    from tableside.serving.client import AsyncClient as AsyncClient
    from tableside.serving.client import BadRequest as BadRequest
    from tableside.serving.client import Client as Client
    from tableside.serving.client import ClientError as ClientError
    from tableside.serving.client import Denied as Denied
    from tableside.serving.client import FeatureError as FeatureError
    from tableside.serving.client import Jagged as Jagged
    from tableside.serving.client import KeyedVectors as KeyedVectors
    from tableside.serving.client import LookedUp as LookedUp
    from tableside.serving.client import NotFound as NotFound
    from tableside.serving.client import Overloaded as Overloaded
    from tableside.serving.client import TimedOut as TimedOut
    from tableside.serving.client import Unreachable as Unreachable

# In a checkout the rooms lie beside this folder; in a wheel, in it.
_checkout = Path(__file__).parent.parent
if not (Path(__file__).parent / "quant").is_dir() and (_checkout / "quant").is_dir():
    __path__.append(str(_checkout))

_NAMES = {
    "loader.errors": ("LoaderError",),
    "loader.load.load": ("LoadSettings", "load"),
    "loader.model.model": ("parse_model", "read_model"),
    "loader.segment.segment": ("Segment",),
    "loader.string_ids": ("string_ids",),
    "loader.versions.versions": ("Model",),
    "quant": ("Pooling", "QuantError", "RowFormat", "Table"),
    "quant.stash.stash": ("stash_embedding_weights",),
    "serving.client": (
        *("AsyncClient", "Client", "FeatureError", "Jagged", "KeyedVectors", "LookedUp"),
        *("BadRequest", "ClientError", "Denied", "NotFound", "Overloaded", "TimedOut", "Unreachable"),
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]


# names that need more than the base, and the extra that brings it
_EXTRAS = {"stash_embedding_weights": "torch"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tableside' has no attribute {name!r}")
    try:
        module = import_module(f"tableside.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get(name)) is None:
            raise
        raise ImportError(
            f"tableside.{name} needs {error.name}, which is not installed; install tableside[{extra}]"
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
