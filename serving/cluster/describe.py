"""What owners say of their rows, asked outside of requests and put together to the remote tables of a
version."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import orjson

from tableside.loader.errors import SegmentError
from tableside.loader.load.default_rows import DefaultRow
from tableside.loader.model.specs import ModelSpec, TableSpec
from tableside.loader.model.tiers import owner_name
from tableside.loader.segment.header import Header
from tableside.loader.segment.remote import RemoteShare, RemoteTable, check_remote
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.quant import CpuBackend
from tableside.serving.client.messages import BUSY, HttpRequest, HttpResponse
from tableside.serving.client.sockets import SocketPool
from tableside.serving.cluster.calls import address_of, receive_by
from tableside.serving.cluster.protocol import PATH, Described, DescribedTable
from tableside.serving.errors import ServingError

_TIMEOUT_S = 10.0  # of an answer
_AGAIN_S = 0.2  # between two tries


class AskedHost:
    """A host. address: HOST:PORT. Any thread may call."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address, self._pool = address, SocketPool(address_of(address, token), _TIMEOUT_S)

    def get(self, path: str, most: int, patience_s: float = 0.0) -> memoryview:
        """Returns the body of an answer, of `most` bytes or fewer. patience_s: for which it is asked again
        where it is not reached, or busy. ServingError: it was not reached, or refuses."""
        until = time.monotonic() + patience_s
        while True:
            try:
                if (response := self._ask(path, most)).status == 200:
                    return response.content
                said = f"answered {response.status}: {response.text[:500]!r}"
                if response.status not in BUSY:
                    until = 0.0
            except OSError as error:
                said = f"is not reached ({error}); start it there (tableside serve)"
            if time.monotonic() >= until:
                raise ServingError(f"owner {self.address} {said}, asked for {path}")
            time.sleep(_AGAIN_S)

    def _ask(self, path: str, most: int) -> HttpResponse:
        connection = self._pool.begin(HttpRequest("GET", path), most=most)
        try:
            response = receive_by(connection, time.monotonic() + _TIMEOUT_S)
        except BaseException:
            connection.close()
            raise
        self._pool.give_back(connection, response)
        return response

    def close(self) -> None:
        self._pool.close()


_MOST_BYTES = 64 << 20  # of a description
Owners = tuple[tuple[str, ...], ...]
"""The owners' addresses, HOST:PORT, each with its replicas."""


def describe(segment: Segment) -> Described | None:
    """Describes a version of an owner; None: it is a whole one."""
    header = segment.header
    if (owner := header.owner) is None:
        return None
    return Described(
        header.model,
        header.version,
        header.merged.sequence if header.merged is not None and not header.origin else 0,
        header.origin or segment.base.content(),
        owner.number,
        owner.owners,
        str(header.source.get("sample", "")),
        tuple(_described(t, header) for t in header.tables),
    )


def _described(t: StoredTable, header: Header) -> DescribedTable:
    index = None if t.ids is None else t.ids.index
    first, count = (0, t.rows) if t.ids is None else (t.ids.first, t.ids.count)
    end, buckets, bucket_ids = first + count, 0, 0
    if index is not None:
        first, end = index.first_bucket, index.first_bucket + index.owned
        buckets, bucket_ids = index.buckets, index.bucket_ids
    missing = "error" if t.ids is None else t.ids.missing
    shape = t.name, t.key, t.row_format, t.dim, t.row_bytes
    strings = int(t.id_kind == "string")
    return DescribedTable(*shape, first, end, count, missing, buckets, bucket_ids, strings)


def remote_tables(spec: ModelSpec, backend: CpuBackend, token: str | None) -> tuple[RemoteTable, ...]:
    """Asks all owners of a model what they have. ServingError: one is not reached, or they do not fit."""
    tables = [t for t in spec.tables if t.owners and spec.share is None]
    asked = ask_owners(spec.name, [t.owners for t in tables], token)
    return tuple(_joined(t, asked[t.owners], backend) for t in tables)


def ask_owners(model: str, owners: Iterable[Owners], token: str | None) -> dict[Owners, list[Described]]:
    """Asks owners of a model what they have. ServingError: one is not reached, or they are of several
    checkpoints."""
    asked: dict[tuple[int, tuple[str, ...]], Described] = {}
    found = dict[Owners, list[Described]]()
    for some in owners:
        for number, addresses in enumerate(some):
            if (number, addresses) not in asked:
                name = owner_name(model, number, len(some))
                asked[number, addresses] = _agreed(addresses, name, number, token)
        found[some] = [asked[owner] for owner in enumerate(some)]
    if len(samples := {one.sample for one in asked.values()}) > 1:
        said = ", ".join(f"{addresses[0]} {one.sample[:8]}" for (_, addresses), one in asked.items())
        raise ServingError(
            f"the owners of model {model!r} were loaded from {len(samples)} checkpoints ({said}); load "
            "all of them from one"
        )
    return found


def turned_tables(header: Header, owners: Owners, token: str | None) -> tuple[RemoteTable, ...]:
    """Returns the tables of a server's version that hosts have, as these owners have them. ServingError: as
    `remote_tables`; one of the present owners is to say that they have the same rows."""
    found = ask_owners(header.model, [owners], token)[owners]
    _check_lineage(header, found[0].sample, token)
    return tuple(_turned(t, owners, found) for t in header.owned)


def _check_lineage(header: Header, sample: str, token: str | None) -> None:
    """Asks the present owners of what checkpoint they are. ServingError: of another one, or none can be
    asked."""
    said = []
    for share in (share for t in header.owned for share in t.shares):
        for address in share.addresses:
            try:
                described = _ask(address, share.model, token)
            except ServingError as error:
                said.append(str(error))
                continue
            if described.content != share.content:
                said.append(f"owner {address} has another version of {share.model}")
            elif described.sample != sample:
                raise ServingError(
                    f"the present owners of model {header.model!r} are of checkpoint "
                    f"{described.sample[:8]}, these of {sample[:8]}; expected owners with the same rows: "
                    "load the model with the addresses of these (tableside load)"
                )
            else:
                return
    raise ServingError(
        f"none of the present owners of model {header.model!r} says what rows it has "
        f"({'; '.join(said)[:500]}); they stay until all servers turned: start one of them"
    )


def _turned(t: RemoteTable, owners: Owners, found: Sequence[Described]) -> RemoteTable:
    shares = _shares_of(t.name, owners, found)
    wanted = {name: getattr(t, name) for name in ("key", "row_format", "missing", "dim", "row_bytes")}
    for addresses, (_, table) in zip(owners, shares, strict=True):
        _check_alike(
            t.name,
            addresses[0],
            table,
            wanted | {"ids": t.id_kind, "buckets": t.buckets, "bucket_ids": t.bucket_ids},
        )
    count = sum(table.own for _, table in shares)
    if not t.buckets and count != t.count:
        raise ServingError(f"[tables.{t.name}]: these owners have {count:,} rows; expected {t.count:,}")
    return _checked(replace(t, count=count, shares=_remote_shares(owners, found, shares)))


def _agreed(addresses: tuple[str, ...], model: str, number: int, token: str | None) -> Described:
    """Returns what the replicas of an owner say, which must be the same."""
    found = {address: _ask(address, model, token) for address in addresses}
    first = found[addresses[0]]
    for address, described in found.items():
        if described.model != model or described.number != number:
            raise ServingError(
                f"owner {address} describes share {described.number} of {described.model[:100]!r}; expected "
                f"{number} of {model!r}"
            )
        if described.changes:
            raise ServingError(
                f"owner {address}: {model} version {described.version} was cut of a version with changes, "
                "which the checkpoint lacks; load the owners from a checkpoint (tableside load --share)"
            )
        if described.content != first.content:
            raise ServingError(
                f"owners {addresses[0]} and {address} have different rows of {model}; load both from one "
                "checkpoint, with one release"
            )
    return first


def _ask(address: str, model: str, token: str | None) -> Described:
    with closing(AskedHost(address, token)) as host:
        content = host.get(f"{PATH}/{model}", _MOST_BYTES)
    try:
        return Described.from_json(orjson.loads(content))
    except ValueError as error:
        raise ServingError(
            f"owner {address} answered GET {PATH}/{model} with no description of rows ({error}); expected "
            "the address of a server of its rows (tableside serve)"
        ) from error


def _joined(spec: TableSpec, found: Sequence[Described], backend: CpuBackend) -> RemoteTable:
    """Returns a table whose shares are those of its owners, in their order."""
    shares = _shares_of(spec.name, spec.owners, found)
    first, raw = shares[0][1], spec.raw
    wanted = {
        "key": spec.key,
        "row_format": spec.row_format.label,
        "missing": str(spec.missing),
        "ids": spec.id_kind,
        "buckets": raw.buckets if raw else 0,
        "bucket_ids": (raw.bucket_ids or 0) if raw else 0,
        "dim": first.dim if spec.dim is None else spec.dim,
        "row_bytes": first.row_bytes,
    }
    for addresses, (_, table) in zip(spec.owners, shares, strict=True):
        _check_alike(spec.name, addresses[0], table, wanted)
    joined = RemoteTable(
        first.name,
        first.key,
        first.row_format,
        first.dim,
        first.row_bytes,
        sum(share.own for _, share in shares),
        first.missing,
        "",
        first.buckets,
        first.bucket_ids,
        _remote_shares(spec.owners, found, shares),
        bool(first.strings),
    )
    joined = _checked(joined)
    if not (default := DefaultRow(spec, joined.dim, None)).is_used:
        return joined
    packed = np.zeros(joined.row_bytes, np.uint8)
    default.pack(packed, backend)
    return replace(joined, default=packed.tobytes().hex())


def _shares_of(name: str, owners: Owners, found: Sequence[Described]) -> list[tuple[int, DescribedTable]]:
    """Returns the number and description of a table in each owner's version. ServingError: its parts leave a
    gap."""
    shares = [_share_of(name, described) for described in found]
    first, last = shares[0][1], shares[-1][1]
    if first.first or any(a.end != b.first for (_, a), (_, b) in pairwise(shares)):
        raise ServingError(
            f"[tables.{name}]: its owners have "
            f"{', '.join(f'[{t.first}, {t.end})' for _, t in shares)}; expected parts that follow one "
            "another, from 0 on"
        )
    if first.buckets and last.end != first.buckets:
        raise ServingError(f"[tables.{name}]: its owners have buckets up to {last.end} of {first.buckets}")
    return shares


def _remote_shares(
    owners: Owners, found: Sequence[Described], shares: Sequence[tuple[int, DescribedTable]]
) -> tuple[RemoteShare, ...]:
    return tuple(
        RemoteShare(share.end, number, described.content, described.model, addresses)
        for (number, share), described, addresses in zip(shares, found, owners, strict=True)
    )


def _checked(joined: RemoteTable) -> RemoteTable:
    """ServingError: the table is impossible."""
    try:
        check_remote(joined)
    except SegmentError as error:
        raise ServingError(f"[tables.{joined.name}]: what its owners say does not fit: {error}") from error
    return joined


def _share_of(name: str, described: Described) -> tuple[int, DescribedTable]:
    """Returns the number and description of a table in an owner's version."""
    for number, table in enumerate(described.tables):
        if table.name == name:
            return number, table
    raise ServingError(
        f"[tables.{name}]: {described.model} version {described.version} has no such table; load the "
        "owner again with this model.toml"
    )


def _check_alike(name: str, address: str, table: DescribedTable, wanted: Mapping[str, object]) -> None:
    """Raises ServingError where an owner's table is not what is wanted of all owners."""
    ids = "string" if table.strings else "raw" if table.buckets else "row"
    has = {**table._asdict(), "ids": ids}
    for what, expected in wanted.items():
        if has[what] != expected:
            raise ServingError(
                f"[tables.{name}]: {what} is {expected!r} here; owner {address} has {has[what]!r}: load it "
                "again with this model.toml"
            )
