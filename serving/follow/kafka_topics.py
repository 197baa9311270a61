"""Topics of Kafka: kafka://BROKER:9092[,BROKER…]/TOPIC[,TOPIC…]?form=rows. Other options of the URL are
librdkafka's settings, as security.protocol=SASL_SSL.

A position is the offset of the next message of each partition, `rows/0:42 rows/1:7`, kept with the rows; no
consumer group is asked. Partitions have no common order: rows of one id belong to one partition. Brokers that
are away are waited for, by librdkafka. Forms of messages:

    rows   key: ids int64 [n]; value: vectors [n, dim] fp32; no value: deletions; headers: table, dtype (fp16)
    json   value: {"table": "user", "id": 7, "vector": [0.5, 1]}, as in a file of changes
           an id is a string where the table's ids are, and in rows the key is strings as BYTES
    hps    value: HCTR, bytes of a vector uint32, then ids int64 and vectors fp32 in turns, as NVIDIA's HPS
           sends them; the table is the last part of the topic's name
"""

import logging
import time
from base64 import b64encode
from collections.abc import Callable, Container
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import orjson

from tableside.loader.deltas.change_lines import row_of
from tableside.loader.deltas.changes import ChangeBatch, RowRules
from tableside.loader.errors import ChangeError
from tableside.quant.installed import require
from tableside.serving.errors import SourceError
from tableside.serving.follow.redis_entries import Entries
from tableside.serving.follow.source import PAUSE_S, IsStopping, pause, refusing

require("a topic of Kafka", "confluent_kafka", extra="kafka")
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition  # noqa: E402  (told above)

FIRST, MOST_MESSAGES = 16, 1000  # messages that are asked for at once: at first, and at most
_ANSWER_S = 1.0  # that brokers may take to describe topics
_LOOK_S = 30.0  # between two looks for new partitions
_OURS = {"enable.auto.commit": False, "auto.offset.reset": "error", "group.id": "tableside"}
_PASSING = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE}
_GONE = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}
_EXPECTED = "kafka://HOST:9092/TOPIC?form=rows"
_REMEDY = "load a new version, or go on without them with --reset --from start, end or a position"
_log = logging.getLogger("tableside.follow")
Partition = tuple[str, int]
Offsets = dict[Partition, int]  # of the next message


class KafkaTopics:
    """Messages of topics. table: of messages that name none. start: "start", "end", or a position."""

    def __init__(
        self,
        url: str,
        name: str | None,
        table: str | None,
        start: str,
        is_stopping: IsStopping,
        strings: Container[str] = (),
    ) -> None:
        """SourceError: the URL or `start` is invalid. MissingBackend: the client is not installed."""
        brokers, self._topics, self._form, options = split_url(url)
        self.name = name or f"kafka:{','.join(self._topics)}"
        self._where = f"Kafka topic {','.join(self._topics)}"
        self._start, self._begin = start, None if start in ("start", "end") else self._offsets(start)
        self._rules = partial(RowRules, self._where, "message", table, strings)
        self._is_stopping = is_stopping
        self._refused: KafkaError | None = None
        self._is_away = False
        settings = {"log_level": 0, **options, **_OURS, "bootstrap.servers": brokers, "error_cb": self._note}
        try:
            self._consumer = Consumer(settings, logger=_log)
        except (KafkaException, ValueError, TypeError) as error:
            raise SourceError(
                f"{self._where}: {error}; expected librdkafka's settings: {_EXPECTED}"
            ) from error
        self._first: Offsets | None = None  # of the oldest message in `_held`; None: nothing is assigned
        self._next: Offsets = {}  # of the consumer
        self._held: list[Any] = []  # messages from `_first` to `_next`, to be read again where one is refused
        self._looked_at = 0.0
        self._most_rows = 0.0  # of one message
        self._latest: tuple[str, list[bytes]] = ("", [])

    def read(
        self, after: str | None, rows: int, wait_s: float, most: int | None = None
    ) -> ChangeBatch | None:
        """As `ChangeSource.read`. SourceError: messages behind `after` are gone, or brokers refuse."""
        end = time.monotonic() + wait_s
        if not self._turn_to(after, end):
            return None
        assert self._first is not None
        entries = Entries(self._rules())
        reached, taken, made_at = dict(self._first), 0, float("inf")
        while True:
            room = MOST_MESSAGES if most is None else most - taken
            wanted = int((rows - entries.rows) / self._most_rows) + 1 if self._most_rows else FIRST
            for message in self._messages(taken, min(room, wanted), end):
                place = message.topic(), message.partition()
                try:
                    fields = self._fields(message, entry := f"{place[0]}/{place[1]}:{message.offset()}")
                    self._latest = entry, fields
                    self._most_rows = max(0.9 * self._most_rows, entries.add(entry, fields))
                except ChangeError as error:
                    if taken:
                        room = 0  # what came before it is applied
                        break
                    passed = _text({**reached, place: message.offset() + 1})
                    return ChangeBatch(refusing(error), self.name, passed, after, _made_at(message))
                reached[place] = message.offset() + 1
                taken, made_at = taken + 1, min(made_at, _made_at(message) or made_at)
            is_full = entries.rows >= rows or taken == most or not room
            if is_full or time.monotonic() >= end or self._is_stopping():
                break
        if not taken:
            return None
        oldest = made_at if made_at < float("inf") else None
        return ChangeBatch(entries.told(), self.name, _text(reached), after, oldest)

    def content(self, position: str) -> dict[str, str]:
        """The fields of the message that was read last, in base64."""
        entry, fields = self._latest
        names = [name.decode("utf-8", "replace") for name in fields[::2]]
        values = (b64encode(value).decode() for value in fields[1::2])
        return {"message": entry, **dict(zip(names, values, strict=True))}

    def close(self) -> None:
        self._consumer.close()

    # ---- places ----

    def _turn_to(self, after: str | None, end: float) -> bool:
        """Makes `_first` the place behind a position; False: brokers do not answer, or there is no topic yet.
        SourceError: messages are gone."""
        wanted = self._begin if after is None else self._offsets(after)
        if wanted is None or time.monotonic() > self._looked_at + _LOOK_S or self._first is None:
            there = self._partitions(end)
            if there is None or (not there and after is None):
                pause(max(0.0, min(end - time.monotonic(), PAUSE_S)), self._is_stopping)
                return False
            if wanted is None:
                wanted = self._begin = self._ends(there)
            if lost := set(wanted) - set(there):
                topic, number = min(lost)
                raise SourceError(
                    f"{self._where}: partition {number} of {topic} is gone, and changes were applied up to "
                    f"{_text(wanted)}; {_REMEDY}"
                )
            wanted = {**dict.fromkeys(there, 0), **wanted}  # of a new partition everything
            self._looked_at = time.monotonic()
        else:
            wanted = {**dict.fromkeys(self._next, 0), **wanted}
        first = self._first or {}
        if set(wanted) == set(first) and all(first[p] <= n <= self._next[p] for p, n in wanted.items()):
            self._held = [m for m in self._held if m.offset() >= wanted[m.topic(), m.partition()]]
        else:
            self._held = []
            self._consumer.assign([TopicPartition(*place, offset) for place, offset in wanted.items()])
            self._next = dict(wanted)
        self._first = wanted
        return True

    def _partitions(self, end: float) -> list[Partition] | None:
        """Returns the topics' partitions; None: brokers do not answer."""
        found: list[Partition] = []
        try:
            for topic in self._topics:
                left = max(0.1, min(_ANSWER_S, end - time.monotonic()))
                there = self._consumer.list_topics(topic, timeout=left).topics[topic]
                if there.error is not None and there.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise KafkaException(there.error)
                found += [(topic, number) for number in there.partitions]
        except KafkaException as error:
            if self._first is None:
                self._consumer.poll(0)  # calls `_note`; there is no message yet
            self._check(error.args[0])
            return None
        return found

    def _ends(self, there: list[Partition]) -> Offsets:
        """Returns where each partition begins, or ends, as `start` says."""
        which = 0 if self._start == "start" else 1
        try:
            known = self._consumer.get_watermark_offsets
            return {place: known(TopicPartition(*place), timeout=5 * _ANSWER_S)[which] for place in there}
        except KafkaException as error:
            raise SourceError(
                f"{self._where}: {error.args[0].str()}; expected its first and last offset"
            ) from error

    def _offsets(self, position: str) -> Offsets:
        try:
            parts = (part.rpartition(":") for part in position.split())
            places = [(*place.rpartition("/")[::2], int(offset)) for place, _, offset in parts]
            found = {(topic, int(number)): offset for topic, number, offset in places}
        except ValueError:
            found = {}
        if not found or {topic for topic, _ in found} - {*self._topics} or min(found.values()) < 0:
            raise SourceError(
                f"{self._where}: {position!r} is no position; expected the next offset of each partition, as "
                f"'{self._topics[0]}/0:42 {self._topics[0]}/1:7'"
            )
        return found

    # ---- messages ----

    def _messages(self, taken: int, count: int, end: float) -> list[Any]:
        """Returns messages behind the first `taken` held ones, which are held as well. SourceError: they are
        gone, or refused."""
        if missing := count - (len(self._held) - taken):
            left = min(PAUSE_S, max(0.0, end - time.monotonic())) if missing > 0 else 0.0
            found: list[Any] = self._consumer.consume(missing, left) if missing > 0 else []
            for message in found:
                if message.error() is not None:
                    self._check(message.error(), message)
                    continue
                self._is_away = False
                self._held.append(message)
                self._next[message.topic(), message.partition()] = message.offset() + 1
        if self._refused is not None:
            self._check(self._refused)
        return self._held[taken : taken + count]

    def _note(self, error: KafkaError) -> None:
        """Takes an error of a connection, on the thread that reads."""
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._FATAL):
            self._refused = error
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._away(error)

    def _away(self, error: KafkaError) -> None:
        if not self._is_away:
            self._is_away = True
            _log.warning("%s: no broker answers (%s); trying again", self._where, error.str())

    def _check(self, error: KafkaError, message: Any = None) -> None:
        """SourceError: an error does not pass by itself."""
        if self._refused is not None:
            raise SourceError(
                f"{self._where}: {self._refused.str()}; expected brokers that let this user read"
            )
        if error.code() in _PASSING or error.retriable():
            self._away(error)
            return
        if error.code() in _GONE:
            place = f"{message.topic()}/{message.partition()}:{message.offset()}"
            raise SourceError(
                f"{self._where}: the changes from {place} on are gone, or the topic is another one "
                f"({error.str()}); {_REMEDY}"
            )
        raise SourceError(f"{self._where}: {error.str()}; expected topics that this user may read")

    def _fields(self, message: Any, entry: str) -> list[bytes]:
        """Returns fields and values in turns, as of an entry of a Redis stream. ChangeError: the message has
        not the form."""
        fields: list[bytes] = _FORMS[self._form](self._rules(), entry, message)
        return fields


def _rows(rules: RowRules, entry: str, message: Any) -> list[bytes]:
    headers = dict(message.headers() or ())
    fields = [
        part for name in ("table", "dtype") if name in headers for part in (name.encode(), headers[name])
    ]
    value = message.value()
    return [
        *fields,
        b"ids",
        message.key() or b"",
        *((b"deleted", b"1") if value is None else (b"vectors", value)),
    ]


def _json(rules: RowRules, entry: str, message: Any) -> list[bytes]:
    table, id_, vector = row_of(rules, entry, message.value() or b"")
    if isinstance(id_, str) is not (table in rules.strings):
        expected = "an integer" if isinstance(id_, str) else "a string"
        raise rules.error(entry, f"its id is {id_!r:.60}; expected {expected}, as table {table!r} has")
    return [b"table", table.encode(), b"id", str(id_).encode(), b"vector", orjson.dumps(vector)]


def _hps(rules: RowRules, entry: str, message: Any) -> list[bytes]:
    value = message.value() or b""
    size = int.from_bytes(value[4:8], "little")
    if value[:4] != b"HCTR" or len(value) < 8 or (len(value) - 8) % (8 + size):
        raise rules.error(
            entry, f"{len(value)} bytes that begin {value[:8]!r}; expected HCTR, the bytes of a vector, and "
            "int64 ids each with its vector"
        )  # fmt: skip
    pairs = np.frombuffer(value, np.uint8, offset=8).reshape(-1, 8 + size)
    table = [] if rules.table else [b"table", message.topic().rpartition(".")[2].encode()]
    return [*table, b"ids", pairs[:, :8].tobytes(), b"vectors", pairs[:, 8:].tobytes()]


_FORMS: dict[str, Callable[[RowRules, str, Any], list[bytes]]] = {"rows": _rows, "json": _json, "hps": _hps}


def _made_at(message: Any) -> float | None:
    kind, at_ms = message.timestamp()
    return at_ms / 1000 if kind else None


def _text(offsets: Offsets) -> str:
    return " ".join(f"{topic}/{number}:{offset}" for (topic, number), offset in sorted(offsets.items()))


def split_url(url: str) -> tuple[str, list[str], str, dict[str, str]]:
    """(brokers, topics, form of messages, librdkafka's settings). SourceError: it has another form."""
    brokers, _, rest = url.partition("://")[2].partition("/")
    names, _, query = rest.partition("?")
    options = dict(parse_qsl(query))
    form, topics = options.pop("form", "rows"), [name for name in names.split(",") if name]
    if not brokers or not topics or form not in _FORMS:
        raise SourceError(
            f"kafka://{brokers}/{names} with form={form}; expected {_EXPECTED}, and of the forms "
            f"{', '.join(_FORMS)}"
        )
    return brokers, topics, form, options
