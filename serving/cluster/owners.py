"""Remote tables as sources of rows: owners are asked for them, or Redis (loader.redis.reader). A request is
split by owner, one message to each, and their rows are put together here, so that what reads them is what
reads a table of this host."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import SegmentError
from tableside.loader.segment.remote import HostsState, RemoteTable
from tableside.loader.segment.segment import Segment
from tableside.quant import RowFormat
from tableside.quant.contract import Bytes, Ids
from tableside.quant.rows.fetched import AskedTable, RowOwners, RowsAsked, RowState
from tableside.serving.cluster.calls import OwnerCall, Replicas, hosts_of, wait_for
from tableside.serving.cluster.protocol import RowsLayout, TableIds
from tableside.serving.settings import ServerSettings, cluster_token

_RESPONSE_BYTES = 32 << 20  # of rows that an owner is asked for at once
CAME, LATE = "came", "late"  # what became of rows, for counts


class _Part(NamedTuple):
    """Rows of one table that one owner has. rows: asked of it; out, state: where they go."""

    table: RemoteTable
    number: int
    rows: Ids
    out: Bytes
    state: NDArray[np.uint8]


_Count = Callable[[str, str, int], object]  # is told a table, what became of rows, and how many


def remote_sources(segment: Segment, settings: ServerSettings, count: _Count) -> dict[str, AskedTable]:
    """Returns the remote tables of a state by name. SegmentError: as of `RemoteTables`. MissingBackend: the
    client of Redis is not installed."""
    tables, timeout_s = segment.header.remote, segment.header.row_timeout_s(settings.disk_timeout_s)
    fetch: Callable[[Sequence[RowsAsked], float | None], object]
    if segment.header.owned:
        fetch = RemoteTables(segment, settings, count).fetch
    else:
        from tableside.loader.redis.reader import RedisRows  # which needs the client

        fetch = RedisRows(tables, segment.path.parent, timeout_s, count).fetch
    return {t.name: _source(t, fetch, timeout_s, settings.disk_late == "default") for t in tables}


def _source(t: RemoteTable, fetch: Any, timeout_s: float, late_is_default: bool) -> AskedTable:
    ends = [s.end for s in t.shares] or [t.count]
    return AskedTable(
        t.name,
        t.count,
        t.row_bytes,
        RowFormat.parse(t.row_format),
        t.dim,
        RowOwners(np.array(ends, np.int64), t.buckets, t.bucket_ids),
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
        self._tables, self._mark, self._count = {t.name: t for t in segment.header.remote}, state.mark, count
        self._hosts = hosts_of(cluster_token(settings), settings.disk_timeout_s)
        self._timeout_s = segment.header.row_timeout_s(settings.disk_timeout_s)

    def fetch(self, asked: Sequence[RowsAsked], deadline: float | None) -> None:
        """Reads rows of these tables, as `quant.rows.fetched.Fetch`: each owner is asked once."""
        deadline = time.monotonic() + self._timeout_s if deadline is None else deadline
        parts: dict[Replicas, list[_Part]] = {}
        for one in asked:
            table, start = self._tables[one.table], 0
            for share, end in zip(table.shares, one.ends, strict=False):
                if start < end:
                    of = slice(start, end)
                    part = _Part(table, share.table, one.rows[of], one.out[of], one.state[of])
                    owner = Replicas(share.model, HostsState(share.content, self._mark), share.addresses)
                    parts.setdefault(owner, []).append(part)
                start = end
            one.state[start:] = RowState.MISSING
        together = [(owner, some) for owner, of_owner in parts.items() for some in _cut(of_owner)]
        calls = [self._call(owner, some, deadline) for owner, some in together]
        wait_for(calls)
        counts: Counter[tuple[str, str]] = Counter()
        for call, (_, of_owner) in zip(calls, together, strict=True):
            _take(of_owner, call)
            outcome = LATE if call.body is None else CAME
            counts.update({(part.table.name, outcome): part.rows.size for part in of_owner})
        for (name, outcome), rows in counts.items():
            self._count(name, outcome, rows)

    def _call(self, owner: Replicas, parts: Sequence[_Part], deadline: float) -> OwnerCall:
        asked = [TableIds(part.number, part.rows) for part in parts]
        layout = RowsLayout.of([(part.rows.size, part.table.row_bytes) for part in parts])
        return OwnerCall(self._hosts, owner, asked, layout, deadline)


def _take(parts: Sequence[_Part], call: OwnerCall) -> None:
    """Puts the rows of a response where they were asked for."""
    if (body := call.body) is None:
        for part in parts:
            part.state[:] = RowState.LATE
        return
    are_found = bool(body[: call.layout.ids].all())
    for part, found_at, rows_at in zip(parts, call.layout.found_at, call.layout.rows_at, strict=True):
        part.out.reshape(-1)[:] = body[rows_at : rows_at + part.out.size]
        if not are_found:
            part.state[body[found_at : found_at + part.rows.size] == 0] = RowState.MISSING


def _cut(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yields parts that one response may have together."""
    if sum(part.out.size for part in parts) <= _RESPONSE_BYTES:
        yield list(parts)
        return
    some, size = list[_Part](), 0
    for part in parts:
        most = max(1, _RESPONSE_BYTES // part.table.row_bytes)
        for start in range(0, part.rows.size, most):
            of = slice(start, start + most)
            cut = part._replace(rows=part.rows[of], out=part.out[of], state=part.state[of])
            if some and size + cut.out.size > _RESPONSE_BYTES:
                yield some
                some, size = [], 0
            some.append(cut)
            size += cut.out.size
    yield some
