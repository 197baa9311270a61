"""Requests whose size or shape costs a worker more than it costs their sender, for the campaign `headers`."""

import gzip
import json
import random
from collections.abc import Callable

import numpy as np

from campaigns.raw_cases import length, request

MIB = 1 << 20
BODY, RESPONSE, JSON, IN_FLIGHT = 16 * MIB, 16 * MIB, 4 * MIB, 160 * MIB
INFER, LOOKUP = b"/v2/models/demo/infer", b"/v1/lookup"

Case = Callable[[random.Random], bytes]


def _v1(body: bytes, *headers: bytes) -> bytes:
    return request(body, length(body), *headers, path=LOOKUP)


def _v2(header: bytes, binary: bytes = b"", *headers: bytes) -> bytes:
    body = header + binary
    return request(body, length(body), b"Inference-Header-Content-Length: %d" % len(header), *headers)


def _filled(before: bytes, piece: bytes, after: bytes, size: int) -> bytes:
    return (
        before + (piece + b",") * ((size - len(before) - len(after)) // (len(piece) + 1) - 1) + piece + after
    )


def _size(chance: random.Random, most: int = JSON) -> int:
    return int(most * chance.choice((1, 1, 0.5, 0.1, 0.016)))


_IDS = {"name": "user", "datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": 8}}
PIECES = (b"1", b"123456", b"[]", b"{}", b'""', b"0.25", b'{"a":1}', b"[[]]", b"true", b"-1", b'"\\u0041"')


def _header_with_numbers(chance: random.Random) -> bytes:
    """A header that is right, but for a field that nobody reads."""
    head = json.dumps({"inputs": [_IDS]}).encode()[:-1]
    return _v2(_filled(head + b',"junk":[', chance.choice(PIECES), b"]}", _size(chance)), bytes(8))


def _header_with_inputs(chance: random.Random) -> bytes:
    one = json.dumps({**_IDS, "name": f"user{chance.randrange(10)}"}, separators=(",", ":")).encode()
    return _v2(_filled(b'{"inputs":[', chance.choice((one, *PIECES)), b"]}", _size(chance)), bytes(8))


def _header_with_outputs(chance: random.Random) -> bytes:
    head = json.dumps({"inputs": [_IDS]}).encode()[:-1]
    return _v2(
        _filled(head + b',"outputs":[', chance.choice((b'{"name":"user"}', *PIECES)), b"]}", _size(chance)),
        bytes(8),
    )


def _header_with_id(chance: random.Random) -> bytes:
    size = _size(chance)
    return _v2(json.dumps({"id": chance.choice('a1{["é') * (size // 8), "inputs": [_IDS]}).encode(), bytes(8))


def _inline_ids(chance: random.Random) -> bytes:
    piece = chance.choice((b"1", b"1234", b"[1]", b"[]"))
    head = b'{"inputs":[{"name":"user","datatype":"INT64","shape":[%d,1],"data":['
    body = _filled(head, piece, b"]}]}", _size(chance))
    body = body.replace(b"%d", b"%d" % (body.count(b",") - 3), 1)
    return request(body, length(body))


def _header_of_spaces(chance: random.Random) -> bytes:
    return _v2(json.dumps({"inputs": [_IDS]}).encode() + b" " * _size(chance, JSON - 1000), bytes(8))


def _unknown_features(chance: random.Random) -> bytes:
    value = chance.choice((b"[]", b"[[1]]", b"{}", b'{"values":[1]}', b"1"))
    count = _size(chance) // (len(value) + 10)
    features = b",".join(b'"%06x":%s' % (k, value) for k in range(count))
    return _v1(b'{"model":"demo","features":{%s}}' % features)


def _bags(chance: random.Random) -> bytes:
    feature = chance.choice((b"user", b"bought"))
    piece = chance.choice(
        (b"[]", b"[1]", b"[1,2,3]", b"[12345]", b"1", b"{}", b'""', b"[1.5]", b"[true]", b"[[]]")
    )
    return _v1(_filled(b'{"model":"demo","features":{"%s":[' % feature, piece, b"]}}", _size(chance)))


def _one_bag(chance: random.Random) -> bytes:
    piece = chance.choice((b"1", b"1999", b"999999", b"1.5", b"true", b"null"))
    ids = _filled(b'{"model":"demo","features":{"bought":[[', piece, b"]]}}", _size(chance))
    return _v1(ids)


def _jagged(chance: random.Random) -> bytes:
    count = _size(chance) // 8
    values = b",".join([chance.choice((b"7", b"1999"))] * count)
    lengths = b",".join([b"1"] * count)
    return _v1(
        b'{"model":"demo","found":%s,"features":{"bought":{"values":[%s],"lengths":[%s]}}}'
        % (chance.choice((b"true", b"false")), values, lengths)
    )


def _vectors_as_json(chance: random.Random) -> bytes:
    """As many vectors as a JSON answer may hold."""
    count = _size(chance) // 32 - 1
    if chance.random() < 0.5:
        return _v1(b'{"model":"demo","features":{"user":[[%s]]}}' % b",".join([b"7"] * count))
    entry = {
        "name": "user",
        "datatype": "INT64",
        "shape": [1, count],
        "parameters": {"binary_data_size": 8 * count},
    }
    return _v2(json.dumps({"inputs": [entry]}).encode(), np.full(count, 7).tobytes())


def _zipped(chance: random.Random) -> bytes:
    size = chance.choice((BODY - 100, BODY + 100, 64 * MIB, JSON - 100))
    plain = b" " * size if chance.random() < 0.7 else chance.randbytes(MIB) * (size // MIB)
    body = gzip.compress(plain, 1)[:BODY]
    if chance.random() < 0.3:
        body = body[:-9] + b"garbage"
    path = chance.choice((INFER, LOOKUP))
    return request(body, length(body), b"Content-Encoding: gzip", path=path)


def _binary_ids(chance: random.Random, datatype: str, bags: bool) -> bytes:
    item = 8 if datatype == "INT64" else 4
    count = int((BODY - 4096) * chance.choice((1, 0.5, 0.1)) / (item + 4 * bags))
    entries = [
        {
            "name": "bought.values",
            "datatype": datatype,
            "shape": [count],
            "parameters": {"binary_data_size": item * count},
        }
    ]
    bodies = [np.full(count, 7, np.int64 if item == 8 else np.int32).tobytes()]
    lengths = np.ones(count if bags else 1, np.int32) if bags else np.array([count], np.int32)
    entries.append(
        {
            "name": "bought.lengths",
            "datatype": "INT32",
            "shape": [len(lengths)],
            "parameters": {"binary_data_size": lengths.nbytes},
        }
    )
    asked = {"inputs": entries, "parameters": {"binary_data_output": True}}
    return _v2(json.dumps(asked).encode(), b"".join([*bodies, lengths.tobytes()]))


def _wide_ids(chance: random.Random) -> bytes:
    return _binary_ids(chance, "INT64", False)


def _narrow_ids(chance: random.Random) -> bytes:
    return _binary_ids(chance, "INT32", chance.random() < 0.3)


def _twice(case: Case) -> Case:
    """The same request three times over one connection: a header is learned by its second."""

    def sent(chance: random.Random) -> bytes:
        return case(chance) * 3

    return sent


def _empty_bags(chance: random.Random) -> bytes:
    """No ids, and as many bags as vectors that a response may hold."""
    bags = RESPONSE // 32
    entry = {"name": "bought", "datatype": "INT64", "shape": [bags, 0], "parameters": {"binary_data_size": 0}}
    return _v2(json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode())


def _chunks(chance: random.Random) -> bytes:
    """A body in the smallest chunks that there are."""
    size = chance.choice((1, 2, 3, 16))
    count = 2 * MIB // (size + 5)
    return (
        request(b"", b"Transfer-Encoding: chunked")
        + (b"%x\r\n%s\r\n" % (size, b"x" * size)) * count
        + b"0\r\n\r\n"
    )


SMALL = (
    b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v2/models/demo/infer HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
)


def _pipelined(chance: random.Random) -> bytes:
    small = chance.choice(SMALL)
    return small * (2 * MIB // len(small))


def _unread(chance: random.Random) -> bytes:
    """A body that the application refuses without reading it."""
    body = bytes(BODY - 1000)
    return request(body, length(body), path=b"/v1/models")


def _headers(chance: random.Random) -> bytes:
    line = chance.choice((b"a:\r\n", b"Accept: */*\r\n", b"a: %s\r\n" % (b"x" * 8000)))
    return (
        b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
        + line * ((16 << 10) // len(line) - 20)
        + b"\r\n"
    )


CASES: dict[str, Case] = {
    "header with numbers": _twice(_header_with_numbers),
    "header with inputs": _twice(_header_with_inputs),
    "header with outputs": _twice(_header_with_outputs),
    "header with an id": _twice(_header_with_id),
    "header of spaces": _twice(_header_of_spaces),
    "inline ids": _inline_ids,
    "unknown features": _unknown_features,
    "bags": _bags,
    "one bag": _one_bag,
    "jagged": _jagged,
    "vectors as JSON": _vectors_as_json,
    "zipped": _zipped,
    "wide ids": _twice(_wide_ids),
    "narrow ids": _twice(_narrow_ids),
    "empty bags": _twice(_empty_bags),
    "chunks": _chunks,
    "pipelined": _pipelined,
    "unread": _unread,
    "HTTP headers": _headers,
}
