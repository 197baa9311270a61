"""What owners say of their rows, put together to the remote tables of a version."""

import time
from collections.abc import Sequence
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
from tableside.serving.client.messages import HttpRequest
from tableside.serving.client.sockets import SocketPool
from tableside.serving.cluster.calls import address_of, receive_by
from tableside.serving.cluster.protocol import PATH, Described, DescribedTable
from tableside.serving.errors import ServingError

_TIMEOUT_S, _MOST_BYTES = 10.0, 64 << 20  # of a description


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
    asked: dict[tuple[int, tuple[str, ...]], Described] = {}
    for t in tables:
        for number, addresses in enumerate(t.owners):
            if (number, addresses) not in asked:
                name = owner_name(spec.name, number, len(t.owners))
                asked[number, addresses] = _agreed(addresses, name, number, token)
    if len(samples := {found.sample for found in asked.values()}) > 1:
        said = ", ".join(f"{addresses[0]} {found.sample[:8]}" for (_, addresses), found in asked.items())
        raise ServingError(
            f"the owners of model {spec.name!r} were loaded from {len(samples)} checkpoints ({said}); load "
            "all of them from one"
        )
    return tuple(_joined(t, [asked[owner] for owner in enumerate(t.owners)], backend) for t in tables)


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
    pool = SocketPool(address_of(address, token), _TIMEOUT_S)
    try:
        connection = pool.begin(HttpRequest("GET", f"{PATH}/{model}"), most=_MOST_BYTES)
        response = receive_by(connection, time.monotonic() + _TIMEOUT_S)
        connection.close()
    except OSError as error:
        raise ServingError(
            f"owner {address} is not reached ({error}); start it with: tableside serve {model}"
        ) from error
    finally:
        pool.close()
    if response.status != 200:
        raise ServingError(f"owner {address} answered {response.status}: {response.text[:500]!r}")
    try:
        return Described.from_json(orjson.loads(response.content))
    except ValueError as error:
        raise ServingError(f"owner {address} answered GET {PATH}/{model}, and {error}") from error


def _joined(spec: TableSpec, found: Sequence[Described], backend: CpuBackend) -> RemoteTable:
    """Returns a table whose shares are those of its owners, in their order."""
    shares = [_share_of(spec, described) for described in found]
    first = shares[0][1]
    for address, (_, table) in zip(spec.owners, shares, strict=True):
        _check_alike(spec, address[0], table, first)
    if first.first or any(a.end != b.first for (_, a), (_, b) in pairwise(shares)):
        raise ServingError(
            f"[tables.{spec.name}]: its owners have "
            f"{', '.join(f'[{t.first}, {t.end})' for _, t in shares)}; expected parts that follow one "
            "another, from 0 on"
        )
    if first.buckets and shares[-1][1].end != first.buckets:
        raise ServingError(
            f"[tables.{spec.name}]: its owners have buckets up to {shares[-1][1].end} of {first.buckets}"
        )
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
        tuple(
            RemoteShare(share.end, number, described.content, described.model, addresses)
            for (number, share), described, addresses in zip(shares, found, spec.owners, strict=True)
        ),
        bool(first.strings),
    )
    try:
        check_remote(joined)
    except SegmentError as error:
        raise ServingError(f"[tables.{spec.name}]: what its owners say does not fit: {error}") from error
    if not (default := DefaultRow(spec, joined.dim, None)).is_used:
        return joined
    packed = np.zeros(joined.row_bytes, np.uint8)
    default.pack(packed, backend)
    return replace(joined, default=packed.tobytes().hex())


def _share_of(spec: TableSpec, described: Described) -> tuple[int, DescribedTable]:
    """Returns the number and description of a table in an owner's version."""
    for number, table in enumerate(described.tables):
        if table.name == spec.name:
            return number, table
    raise ServingError(
        f"[tables.{spec.name}]: {described.model} version {described.version} has no such table; load the "
        "owner again with this model.toml"
    )


def _check_alike(spec: TableSpec, address: str, table: DescribedTable, first: DescribedTable) -> None:
    """Raises ServingError where an owner's table is not what model.toml and the first owner say."""
    wanted: Sequence[tuple[str, object, object]] = (
        ("key", table.key, spec.key),
        ("row_format", table.row_format, spec.row_format.label),
        ("missing", table.missing, str(spec.missing)),
        ("ids", "string" if table.strings else "raw" if table.buckets else "row", spec.id_kind),
        ("buckets", table.buckets, spec.raw.buckets if spec.raw else 0),
        ("bucket_ids", table.bucket_ids, (spec.raw.bucket_ids or 0) if spec.raw else 0),
        ("dim", table.dim, first.dim if spec.dim is None else spec.dim),
        ("row_bytes", table.row_bytes, first.row_bytes),
    )
    for what, found, expected in wanted:
        if found != expected:
            raise ServingError(
                f"[tables.{spec.name}]: {what} is {expected!r} here; owner {address} has {found!r}: load it "
                "again with this model.toml"
            )
