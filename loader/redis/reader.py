"""Reads rows from Redis for lookups: of all tables of a request at once, by one pipeline to each server."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hiredis
import numpy as np
import redis
from numpy.typing import NDArray

from tableside.loader.redis.blocks import RedisBlocks
from tableside.loader.redis.keys import hold_note
from tableside.loader.redis.replies import Replies, limit
from tableside.loader.redis.servers import LATE_ROWS, RedisServers, servers_of
from tableside.loader.segment.blocks import OPENS_S
from tableside.loader.segment.remote import RemoteTable
from tableside.quant.contract import Bytes, Ids
from tableside.quant.rows.fetched import RowsAsked, RowState
from tableside.quant.rows.turns import waiting

logger = logging.getLogger("tableside")

_GONE = len(RowState)  # the state of a row that Redis has no more, until all have come
# What became of rows, for counts
_OUTCOMES = {RowState.HERE: "came", RowState.LATE: "late", RowState.CORRUPT: "corrupt", _GONE: "gone"}
_TURNS = 5  # a server may say that another one has a slot, and that one, too
_PART_ROWS = 2048  # that are asked for and read together: the server answers some while others are read
_TOLD_S = 1.0  # between two lines of the log about rows that are gone or damaged
_MOVED = re.compile(r"(?P<how>MOVED|ASK) [0-9]+ (?P<host>\S*):(?P<port>[0-9]{1,5})")
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class _OfTable(NamedTuple):
    """Rows of one table that it has. out: [n, row_bytes]; state: `RowState` [n]."""

    table: str
    rows: Ids
    out: Bytes
    state: NDArray[np.uint8]


class _TablePart(NamedTuple):
    """Rows of one table. at: places in `asked`."""

    blocks: RedisBlocks
    asked: _OfTable
    at: Ids

    @property
    def rows(self) -> Ids:
        return self.asked.rows[self.at]

    def cut(self) -> Iterator["_TablePart"]:
        for start in range(0, self.at.size, _PART_ROWS):
            yield self._replace(at=self.at[start : start + _PART_ROWS])


class _Place(NamedTuple):
    """A server that is asked. is_asking: for rows of a slot that is on its way there."""

    name: str
    is_asking: bool = False


_Left = dict[_Place | None, list[_TablePart]]  # rows by the server to ask; None: that which has their slots


def _by_place(left: _Left, servers: RedisServers, turn: int) -> dict[_Place, list[_TablePart]]:
    """Returns the servers with the rows that they are asked for. turn: whose it is of a server's replicas."""
    slots = servers.slots
    found = {place: parts for place, parts in left.items() if place is not None}
    for part in left.get(None, ()):
        of = slots.by_slot[part.blocks.slots(part.rows)] if len(slots.names) > 1 else slots.by_slot[:1]
        for number in np.unique(of).tolist():
            if number >= 0:
                own = part if of.size == 1 else part._replace(at=part.at[of == number])
                found.setdefault(_Place(servers.reader(slots, number, turn)), []).append(own)
    return found


class RedisRows:
    """Rows of a version's tables in Redis. folder: of the version, in which the notes of keys are held, so
    that these stay while this object lives; timeout_s: for which a request waits; count: is told what
    became of rows, and how many by table."""

    def __init__(
        self,
        tables: Sequence[RemoteTable],
        folder: Path,
        timeout_s: float,
        count: Callable[[str, Iterable[tuple[str, int]]], object],
    ) -> None:
        self._blocks = {t.name: RedisBlocks(t.place, t.row_bytes) for t in tables}
        first = next(iter(self._blocks.values())).place
        self._tier, self._turn = first.tier, 0
        self._timeout_s, self._count, self._told_at = timeout_s, count, -_TOLD_S
        self._notes = [note for t in tables if (note := hold_note(folder, t.place.seed)) >= 0]

    def __del__(self) -> None:
        for fd in getattr(self, "_notes", ()):
            os.close(fd)

    def fetch(self, asked: RowsAsked, deadline: float | None) -> None:
        """Reads rows of these tables, as `quant.rows.fetched.Fetch`."""
        deadline = time.monotonic() + self._timeout_s if deadline is None else deadline
        of_tables, left = list[_OfTable](), _Left({None: []})
        for n, table in enumerate(asked.tables):
            (own, out), (missing, _) = asked.blocks(n)
            asked.state[own], asked.state[missing] = RowState.LATE, RowState.MISSING
            of_tables.append(one := _OfTable(table, asked.ids[own], out, asked.state[own]))
            if one.rows.size:
                left[None].append(_TablePart(self._blocks[table], one, np.arange(one.rows.size)))
        servers = servers_of(self._tier)
        self._turn = first = self._turn + 1
        for turn in range(_TURNS):
            if turn or servers.are_in_doubt:
                servers.learn(deadline, self.is_patient(deadline))
            by_place = _by_place(left, servers, first + turn)
            calls = [_PipelineCall(self, servers, *one, deadline) for one in by_place.items()]
            left = {}
            for call in calls:
                call.send(left)
            for call in calls:
                call.receive(left)
            if not left:
                break
        for one in of_tables:
            states = np.bincount(one.state, minlength=_GONE + 1).tolist()
            one.state[one.state == _GONE] = RowState.LATE
            for state, outcome in _OUTCOMES.items():
                self._count(outcome, [(one.table, states[state])])

    def fetch_table(
        self, name: str, rows: Ids, out: Bytes, state: NDArray[np.uint8], deadline: float | None
    ) -> None:
        """Reads rows of one table, as `quant.rows.fetched.Fetch`."""
        n, row_bytes = out.shape
        counts, at = np.array([[n, 0]]), np.array([[0, n * row_bytes]])
        sizes = np.array([row_bytes])
        self.fetch(RowsAsked([name], sizes, rows, counts, at, out.reshape(-1), state), deadline)

    def is_patient(self, deadline: float) -> bool:
        """Whether who waits until then can tell whether a server hangs."""
        return deadline - time.monotonic() >= min(self._timeout_s, OPENS_S) / 2

    def told(self, what: str, part: _TablePart, at: int) -> None:
        """Says that a row is gone or damaged."""
        if time.monotonic() - self._told_at >= _TOLD_S:
            self._told_at = time.monotonic()
            row = int(part.asked.rows[at])
            key = part.blocks.key(row // part.blocks.place.block_rows).decode()
            logger.error("table %s: row %d, key %s of Redis: %s", part.asked.table, row, key, what)


class _PipelineCall:
    """One pipeline to one server."""

    def __init__(
        self,
        of: RedisRows,
        servers: RedisServers,
        place: _Place,
        parts: Sequence[_TablePart],
        deadline: float,
    ) -> None:
        self._of, self._place, self._deadline = of, place, deadline
        self._node, self._began = servers.node(place.name), time.monotonic()
        self._parts = [part for one in parts for part in one.cut()]
        self._is_patient, self._is_replica = of.is_patient(deadline), place.name not in servers.slots.names
        self._connection: Any = None

    def send(self, left: _Left) -> None:
        """Sends the commands. left: as of `receive`."""
        if not self._node.may_be_asked(self._is_patient):
            return
        before = _ASKING if self._place.is_asking else b""
        try:
            self._connection = self._node.take(self._deadline)
            for part in self._parts:
                commands = part.blocks.commands(part.rows, before)
                limit(self._socket, self._deadline)
                with waiting():
                    self._socket.sendall(commands)
        except redis.AuthenticationError as error:
            self._fail(f"it lets nobody in ({error})", {})
        except (OSError, redis.RedisError) as error:
            self._fail(f"it is not reached ({error})", left)

    @property
    def _socket(self) -> Any:
        return self._connection._sock

    def receive(self, left: _Left) -> None:
        """Reads the answers. left: gets the rows that are to be asked for again."""
        if self._connection is None:
            return
        before = b"+OK\r\n" if self._place.is_asking else b""
        replies, problem = Replies(self._socket, self._deadline, before), ""
        try:
            for part in self._parts:
                rows, out, state = part.rows, part.asked.out, part.asked.state
                others = replies.take(part.blocks, rows, part.at, out, state)
                if (damaged := part.at[state[part.at] == RowState.CORRUPT]).size:
                    self._of.told("its checksum is wrong: it is not what was written", part, int(damaged[0]))
                elsewhere: dict[_Place | None, list[int]] = {}
                for number, reply in others.items():
                    if (place := self._named(reply)) is not None or self._is_replica:  # it may be behind
                        elsewhere.setdefault(place, []).append(number)
                    else:
                        problem = self._take_other(part, int(part.at[number]), reply) or problem
                for place, numbers in elsewhere.items():
                    left.setdefault(place, []).append(part._replace(at=part.at[numbers]))
        except TimeoutError:
            self._fail(LATE_ROWS, left)
        except (OSError, hiredis.ProtocolError) as error:
            self._fail(f"its answer is not taken: {error}", left)
        else:
            self._node.give_back(self._connection)
            self._tell(problem)

    def _named(self, reply: Any) -> _Place | None:
        """Returns the server that a reply names."""
        moved = _MOVED.fullmatch(str(reply)) if isinstance(reply, hiredis.ReplyError) else None
        if moved is None:
            return None
        host = moved["host"] or self._place.name.rpartition(":")[0]
        return _Place(f"{host}:{moved['port']}", moved["how"] == "ASK")

    def _take_other(self, part: _TablePart, at: int, reply: Any) -> str:
        """Takes a reply that is no record, of the row at a place; returns what is wrong with the server."""
        if not isinstance(reply, bytes):
            return f"it refuses: {str(reply)[:200]}"
        part.asked.state[at] = RowState.CORRUPT if reply else _GONE
        said = f"it has {len(reply)} bytes of {part.blocks.record_bytes}"
        self._of.told(said if reply else "it is gone; load the model again", part, at)
        return ""

    def _fail(self, problem: str, left: _Left) -> None:
        """Ends the connection. left: gets the rows that did not come, where there is time to ask again: the
        server may have ended an idle connection, or have a successor."""
        self._node.close()
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None
        self._tell(problem)
        if time.monotonic() < self._deadline:
            late = (p._replace(at=p.at[p.asked.state[p.at] == RowState.LATE]) for p in self._parts)
            left.setdefault(None, []).extend(part for part in late if part.at.size)

    def _tell(self, problem: str) -> None:
        if self._is_patient or not problem:
            self._node.told(self._began, sum(part.at.size for part in self._parts), problem)
