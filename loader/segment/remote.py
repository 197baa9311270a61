"""Tables whose rows other hosts have, or Redis, as a version's header names them (docs/hosts.md,
docs/redis.md)."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from tableside.loader.checkpoint.rows import LARGEST_DIM
from tableside.loader.errors import SegmentError
from tableside.loader.model.model import NAME
from tableside.loader.model.tiers import ADDRESS, SERVICE, RedisTier
from tableside.loader.segment.stored import StoredTable
from tableside.quant import QuantError, RowFormat

_PREFIX = re.compile(r"tableside:[A-Za-z0-9_:-]+:[0-9a-f]{16}:")  # without braces, which name slots
_STATE = re.compile(r"[0-9a-f]{16}\.[0-9a-f]{16}")


class HostsState(NamedTuple):
    """A state as all hosts of a model call it. content: of the version that was loaded; mark: of the changes
    since (loader.deltas.hosts); 0: none."""

    content: int
    mark: int = 0

    def __str__(self) -> str:
        return f"{self.content:016x}.{self.mark:016x}"

    @property
    def seed(self) -> int:
        """For checksums of its rows."""
        return self.content ^ self.mark

    @classmethod
    def parse(cls, text: str) -> "HostsState":
        """ValueError: it names none."""
        if not _STATE.fullmatch(text):
            raise ValueError(f"{text[:60]!r}; expected 16 hexadecimal digits, a dot, and 16 more")
        return cls(*(int(part, 16) for part in text.split(".")))


@dataclass(frozen=True)
class RemoteShare:
    """What one owner has of a table. end: the dense id, or bucket, after its last one. table: its number in
    the owner's version. content: `Segment.content` of that version, of `model`. addresses: HOST:PORT of its
    hosts, which have the same."""

    end: int
    table: int
    content: int
    model: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class RedisPlace:
    """Where a table's rows are in Redis (loader.redis.blocks). addresses, service: as of `RedisTier`. prefix:
    of the keys; seed: of the checksums, which no other load of a table has."""

    addresses: tuple[str, ...]
    is_tls: bool
    prefix: str
    seed: int
    block_rows: int
    service: str = ""

    @property
    def tier(self) -> RedisTier:
        return RedisTier(self.addresses, self.is_tls, self.service)


@dataclass(frozen=True)
class RemoteTable:
    """A table whose rows other hosts have (serving.cluster), or Redis. count: ids with rows; buckets: of raw
    ids, 0: ids are row numbers; bucket_ids: as in StoredIndex. default: the packed row of missing ids in
    hexadecimal digits, empty: they are refused. shares: of the hosts, in the order of the ids or buckets;
    none: the rows are at `redis`. strings: the raw ids are those of strings."""

    name: str
    key: str
    row_format: str
    dim: int
    row_bytes: int
    count: int
    missing: str
    default: str
    buckets: int
    bucket_ids: int
    shares: tuple[RemoteShare, ...]
    strings: bool = False
    redis: RedisPlace | None = None

    @property
    def id_kind(self) -> str:
        """Returns what its ids are, as model.toml says it."""
        return "string" if self.strings else "raw" if self.buckets else "row"

    @property
    def place(self) -> RedisPlace:
        """Returns where the rows are in Redis; they are there."""
        assert self.redis is not None
        return self.redis

    def without_rows(self) -> StoredTable:
        """Returns it as a table of this host, without a place in a file or an id index."""
        return StoredTable(
            self.count, self.row_bytes, 0, 1, 0, self.name, self.key, self.row_format, self.dim
        )

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "RemoteTable":
        shares = tuple(RemoteShare(**{**s, "addresses": tuple(s["addresses"])}) for s in raw["shares"])
        if (redis := raw.get("redis")) is not None:
            redis = RedisPlace(**{**redis, "addresses": tuple(redis["addresses"])})
        return cls(**{**raw, "shares": shares, "redis": redis})


def check_remote(t: RemoteTable) -> None:
    """Raises SegmentError for impossible values."""
    of_shares = (n for s in t.shares for n in (s.end, s.table, s.content))
    numbers = (t.dim, t.row_bytes, t.count, t.buckets, t.bucket_ids, *of_shares)
    texts = (t.name, t.key, t.missing, *(text for s in t.shares for text in (s.model, *s.addresses)))
    are_typed = all(isinstance(text, str) for text in texts)
    are_typed &= type(t.strings) is bool
    if not are_typed or not all(type(n) is int and 0 <= n < 1 << 64 for n in numbers):
        raise SegmentError(f"remote table {str(t.name)[:60]!r} has a name or a number of the wrong type")
    try:
        sizes, default = RowFormat.parse(t.row_format).row_sizes(t.dim), bytes.fromhex(t.default)
    except (QuantError, TypeError, ValueError) as error:
        raise SegmentError(f"remote table {t.name!r}: {error}") from None
    if t.dim > LARGEST_DIM or not all(NAME.fullmatch(s.model) for s in t.shares):
        raise SegmentError(f"remote table {t.name!r} has dim {t.dim}, or a share of a model without a name")
    if t.redis is not None:
        _check_redis(t, t.redis)
    ends = [0, *(s.end for s in t.shares)] if t.redis is None else [0, t.count]
    if t.row_bytes not in sizes or len(default) not in (0, t.row_bytes) or t.buckets & (t.buckets - 1):
        raise SegmentError(
            f"remote table {t.name!r} has rows of {t.row_bytes} bytes, a default row of {len(default)}, "
            f"{t.buckets} buckets; {t.row_format} of dim {t.dim} takes {' or '.join(map(str, sizes))} bytes"
        )
    is_end = ends[-1] == (t.buckets or t.count) and ends[-1] < 1 << 63
    if ends != sorted(set(ends)) or not is_end:
        raise SegmentError(
            f"the owners of table {t.name!r} end at {ends[1:]}; expected {t.buckets or t.count} for the last"
        )
    if not all(s.addresses for s in t.shares):
        raise SegmentError(f"an owner of table {t.name!r} has no address")


def _check_redis(t: RemoteTable, place: RedisPlace) -> None:
    are_texts = all(isinstance(text, str) for text in (place.prefix, *place.addresses))
    are_places = are_texts and place.addresses and all(map(ADDRESS.fullmatch, place.addresses))
    is_service = isinstance(place.service, str) and SERVICE.fullmatch(place.service)
    if not are_places or not is_service or t.shares or t.buckets or t.row_bytes % 4:
        raise SegmentError(f"table {t.name!r} has no address in Redis, or what rows there cannot have")
    numbers = type(place.seed) is int and type(place.block_rows) is int and type(place.is_tls) is bool
    is_range = numbers and 0 <= place.seed < 1 << 63 and 0 < place.block_rows < 1 << 20
    if not is_range or not _PREFIX.fullmatch(place.prefix):
        raise SegmentError(f"table {t.name!r} has keys {place.prefix[:80]!r} in Redis, or impossible numbers")
