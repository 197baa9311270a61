"""Reads rows from Redis for lookups: of all tables of a request at once, by one pipeline to each server."""

import contextlib
import fcntl
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hiredis
import numpy as np
import redis

from tableside.loader.model.tiers import RedisTier
from tableside.loader.redis.blocks import RedisBlocks
from tableside.loader.redis.keys import note_name
from tableside.loader.redis.replies import Replies
from tableside.loader.redis.servers import LATE_ROWS, RedisNode, servers_of
from tableside.loader.segment.blocks import OPENS_S
from tableside.loader.segment.remote import RemoteTable
from tableside.quant.contract import Ids
from tableside.quant.rows.fetched import RowsAsked, RowState
from tableside.quant.rows.turns import waiting

logger = logging.getLogger("tableside")

# What became of rows, for counts
CAME, LATE, GONE, CORRUPT = "came", "late", "gone", "corrupt"
_TURNS = 5  # a server may say that another one has a slot, and that one, too
_PART_ROWS = 2048  # that are asked for and read together: the server answers some while others are read
_TOLD_S = 1.0  # between two lines of the log about rows that are gone or damaged
_MOVED = re.compile(r"(?P<how>MOVED|ASK) [0-9]+ (?P<host>\S*):(?P<port>[0-9]{1,5})")
_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class _Part(NamedTuple):
    """Rows of one table. at: places in `asked`."""

    blocks: RedisBlocks
    asked: RowsAsked
    at: Ids

    @property
    def rows(self) -> Ids:
        return self.asked.rows[self.at]

    def cut(self) -> Iterator["_Part"]:
        for start in range(0, self.at.size, _PART_ROWS):
            yield self._replace(at=self.at[start : start + _PART_ROWS])


class _Place(NamedTuple):
    """A server that is asked. is_asking: for rows of a slot that is on its way there."""

    name: str
    is_asking: bool = False


_Left = dict[_Place | None, list[_Part]]  # rows by the server to ask; None: that which has their slots
_Counts = Counter[tuple[str, str]]  # rows by table and outcome


class RedisRows:
    """Rows of a version's tables in Redis. folder: of the version, in which the notes of keys are held, so
    that these stay while this object lives; timeout_s: for which a request waits; count: is told a table,
    what became of rows, and how many."""

    def __init__(
        self,
        tables: Sequence[RemoteTable],
        folder: Path,
        timeout_s: float,
        count: Callable[[str, str, int], object],
    ) -> None:
        self._blocks = {t.name: RedisBlocks(t.place, t.row_bytes) for t in tables}
        first = next(iter(self._blocks.values())).place
        self._servers = servers_of(RedisTier(first.addresses, first.is_tls))
        self._timeout_s, self._count, self._told_at = timeout_s, count, -_TOLD_S
        self._notes: list[int] = []
        for blocks in self._blocks.values():
            # On a host that has a copy of the folder, keys are not this folder's to keep
            with contextlib.suppress(OSError):
                note = folder / note_name(blocks.place.seed)
                self._notes.append(os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
                fcntl.flock(self._notes[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __del__(self) -> None:
        for fd in getattr(self, "_notes", ()):
            os.close(fd)

    def fetch(self, asked: Sequence[RowsAsked], deadline: float | None) -> None:
        """Reads rows of these tables, as `quant.rows.fetched.Fetch`."""
        deadline = time.monotonic() + self._timeout_s if deadline is None else deadline
        left: _Left = {None: []}
        for one in asked:
            own = one.ends[0]
            one.state[:own], one.state[own:] = RowState.LATE, RowState.MISSING
            left[None].append(_Part(self._blocks[one.table], one, np.arange(own)))
        counts: _Counts = Counter()
        for turn in range(_TURNS):
            if turn or not self._servers.names:
                self._servers.learn(deadline, self.is_patient(deadline))
            calls = [_Call(self, place, parts, deadline) for place, parts in self._by_server(left)]
            left = {}
            for call in calls:
                call.send(left)
            for call in calls:
                call.receive(left, counts)
            if not left:
                break
        for one in asked:
            came, late, damaged, _ = np.bincount(one.state, minlength=len(RowState)).tolist()
            late -= counts[one.table, GONE]
            counts.update({(one.table, CAME): came, (one.table, LATE): late, (one.table, CORRUPT): damaged})
        for (table, outcome), rows in counts.items():
            self._count(table, outcome, rows)

    def _by_server(self, left: _Left) -> Iterator[tuple[_Place, list[_Part]]]:
        """Yields servers with the rows that they are asked for. left: rows by server; None: who has them."""
        names, by_slot = self._servers.names, self._servers.by_slot
        found = {place: parts for place, parts in left.items() if place is not None}
        for part in left.get(None, ()):
            owners = by_slot[part.blocks.slots(part.rows)] if len(names) > 1 else np.zeros_like(part.at)
            for number, name in enumerate(names):
                if (at := part.at[owners == number]).size:
                    found.setdefault(_Place(name), []).append(part._replace(at=at))
        yield from found.items()

    def node(self, name: str) -> RedisNode:
        return self._servers.node(name)

    def is_patient(self, deadline: float) -> bool:
        """Whether who waits until then can tell whether a server hangs."""
        return deadline - time.monotonic() >= min(self._timeout_s, OPENS_S) / 2

    def told(self, what: str, part: _Part, at: int) -> None:
        """Says that a row is gone or damaged."""
        if time.monotonic() - self._told_at >= _TOLD_S:
            self._told_at = time.monotonic()
            row = int(part.asked.rows[at])
            key = part.blocks.key(row // part.blocks.place.block_rows).decode()
            logger.error("table %s: row %d, key %s of Redis: %s", part.asked.table, row, key, what)


class _Call:
    """One pipeline to one server."""

    def __init__(self, of: RedisRows, place: _Place, parts: Sequence[_Part], deadline: float) -> None:
        self._of, self._place, self._deadline = of, place, deadline
        self._node, self._began = of.node(place.name), time.monotonic()
        self._parts = [part for one in parts for part in one.cut()]
        self._is_patient = of.is_patient(deadline)
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
                self._socket.settimeout(max(0.0, self._deadline - time.monotonic()))
                with waiting():
                    self._socket.sendall(commands)
        except (OSError, redis.RedisError) as error:
            self._fail(f"it is not reached ({error})", left)

    @property
    def _socket(self) -> Any:
        return self._connection._sock

    def receive(self, left: _Left, counts: _Counts) -> None:
        """Reads the answers. left: gets the rows that are to be asked for again; counts: those that are
        GONE."""
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
                for number, reply in others.items():
                    problem = self._take_other(part, number, reply, left, counts) or problem
        except (TimeoutError, BlockingIOError):
            self._fail(LATE_ROWS, left)
        except (OSError, hiredis.ProtocolError) as error:
            self._fail(f"its answer is not taken: {error}", left)
        else:
            self._node.give_back(self._connection)
            self._tell(problem)

    def _take_other(self, part: _Part, number: int, reply: Any, left: _Left, counts: _Counts) -> str:
        """Takes a reply that is no record, of one row; returns what is wrong with the server."""
        at = part.at[number : number + 1]
        if reply == b"":
            counts[part.asked.table, GONE] += 1
            self._of.told("it is gone; load the model again", part, int(at[0]))
        elif isinstance(reply, bytes):
            part.asked.state[at] = RowState.CORRUPT
            self._of.told(f"it has {len(reply)} bytes of {part.blocks.record_bytes}", part, int(at[0]))
        elif isinstance(reply, hiredis.ReplyError) and (moved := _MOVED.fullmatch(str(reply))):
            host = moved["host"] or self._place.name.rpartition(":")[0]
            place = _Place(f"{host}:{moved['port']}", moved["how"] == "ASK")
            left.setdefault(place, []).append(part._replace(at=at))
        else:
            return f"it refuses: {str(reply)[:200]}"
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
