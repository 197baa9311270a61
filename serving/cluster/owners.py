"""Remote tables as sources of rows: owners are asked for them, or Redis (loader.redis.reader). A request is
split by owner, one message to each, and their rows are put together here, so that what reads them is what
reads a table of this host."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import SegmentError
from tableside.loader.segment.remote import HostsState, RemoteShare, RemoteTable
from tableside.loader.segment.segment import Segment
from tableside.quant import RowFormat
from tableside.quant.contract import Bytes
from tableside.quant.rows.fetched import AskedTable, RowOwners, RowsAsked, RowState
from tableside.serving.cluster.calls import OwnerCall, Replicas, hosts_of, wait_for
from tableside.serving.cluster.protocol import SUM_BYTES, TableIds, rows_at
from tableside.serving.settings import ServerSettings, cluster_token

_RESPONSE_BYTES = 32 << 20  # of rows that an owner is asked for at once
CAME, LATE = "came", "late"  # what became of rows, for counts


class _Owner(NamedTuple):
    """An owner of rows of a version's tables. number: its place among those of a table."""

    number: int
    model: str
    content: int
    addresses: tuple[str, ...]


class _Part(NamedTuple):
    """What one request asks of an owner. row_bytes: int64 [tables]; at: int64 [tables], the bytes of `out`
    where the rows go; state: of the ids; size: of the response; place: where it may be read to as it comes;
    None: nowhere."""

    ids: TableIds
    row_bytes: NDArray[np.int64]
    at: NDArray[np.int64]
    out: Bytes
    state: NDArray[np.uint8]
    size: int
    place: memoryview | None


_Fetch = Callable[[RowsAsked, float | None], object]
_Count = Callable[[str, Iterable[tuple[str, int]]], object]  # is told what became of rows, how many by table


def remote_sources(segment: Segment, settings: ServerSettings, count: _Count) -> dict[str, AskedTable]:
    """Returns the remote tables of a state by name. SegmentError: as of `RemoteTables`. MissingBackend: the
    client of Redis is not installed."""
    tables, timeout_s = segment.header.remote, segment.header.row_timeout_s(settings.disk_timeout_s)
    if segment.header.owned:
        return described_sources(segment, settings, RemoteTables(segment, settings, count).fetch)
    from tableside.loader.redis.reader import RedisRows  # which needs the client

    fetch = RedisRows(tables, segment.path.parent, timeout_s, count).fetch
    return described_sources(segment, settings, fetch)


def described_sources(segment: Segment, settings: ServerSettings, fetch: _Fetch) -> dict[str, AskedTable]:
    """Returns the remote tables of a state by name, whose rows `fetch` brings."""
    tables, timeout_s = segment.header.remote, segment.header.row_timeout_s(settings.disk_timeout_s)
    owners = _owners_of(tables)
    return {t.name: _source(t, owners, fetch, timeout_s, settings.disk_late == "default") for t in tables}


def _owners_of(tables: Sequence[RemoteTable]) -> list[_Owner]:
    """Returns the owners of all tables, so that those of each one are in its order."""
    return sorted(
        {_Owner(k, s.model, s.content, s.addresses) for t in tables for k, s in enumerate(t.shares)}
    )


def _shares_of(t: RemoteTable, owners: Sequence[_Owner]) -> list[RemoteShare | None]:
    """Returns the share of a table that each owner has."""
    of = {_Owner(k, s.model, s.content, s.addresses): s for k, s in enumerate(t.shares)}
    return [of.get(owner) for owner in owners]


def _source(
    t: RemoteTable, owners: Sequence[_Owner], fetch: Any, timeout_s: float, late_is_default: bool
) -> AskedTable:
    ends = [0 if share is None else share.end for share in _shares_of(t, owners)] or [t.count]
    return AskedTable(
        t.name,
        t.count,
        t.row_bytes,
        RowFormat.parse(t.row_format),
        t.dim,
        RowOwners(np.maximum.accumulate(np.array(ends, np.int64)), t.buckets, t.bucket_ids),
        fetch,
        timeout_s,
        np.frombuffer(bytes.fromhex(t.default), np.uint8) if t.default else None,
        late_is_default,
    )


class RemoteTables:
    """The tables of a state whose rows owners have."""

    def __init__(self, segment: Segment, settings: ServerSettings, count: _Count) -> None:
        """SegmentError: it is not known which rows of theirs belong to the state."""
        if (state := segment.hosts_state()) is None:
            raise SegmentError(
                f"{segment.path}: changes lie over it that no number was given, so its owners do not know "
                "which they are; publish it again"
            )
        tables, owners = segment.header.remote, _owners_of(segment.header.remote)
        self._count, self._names = count, {t.name: n for n, t in enumerate(tables)}
        self._owners = [Replicas(o.model, HostsState(o.content, state.mark), o.addresses) for o in owners]
        shares = (_shares_of(t, owners) for t in tables)
        self._numbers = np.array([[-1 if s is None else s.table for s in some] for some in shares], np.int64)
        self._hosts = hosts_of(cluster_token(settings), settings.disk_timeout_s)
        self._timeout_s = segment.header.row_timeout_s(settings.disk_timeout_s)

    def fetch(self, asked: RowsAsked, deadline: float | None) -> None:
        """Reads rows of these tables, as `quant.rows.fetched.Fetch`: each owner is asked once."""
        deadline = time.monotonic() + self._timeout_s if deadline is None else deadline
        numbers = self._numbers[[self._names[name] for name in asked.tables]].T
        calls, start = list[tuple[_Part, OwnerCall]](), 0
        ends = asked.counts.sum(0).cumsum().tolist()
        for n, (owner, end) in enumerate(zip(self._owners, ends, strict=False)):
            if start < end:
                of_owner = _part(asked, n, numbers[n], slice(start, end))
                calls += [(part, self._call(owner, part, deadline)) for part in _cut(of_owner)]
            start = end
        asked.state[start:] = RowState.MISSING
        wait_for([call for _, call in calls])
        is_late = [_take(part, call) for part, call in calls]
        self._count_rows(asked, any(is_late))

    def _call(self, owner: Replicas, part: _Part, deadline: float) -> OwnerCall:
        return OwnerCall(self._hosts, owner, part.ids, part.size, deadline, part.place)

    def _count_rows(self, asked: RowsAsked, are_late: bool) -> None:
        rows = asked.counts[:, :-1].sum(1)
        if are_late:
            late = np.concatenate(([0], (asked.state == RowState.LATE).cumsum()))
            starts = asked.starts[:, :-1]
            of_tables = (late[starts + asked.counts[:, :-1]] - late[starts]).sum(1)
            self._count(LATE, zip(asked.tables, of_tables.tolist(), strict=True))
            rows -= of_tables
        self._count(CAME, zip(asked.tables, rows.tolist(), strict=True))


def _part(asked: RowsAsked, owner: int, numbers: NDArray[np.int64], of: slice) -> _Part:
    """Returns what one owner is asked. numbers: [tables], those of the tables there; of: its ids."""
    counts, at, row_bytes = asked.counts[:, owner], asked.at[:, owner], asked.row_bytes
    if 0 in counts:
        has = counts > 0
        numbers, counts, at, row_bytes = numbers[has], counts[has], at[has], row_bytes[has]
    first, rows = rows_at(of.stop - of.start), int(counts @ row_bytes)
    start, end = int(at[0]) - first, int(at[-1] + counts[-1] * row_bytes[-1])
    size = first + rows + SUM_BYTES
    has_gaps = end - start != first + rows
    place = None if has_gaps else asked.out.data[start : start + size]
    ids = TableIds(numbers, counts, asked.ids[of])
    return _Part(ids, row_bytes, at, asked.out, asked.state[of], size, place)


def _take(part: _Part, call: OwnerCall) -> bool:
    """Puts the rows of a response where they were asked for. Returns whether they are late."""
    if (body := call.body) is None:
        part.state[:] = RowState.LATE
        return True
    if 0 in (found := body[: part.state.size]):
        part.state[found == 0] = RowState.MISSING
    if not call.is_in_place:
        start = rows_at(part.state.size)
        for at, size in zip(part.at.tolist(), (part.ids.counts * part.row_bytes).tolist(), strict=True):
            part.out[at : at + size] = body[start : (start := start + size)]
    return False


def _cut(part: _Part) -> Iterator[_Part]:
    """Yields parts that one response each may have."""
    if part.size <= _RESPONSE_BYTES:
        yield part
        return
    some, size, start, end = list[tuple[int, int, int, int]](), 0, 0, 0
    of_tables = (*part.ids[:2], part.row_bytes, part.at)
    for number, n, row_bytes, at in zip(*(of.tolist() for of in of_tables), strict=True):
        most = max(1, _RESPONSE_BYTES // row_bytes)
        for first in range(0, n, most):
            count = min(most, n - first)
            if some and size + count * row_bytes > _RESPONSE_BYTES:
                yield _piece(part, some, start, end)
                some, size, start = [], 0, end
            some.append((number, count, row_bytes, at + first * row_bytes))
            size, end = size + count * row_bytes, end + count
    yield _piece(part, some, start, end)


def _piece(part: _Part, of_tables: Sequence[tuple[int, int, int, int]], start: int, end: int) -> _Part:
    """Returns some of a part. of_tables: number, count, row_bytes, `at`; start, end: of its ids."""
    numbers, counts, row_bytes, at = np.array(of_tables, np.int64).T
    ids = TableIds(numbers, counts, part.ids.ids[start:end])
    size = rows_at(end - start) + int(counts @ row_bytes) + SUM_BYTES
    return _Part(ids, row_bytes, at, part.out, part.state[start:end], size, None)
