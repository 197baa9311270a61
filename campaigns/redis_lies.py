"""A Redis that lies: a server gives a follower's commands handmade answers (`CASES`), and random changes of
an honest one's.

Promised: what is no stream's answer ends in one error that names the stream, or is waited for as a server
that is away; nothing else is raised, and no batch ends at or before the place behind which it was asked for.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from campaigns.common import Goal, at_least, console, none, random_of, standalone
from campaigns.files import mutate
from tableside.loader.errors import ChangeError
from tableside.serving.errors import SourceError
from tableside.serving.follow.loop import open_source

AFTER = 1  # the entry that is asked from
ANSWER_S = 0.2  # that a server may take


class Answers(NamedTuple):
    """What the server says to XREAD, XRANGE and XINFO STREAM, in Redis's protocol."""

    read: bytes
    there: bytes
    info: bytes


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


def array(*items: bytes) -> bytes:
    return b"*%d\r\n" % len(items) + b"".join(items)


def entry(id_: bytes, *fields: bytes) -> bytes:
    return array(bulk(id_), array(*map(bulk, fields)))


def _read(*entries: bytes) -> bytes:
    return array(array(bulk(b"k"), array(*entries)))


_FIELDS = (b"ids", b"\1" + bytes(7), b"vectors", b"\0\0\x80\x3f")
_LAST, _DELETED = bulk(b"last-generated-id"), bulk(b"max-deleted-entry-id")
HONEST = Answers(
    _read(entry(b"5-0", *_FIELDS), entry(b"6-0", *_FIELDS)),
    array(entry(b"%d-0" % AFTER, *_FIELDS)),
    array(_LAST, bulk(b"6-0"), _DELETED, bulk(b"0-0")),
)
_READS = {
    "a number": b":1\r\n",
    "a text": b"+OK\r\n",
    "bytes": bulk(b"abc"),
    "numbers": array(b":1\r\n", b":2\r\n"),
    "a number of protocol 3": b",1.5\r\n",
    "a map": b"%1\r\n+a\r\n+b\r\n",
    "a large number": b"(" + b"9" * 6000 + b"\r\n",
    "an error inside": array(b"-ERR x\r\n"),
    "an error that is no text": b"-ERR \xff\xfe\r\n",
    "another protocol": b"hello\r\n",
    "nested 100,000 deep": b"*1\r\n" * 100_000 + b":1\r\n",
    "2**32 items": b"*4294967295\r\n",
    "4 GiB of bytes": b"$4294967295\r\nab",
    "a stream without entries": array(array(bulk(b"k"))),
    "an entry that is a number": _read(b":7\r\n"),
    "an id that is a number": _read(array(b":7\r\n", array())),
    **{
        f"the id {id_[:20]!r}": _read(entry(id_, *_FIELDS))
        for id_ in (b"\xff", b"abc", b"", b"9" * 400, b"9" * 5000, b"-1-0")
    },
    "an odd number of fields": _read(entry(b"5-0", *_FIELDS[:3])),
    "no fields": _read(array(bulk(b"5-0"), b"*-1\r\n")),
    "fields that are numbers": _read(array(bulk(b"5-0"), array(b":1\r\n", b":2\r\n"))),
    "fields that are lists": _read(array(bulk(b"5-0"), array(array(), array()))),
    "an entry before": _read(entry(b"0-5", *_FIELDS)),
    "the entry itself": _read(entry(b"%d-0" % AFTER, *_FIELDS)),
    "entries that descend": _read(entry(b"7-0", *_FIELDS), entry(b"6-0", *_FIELDS)),
}
_INFOS = {
    "a number": b":1\r\n",
    "nothing": b"$-1\r\n",
    "no fields": array(),
    "an odd number of fields": array(bulk(b"x")),
    "names that are lists": array(array(), bulk(b"5-0")),
    "an id that is no text": array(_LAST, bulk(b"\xff")),
    "an id that is a number": array(_LAST, b":5\r\n"),
    "a deleted id that is a list": array(_LAST, bulk(b"6-0"), _DELETED, array()),
}
CASES = {f"XREAD: {what}": HONEST._replace(read=lie) for what, lie in _READS.items()}
CASES |= {f"XINFO: {what}": HONEST._replace(info=lie) for what, lie in _INFOS.items()}


@contextmanager
def server(answers: Answers) -> Iterator[str]:
    """A server that gives these answers, and OK to anything else; yields the URL of its stream."""
    said = dict(zip((b"XREAD", b"XRANGE", b"XINFO"), answers, strict=True))

    def talk(client: socket.socket) -> None:
        with suppress(OSError, ValueError), client, client.makefile("rb") as asked:
            while line := asked.readline():
                words = []
                for _ in range(int(line[1:])):
                    words.append(asked.read(int(asked.readline()[1:]) + 2)[:-2])
                client.sendall(said.get(words[0].upper(), b"+OK\r\n"))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listening.accept()[0],), daemon=True).start()

    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path := str(Path(folder) / "s"))
        listening.listen()
        threading.Thread(target=accept, daemon=True).start()
        yield f"unix://{path}?stream=k"
        listening.shutdown(socket.SHUT_RDWR)


def outcome(answers: Answers) -> tuple[str, str]:
    """What a follower makes of the answers, and why: "applied", "waited for", "refused" or "broken"."""
    with server(answers) as url:
        source = open_source(url, None, "user", "start", lambda: False)
        try:
            batch = source.read(f"{AFTER}-0", 2, 0.05)
            if batch is None:
                return "waited for", ""
            rows = sum(c.rows for c in batch.changes)
            is_behind = int((batch.position or "0").partition("-")[0]) > AFTER
            return ("applied", f"{rows} rows") if is_behind else ("broken", f"a batch up to {batch.position}")
        except (SourceError, ChangeError) as error:
            return (
                ("refused", str(error))
                if "'k'" in str(error)
                else ("broken", f"without the stream's name: {error}")
            )
        except Exception as error:  # noqa: BLE001  (what it is, is what the campaign reports)
            return "broken", f"{type(error).__name__}: {error!s:.300}"
        finally:
            source.close()


def run(seconds: float, seed: int) -> dict[str, float]:
    """Each handmade lie once, then random changes of honest answers."""
    from tableside.serving.follow import redis_stream  # needs Redis's client, which other campaigns do not

    before, redis_stream._ANSWER_S = redis_stream._ANSWER_S, ANSWER_S
    counts: Counter[str] = Counter(
        {"handmade lies": len(CASES), "random changes": 0, "broken": 0, "applied lies": 0}
    )
    end = time.monotonic() + seconds
    try:
        for name, answers in CASES.items():
            found, why = outcome(answers)
            counts["applied lies"] += found == "applied"
            _count(counts, name, found, why)
        while time.monotonic() < end or not counts["random changes"]:
            rng = random_of(seed, "redis lies", counts["random changes"])
            at = rng.randrange(3)
            changed = [mutate(answer, rng) if n == at else answer for n, answer in enumerate(HONEST)]
            _count(counts, f"change {counts['random changes']}", *outcome(Answers(*changed)))
            counts["random changes"] += 1
    finally:
        redis_stream._ANSWER_S = before
    return dict(counts)


def _count(counts: Counter[str], name: str, found: str, why: str) -> None:
    counts[found] += 1
    if found == "broken":
        console.print(f"{name}: {why}", markup=False)


GOALS: dict[str, Goal] = {"random changes": at_least(500), "broken": none(), "applied lies": none()}


if __name__ == "__main__":
    standalone(run)
