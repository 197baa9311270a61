"""Large JSON texts: how much of one is looked at, and what it takes in memory.

Python's objects take up to forty times the bytes of their JSON, and whoever parses it keeps the interpreter's
lock. So a large text is looked over first. Its objects and strings are no more than a request for all of the
model's inputs needs; numbers and lists are ids. One text is parsed at a time, beside the event loop, and what
it unpacks to counts among the bytes that requests hold. Answers are written in pieces, for the same reason.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tableside.serving.errors import bad_request
from tableside.serving.executors.admission import Hold
from tableside.serving.model.version import ServedVersion

BESIDE_BYTES = 1 << 16  # of a text; a longer one is parsed on the thread beside the event loop
ANSWER_BYTES = 1 << 18  # of vectors; more are written as JSON beside the event loop
_OBJECTS, _STRINGS = 16, 64  # of an input, at most: its tensors, its outputs, and the parameters of each
_SPARE = 256  # of each, for what belongs to no input
_NUMBER_BYTES, _LIST_BYTES = (
    64,
    112,
)  # in memory: an int or float and the places that hold it; a list, however short
_PIECE = 1 << 14  # numbers that are written at once


def inputs_of(served: ServedVersion) -> int:
    """How many inputs a request for a version may have: its features, and its scorer's dense tensors."""
    return len(served.features) + (0 if served.scorer is None else len(served.scorer.dense))


@asynccontextmanager
async def room(turn: asyncio.Lock, text: bytes, inputs: int, hold: Hold) -> AsyncIterator[None]:
    """The turn of a text, and room for what it unpacks to, for the length of a block. inputs: of the model.

    ApiError: 400 where it has more objects or strings than requests for so many inputs, 503 where there is no
    room.
    """
    codes = np.frombuffer(text, np.uint8)
    objects, lists, numbers, quotes = (int(np.count_nonzero(codes == ord(c))) for c in '{[,"')
    for what, found, each in (("objects", objects, _OBJECTS), ("strings", quotes // 2, _STRINGS)):
        if found > (most := _SPARE + each * inputs):
            raise bad_request(
                f"the JSON has {found:,} {what}; expected at most {most:,}, as the model has {inputs:,} "
                "inputs: name its "
                "features alone, each once"
            )
    async with turn:
        with hold.growing(_NUMBER_BYTES * numbers + _LIST_BYTES * lists):
            yield


def text_of(array: NDArray[Any]) -> Any:
    """An array [n] or [n, m] as orjson takes it: itself, or its text, written in pieces, between which
    other threads run."""
    if array.size <= _PIECE:
        return array
    rows = max(1, _PIECE // max(1, array[:1].size))
    pieces = (
        orjson.dumps(array[at : at + rows], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        for at in range(0, len(array), rows)
    )
    return orjson.Fragment(b"[%s]" % b",".join(pieces))
