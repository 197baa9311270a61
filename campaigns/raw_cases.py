"""HTTP as bytes, for the socket part of the requests campaign: a case is a script of requests, its bytes and
what must come back.

A lookup asks for one row by its id, so that an answer says which request it belongs to. Ids from HIDDEN on
stand only in bytes that are somebody's body or garbage: an answer with such an id means that bytes of one
request were taken for another.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

HIDDEN = 1000
LIVE = "live"  # the answer to GET /v2/health/live: a 200 that says so
REFUSED = "refused"  # a 4xx or 501, after which the connection is closed
Answer = int | str  # the id of a looked-up row, LIVE or REFUSED


@dataclass
class Script:
    """What is sent over one connection. expected: for each request the answers that are right; nothing
    comes after REFUSED."""

    name: str = ""
    data: bytes = b""
    expected: list[set[Answer]] = field(default_factory=list)
    ends: bool = False  # nothing is answered for sure after this: the script takes no more requests

    def add(self, data: bytes, *answers: Answer) -> None:
        self.data += data
        self.expected.append(set(answers))
        self.ends = REFUSED in answers


def lookup(row: int, padding: int = 0) -> bytes:
    """The JSON of an infer request for one row."""
    entry = {"name": "user", "datatype": "INT64", "shape": [1, 1], "data": [row]}
    return json.dumps({"inputs": [entry]}).encode() + b" " * padding


def request(
    body: bytes,
    *headers: bytes,
    method: bytes = b"POST",
    path: bytes = b"/v2/models/demo/infer",
    end: bytes = b"\r\n",
) -> bytes:
    return end.join([method + b" " + path + b" HTTP/1.1", b"Host: localhost", *headers, b"", b""]) + body


def length(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def plain(row: int) -> bytes:
    body = lookup(row)
    return request(body, length(body))


def chunked(body: bytes, chance: random.Random, extensions: bool = True) -> bytes:
    """A body in chunks of sizes by chance, with extensions and trailers now and then."""
    out, at = [], 0
    while at < len(body):
        size = chance.randint(1, max(1, len(body) - at))
        digits = chance.choice((b"%x", b"%X", b"0%x", b"%06x")) % size
        extension = chance.choice((b"", b";a", b";a=b", b';a="b;c"')) if extensions else b""
        out.append(digits + extension + b"\r\n" + body[at : at + size] + b"\r\n")
        at += size
    trailer = chance.choice((b"", b"", b"X-Trailer: y\r\n"))
    return b"".join(out) + b"0\r\n" + trailer + b"\r\n"


# ---- requests that are right, however odd ----


def _plain(script: Script, row: int, chance: random.Random) -> None:
    script.add(plain(row), row)


def _live(script: Script, row: int, chance: random.Random) -> None:
    script.add(request(b"", method=b"GET", path=b"/v2/health/live"), LIVE)


def _chunks(script: Script, row: int, chance: random.Random) -> None:
    name = chance.choice(
        (b"Transfer-Encoding: chunked", b"transfer-encoding:chunked", b"TRANSFER-ENCODING:  Chunked")
    )
    script.add(request(chunked(lookup(row), chance), name), row)


def _upgrade(script: Script, row: int, chance: random.Random) -> None:
    """An offer to speak another protocol, in any case, on requests with either kind of body."""
    name = "".join(chance.choice((c.upper(), c.lower())) for c in "upgrade").encode()
    offer = [
        name + chance.choice((b": h2c", b":websocket", b": TLS/1.0, h2c")),
        b"Connection: " + chance.choice((b"Upgrade", b"upgrade, HTTP2-Settings")),
    ]
    more = [b"HTTP2-Settings: AAEAAEAA"] if chance.random() < 0.5 else []
    body = lookup(row)
    if chance.random() < 0.5:
        headers, sent = [length(body)], body
    else:
        headers, sent = [b"Transfer-Encoding: chunked"], chunked(body, chance)
    headers = [*offer, *more, *headers]
    chance.shuffle(headers)
    script.add(request(sent, *headers), row)


def _upgrade_in_the_body(script: Script, row: int, chance: random.Random) -> None:
    """A body that looks like headers with an Upgrade: it is a body, byte for byte."""
    body = lookup(row)
    body = body[:-1] + b', "id": "\\r\\nUpgrade: h2c\\r\\n\\r\\n"}'
    script.add(request(body, length(body)), row)


def _hidden_body(script: Script, row: int, chance: random.Random) -> None:
    """A whole request as the body of another: refused as JSON, and never answered as a request. The
    connection stays."""
    body = plain(HIDDEN + row)
    script.add(request(body, length(body)), "400")


def _hidden_in_get(script: Script, row: int, chance: random.Random) -> None:
    """A GET may have a body, which is nobody's request."""
    body = plain(HIDDEN + row)
    script.add(request(body, length(body), method=b"GET", path=b"/v2/health/live"), LIVE)


def _expect(script: Script, row: int, chance: random.Random) -> None:
    body = lookup(row)
    script.add(request(body, length(body), b"Expect: 100-continue"), row)


def _padded(script: Script, row: int, chance: random.Random) -> None:
    """A body of many packets."""
    body = lookup(row, chance.randint(1000, 300_000))
    script.add(request(body, length(body)), row)


# ---- requests that may be refused, or must be; the script ends with them ----


def _refusable(*make: Callable[[bytes], list[bytes]]) -> "Kind":
    """Headers that a server must refuse, around a right body."""

    def add(script: Script, row: int, chance: random.Random) -> None:
        body = lookup(row)
        script.add(request(body, *chance.choice(make)(body)), REFUSED)

    return add


def _wrong_chunk(script: Script, row: int, chance: random.Random) -> None:
    """Chunk sizes that are no sizes."""
    size = chance.choice(
        (b"ffffffffffffffff", b"1ffffffffffffffff", b"0x10", b"-1", b"+5", b"g", b"", b" ", b"5 5", b"\x00")
    )
    script.add(request(size + b"\r\n" + plain(HIDDEN + row), b"Transfer-Encoding: chunked"), REFUSED)


def _length_and_chunks(script: Script, row: int, chance: random.Random) -> None:
    """Both ways of saying how long a body is: refused, or read in chunks, as RFC 9112 6.3 has it; never by
    the length."""
    body = chunked(lookup(row), chance)
    headers = [
        b"Content-Length: %d" % chance.choice((0, 3, len(body), len(body) + 500)),
        b"Transfer-Encoding: chunked",
    ]
    chance.shuffle(headers)
    script.add(request(body, *headers), row, REFUSED)


def _odd(script: Script, row: int, chance: random.Random) -> None:
    """What RFC 9112 lets a server accept or refuse."""
    body = lookup(row)
    odd = chance.choice(
        (
            request(body, length(body), b"X-Folded: a\r\n b"),
            request(body, length(body), end=b"\n"),
            request(body, length(body), length(body)),
            request(body, b"Content-Length: %d, %d" % (len(body), len(body))),
            request(body, b"Content-Length:\t%d " % len(body)),
            request(chunked(body, chance), b"Transfer-Encoding: identity, chunked"),
            request(body, length(body)).replace(b"Host: localhost\r\n", b""),
            b"\r\n\r\n" + request(body, length(body)),
            request(body, length(body)).replace(b" HTTP/1.1", b"  HTTP/1.1"),
        )
    )
    script.add(odd, row, REFUSED)


def _cut(script: Script, row: int, chance: random.Random) -> None:
    """A request that ends in its middle, when the client shuts its side: no answer, or a refusal."""
    whole = plain(HIDDEN + row)
    script.add(whole[: chance.randrange(1, len(whole) - 1)], REFUSED, "nothing")


def _garbage(script: Script, row: int, chance: random.Random) -> None:
    garbage = chance.choice(
        (
            b"GARBAGE\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            bytes(chance.randrange(256) for _ in range(50)),
            b"\x00" * 20,
        )
    )
    script.add(garbage, REFUSED, "nothing")


Kind = Callable[[Script, int, random.Random], None]
RIGHT: tuple[Kind, ...] = (
    _plain,
    _plain,
    _live,
    _chunks,
    _upgrade,
    _upgrade_in_the_body,
    _hidden_body,
    _hidden_in_get,
    _expect,
    _padded,
)
_must_refuse = _refusable(
    lambda b: [b"Content-Length: %d" % len(b), b"Content-Length: %d" % (len(b) + 7)],
    lambda b: [b"Content-Length: +%d" % len(b)],
    lambda b: [b"Content-Length: -1"],
    lambda b: [b"Content-Length: 0x%x" % len(b)],
    lambda b: [b"Content-Length: %d %d" % (len(b), len(b))],
    lambda b: [b"Content-Length: 99999999999999999999999"],
    lambda b: [b"Content-Length : %d" % len(b)],
    lambda b: [length(b), b"X: a\x00b"],
    lambda b: [length(b), b"Bad Name: a"],
    lambda b: [b"Transfer-Encoding: xchunked"],
    lambda b: [b"Transfer-Encoding: chunked, identity"],
)
ODD: tuple[Kind, ...] = (_must_refuse, _must_refuse, _wrong_chunk, _length_and_chunks, _odd, _cut, _garbage)


def script_of(chance: random.Random) -> Script:
    """One to five right requests, pipelined, and perhaps an odd one at the end."""
    script, names = Script(), list[str]()
    rows, kind = chance.sample(range(HIDDEN), 6), RIGHT[0]
    for row in rows[: chance.randint(0, 5)]:
        kind = chance.choice(RIGHT)
        kind(script, row, chance)
        names.append(kind.__name__)
    if chance.random() < 0.5 or not names:
        kind = chance.choice(ODD)
        kind(script, rows[5], chance)
        names.append("_must_refuse" if kind is _must_refuse else kind.__name__)
    script.name = " ".join(names)
    return script
