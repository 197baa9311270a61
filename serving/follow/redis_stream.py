"""A Redis stream: redis://HOST:PORT/DB?stream=KEY, rediss:// with TLS, unix://PATH?stream=KEY.

The position is the id of the last applied entry; ids hold times. To notice trimmed entries, each read also
checks that the entry at the position still exists (trimming starts at the front) and the largest deleted id.
While Redis is away, retries back off.
"""

import logging
import time
from base64 import b64encode
from collections.abc import Callable, Container
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlencode

from tableside.loader.deltas.changes import ChangeBatch, RowRules
from tableside.loader.deltas.hosts import passed_fields
from tableside.loader.errors import ChangeError
from tableside.quant.installed import require
from tableside.serving.errors import SourceError
from tableside.serving.follow.redis_entries import Entries
from tableside.serving.follow.source import IsStopping, pause, refusing

require("a Redis stream", "redis", "hiredis", extra="redis")
import redis  # noqa: E402  (told in one line where it is missing)

FIRST, MOST_ENTRIES = 16, 1000  # entries that are asked for at once: at first, and at most
_BLOCK_S, _ANSWER_S = 0.2, 5.0  # that an answer may wait for entries; that a server may take besides
_AGAIN_S, _LONGEST_S = 0.1, 5.0  # between two attempts to reach a server, doubled each time
_READ_BYTES = 1 << 20
_OLD_GROUPS = 16  # that make one, of entries that are older than as many
_log = logging.getLogger("tableside.follow")
Id = tuple[int, int]
T = TypeVar("T")
Entry = tuple[str, list[bytes]]  # its id, and fields and values in turns
# entries; is the position there; the last id, and the last deleted one
Found = tuple[list[Entry], bool, tuple[str, str] | None]
_LARGEST = 1 << 64  # above the numbers of an entry's id


class RedisStream:
    """A stream. table: of entries that name none. start: "start", "end", or an entry's id. group_s: entries
    that were made within as many seconds are a group; 0: there are none."""

    def __init__(
        self,
        url: str,
        name: str,
        table: str | None,
        start: str,
        is_stopping: IsStopping,
        group_s: float = 0.0,
        strings: Container[str] = (),
    ) -> None:
        """SourceError: the URL or `start` is invalid. MissingBackend: the client is not installed."""
        self._url, self._key = split_url(url)
        self.name, self._start, self._is_stopping = name, start, is_stopping
        self._begin = start if start not in ("start", "end") else "0-0" if start == "start" else None
        self._where = f"Redis stream {self._key!r}"
        if self._begin is not None:
            self._id(self._begin)
        self._rules = partial(RowRules, self._where, "entry", table, strings)
        self._client = _connect(self._url)
        self._group_ms = max(1, int(1000 * group_s)) if group_s else 0
        self._most_rows = 0.0  # of one entry
        self._latest: Entry = ("", [])
        self._away_since: float | None = None
        # while it is away: the next pause, and when it is asked again
        self._again_s, self._again_at = (_AGAIN_S, 0.0)

    def read(
        self, after: str | None, rows: int, wait_s: float, most: int | None = None
    ) -> ChangeBatch | None:
        """As `Source.read`. SourceError: entries behind `after` are gone, or the stream is another one."""
        end = time.monotonic() + wait_s
        entries, position, first = Entries(self._rules()), after, ""
        passed, group, step_ms, is_group_end = list[str](), "", 0, False
        room = MOST_ENTRIES if most is None else most  # entries that may be asked for at once
        while True:
            count = min(room, int((rows - entries.rows) / self._most_rows) + 1 if self._most_rows else FIRST)
            left = max(0.0, end - time.monotonic())
            try:
                found = self._ask(position, count, left)
            except SourceError:
                if not first:
                    raise
                break  # what was read is applied; Redis may have it no more. Then the error comes again
            if found:
                self._most_rows *= 0.9  # large entries are forgotten by and by
            room -= 0 if most is None else len(found or ())
            for id_, fields in found or ():
                if self._group_ms:
                    step_ms = step_ms or self._step_ms(id_)
                    number = self._id(id_)[0] // step_ms
                    if is_group_end := bool(first) and group != f"{step_ms} {number}":
                        room = 0
                        break
                    group = f"{step_ms} {number}"
                self._latest = id_, fields
                try:
                    added = entries.add(id_, fields)
                except ChangeError as error:
                    if not first:
                        return ChangeBatch(refusing(error), self.name, id_, after, self._id(id_)[0] / 1000)
                    room = 0  # what came before it is applied
                    break
                first, position = first or id_, id_
                if self._group_ms:
                    passed.append(passed_fields(id_, fields))
                self._most_rows = max(self._most_rows, added)
            if entries.rows >= rows or not room or time.monotonic() >= end or self._is_stopping():
                break
            if found is None and first:
                break  # what was read is applied; then Redis is waited for
            if found is not None and len(found) < count:
                pause(min(end - time.monotonic(), _BLOCK_S / 10), self._is_stopping)
        if not first:
            return None
        made_at = self._id(first)[0] / 1000
        return ChangeBatch(entries.told(), self.name, position, after, made_at, passed, group, is_group_end)

    def _step_ms(self, id_: str) -> int:
        """Returns the milliseconds of an entry's group: more for an old one, so that who is behind catches
        up."""
        is_old = 1000 * time.time() - self._id(id_)[0] > _OLD_GROUPS * self._group_ms
        return self._group_ms * (_OLD_GROUPS if is_old else 1)

    def content(self, position: str) -> dict[str, str]:
        """The fields of the entry that was read last, their values in base64; none of another one."""
        id_, fields = self._latest
        names = [name.decode("utf-8", "replace") for name in fields[::2]] if id_ == position else []
        return dict(zip(names, (b64encode(value).decode() for value in fields[1::2]), strict=False))

    def close(self) -> None:
        self._client.close()

    def _ask(self, position: str | None, count: int, wait_s: float) -> list[tuple[str, list[bytes]]] | None:
        """Entries behind a position, checked for gaps; None: Redis is away, which was waited for."""
        if (left := self._again_at - time.monotonic()) > 0 and self._away_since is not None:
            pause(min(left, wait_s), self._is_stopping)
            return None
        try:
            if position is None and self._begin is None:
                self._begin = self._last()
            found, is_there, info = self._entries(position or str(self._begin), count, wait_s)
        except redis.AuthenticationError as error:
            raise SourceError(
                f"{self._where}: {error}; name the user as redis://USER:PASSWORD@HOST?stream=KEY"
            ) from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            self._away(error)
            return None
        except redis.RedisError as error:
            raise SourceError(f"{self._where}: {error}; expected a stream that this user may read") from error
        except MemoryError as error:
            raise SourceError(
                f"{self._where}: an answer says that it takes more than there is; expected entries"
            ) from error
        self._back()
        self._check_order(position or str(self._begin), found)
        if position is not None:
            self._check(position, found, is_there, info)
        return found

    def _entries(self, position: str, count: int, wait_s: float) -> Found:
        """Returns the entries, whether the one at the position exists, and the stream's info."""
        block_ms = max(1, int(1000 * min(wait_s, _BLOCK_S)))
        with self._client.pipeline(transaction=False) as line:
            line.execute_command("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", self._key, position)
            line.execute_command("XRANGE", self._key, position, position, "COUNT", 1)
            line.execute_command("XINFO", "STREAM", self._key)
            read, there, info = line.execute(raise_on_error=False)
        for answer in (read, there):
            if isinstance(answer, Exception):
                raise answer
        if isinstance(info, Exception):
            if "no such key" not in str(info):
                raise info
            return [], False, None
        entries = self._parsed(_entries_of, read)
        return entries, bool(there), self._parsed(_ids_of, info)

    def _last(self) -> str:
        """Returns the largest id that the stream ever had; 0-0: there is no stream."""
        try:
            info = self._client.execute_command("XINFO", "STREAM", self._key)
        except redis.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return "0-0"
        return self._parsed(_ids_of, info)[0]

    def _parsed(self, parse: Callable[[Any], T], answer: Any) -> T:
        """SourceError: the answer is none of a stream's."""
        try:
            return parse(answer)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SourceError(
                f"{self._where}: an answer is not that of a stream ({error}); expected Redis 5 or later "
                "behind the URL"
            ) from error

    def _check_order(self, position: str, entries: list[Entry]) -> None:
        """SourceError: an entry's id is none, or no larger than the one before it."""
        for id_, _ in entries:
            if self._id(id_) <= self._id(position):
                raise SourceError(
                    f"{self._where}: entry {id_} came behind {position}; expected ids that ascend, as Redis "
                    "gives them"
                )
            position = id_

    def _check(
        self,
        position: str,
        entries: list[tuple[str, list[bytes]]],
        is_there: bool,
        ids: tuple[str, str] | None,
    ) -> None:
        """SourceError: entries behind the position are gone."""
        remedy = "load a new version, or go on without them with --reset --from start, end or an entry's id"
        if ids is None:
            raise SourceError(
                f"{self._where}: it is gone; what was applied ends at {position}; Redis lost it, or it was "
                f"removed: {remedy}"
            )
        at, (last, deleted) = self._id(position), ids
        if self._id(last) < at:
            raise SourceError(
                f"{self._where}: its last entry is {last}, and what was applied ends at {position}; Redis "
                f"lost what came after {last}, or began anew: {remedy}"
            )
        if self._id(deleted) > at:
            raise SourceError(
                f"{self._where}: entry {deleted} was deleted before it was read; {position} was applied "
                f"last: {remedy}"
            )
        if not is_there and self._id(last) > at:
            first = entries[0][0] if entries else last
            raise SourceError(
                f"{self._where}: entry {position}, which was applied last, is gone, so entries between it "
                f"and {first} may be: the stream was trimmed before it was read, or is another one; let it "
                f"keep more, and {remedy}"
            )

    def _away(self, error: Exception) -> None:
        """Logs once that Redis is away, and waits before the next try."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            _log.warning("%s cannot be reached (%s); trying again", self._where, error)
        self._again_at = time.monotonic() + self._again_s
        self._again_s = min(2 * self._again_s, _LONGEST_S)

    def _back(self) -> None:
        if self._away_since is not None:
            _log.warning(
                "%s is reached again, after %.1f s", self._where, time.monotonic() - self._away_since
            )
            self._away_since, self._again_s = None, _AGAIN_S

    def _id(self, text: str) -> Id:
        """An entry's id: milliseconds, and a number among those of one millisecond."""
        first, dash, second = text.partition("-")
        for number in (first, second) if dash else (first,):
            if not (number.isascii() and number.isdecimal() and len(number) <= 20 and int(number) < _LARGEST):
                raise SourceError(
                    f"{self._where}: a position is an entry's id, as 1732300000000-0; found {text[:60]!r}"
                )
        return int(first), int(second or 0)


def split_url(url: str) -> tuple[str, str]:
    """(the server's URL, the stream's key). SourceError: it names no stream."""
    server, _, options = url.partition("?")
    query = parse_qs(options)
    keys = query.pop("stream", [])
    if len(keys) != 1:
        scheme, _, rest = server.partition("://")
        shown = f"{scheme}://{rest.rpartition('@')[2]}"  # a password is not shown
        raise SourceError(
            f"{shown} names {len(keys)} streams; expected one, as redis://HOST:6379/0?stream=KEY"
        )
    return f"{server}?{urlencode(query, doseq=True)}".rstrip("?"), keys[0]


def _connect(url: str) -> Any:
    """A client that gives answers as they come, and never waits for long. SourceError: the URL is wrong."""
    try:
        client = redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=_BLOCK_S + _ANSWER_S,
            socket_connect_timeout=_ANSWER_S,
            socket_read_size=_READ_BYTES,
            retry=None,
            single_connection_client=False,
        )
    except (ValueError, TypeError) as error:
        raise SourceError(
            f"the URL of the Redis stream is wrong: {error}; expected redis://HOST:6379/0?stream=KEY"
        ) from error
    raw: Callable[..., Any] = lambda answer, **_: answer  # noqa: E731
    for command in ("XREAD", "XRANGE", "XINFO"):
        client.set_response_callback(command, raw)
    return client


def _entries_of(answer: Any) -> list[Entry]:
    """The entries of an answer to XREAD. LookupError, TypeError, ValueError and others: it is none."""
    entries: list[Entry] = [(id_.decode(), fields) for id_, fields in answer[0][1]] if answer else []
    for id_, fields in entries:
        if not isinstance(fields, list) or len(fields) % 2 or not {*map(type, fields)} <= {bytes}:
            raise ValueError(f"entry {id_[:60]} has other than fields and values in turns")
    return entries


def _ids_of(answer: Any) -> tuple[str, str]:
    """Returns the last id and the last deleted one of an XINFO STREAM answer. LookupError, TypeError,
    ValueError: invalid."""
    says = dict(zip(answer[::2], answer[1::2], strict=True))
    return says[b"last-generated-id"].decode(), says.get(b"max-deleted-entry-id", b"0-0").decode()
