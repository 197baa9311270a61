"""Scripts of raw bytes (campaigns/raw_cases.py) over a socket: sent, read, and compared with what must
come back."""

import contextlib
import json
import random
import re
import socket
import time

from campaigns.raw_cases import LIVE, REFUSED, Answer, Script, request

DEADLINE_S, QUIET_S = 12.0, 0.1


def send(port: int, script: Script, chance: random.Random) -> bytes:
    """Sends a script, whole or in pieces, and reads all that comes; our side is shut only once all answers
    are there.

    A script that ends in garbage may get no answer to that: a moment of silence after the other answers is
    enough then.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        last = (
            b"" if script.ends else request(b"", b"Connection: close", method=b"GET", path=b"/v2/health/live")
        )
        try:
            for piece in _pieces(script.data + last, chance):
                connection.sendall(piece)
                if chance.random() < 0.5:
                    time.sleep(0.001)
        except ConnectionError:
            pass  # refused and closed while we were sending: what came before is read below
        data = b""
        while script.ends and not _is_enough(script, data):
            quiet = "nothing" in script.expected[-1] and _complete(data) >= len(script.expected) - 1
            connection.settimeout(QUIET_S if quiet else DEADLINE_S)
            part = _receive(connection)
            if not part:
                break
            data += part
        if script.ends:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        connection.settimeout(DEADLINE_S)
        while part := _receive(connection):
            data += part
        return data


def _is_enough(script: Script, data: bytes) -> bool:
    return _complete(data) >= len(script.expected)


def _complete(data: bytes) -> int:
    """How many answers there are in what came so far."""
    try:
        return len(answers(data))
    except ValueError:
        return 0


def _receive(connection: socket.socket) -> bytes:
    """What comes next; nothing where the connection is closed, reset with bytes of ours unread, or silent."""
    try:
        return connection.recv(1 << 16)
    except (ConnectionError, TimeoutError):
        return b""


def _pieces(data: bytes, chance: random.Random) -> list[bytes]:
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice((0, 0, 1, 3, 10))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


def answers(data: bytes) -> list[Answer]:
    """The answers in what came back: ids, LIVE, or a status as text. ValueError: it is no sequence of HTTP
    responses."""
    found: list[Answer] = []
    while data:
        head, separator, rest = data.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        if not separator or status is None:
            raise ValueError(f"no response: {data[:80]!r}")
        size = re.search(rb"\r\ncontent-length: (\d+)", head, re.I)
        body, data = rest[: int(size[1]) if size else 0], rest[int(size[1]) if size else 0 :]
        if status[1] == b"100":
            continue
        found.append(_answer(status[1].decode(), body))
    return found


def _answer(status: str, body: bytes) -> Answer:
    if status != "200":
        return status
    said = json.loads(body)
    return LIVE if said == {"live": True} else int(said["outputs"][0]["data"][1])


def is_right(script: Script, found: list[Answer]) -> bool:
    """Whether the answers are the script's, in order. Where it ends in what may be refused, the connection
    may just close there; then answers to the requests before may be missing as well (`is_short`), but none
    may be another's.
    """
    expected: list[set[Answer]] = list(script.expected)
    if not script.ends:
        expected.append({LIVE})
    for answer, allowed in zip(found, expected, strict=False):
        refused = isinstance(answer, str) and (answer[0] == "4" or answer == "501")
        if answer not in allowed and not (REFUSED in allowed and refused):
            return False
    return len(found) <= len(expected) and (len(found) == len(expected) or script.ends)


def is_short(script: Script, found: list[Answer]) -> bool:
    """Whether requests that were right went without an answer, because of what came after them."""
    return script.ends and len(found) < len(script.expected) - 1
