"""Requests with ids or vectors in other device memory than the batch's.
A batch has one buffer for inputs and one for outputs. Parts elsewhere are copied on the device, to the first
or from the second, in the order of the lookups; none of it crosses the bus."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError
from tableside.quant.gpu.batch.layout import Layout
from tableside.quant.gpu.batch.moves import Move, as_bytes
from tableside.quant.gpu.batch.placed import Copy


class DeviceRange(NamedTuple):
    """Bytes [at, at + size) of a request's inputs or outputs that lie at `address`; `owner` keeps that
    memory."""

    at: int
    size: int
    address: int
    owner: Any = None


class Elsewhere(NamedTuple):
    """A request's inputs. inputs: the buffer, without the parts of `reads`. writes: parts of its outputs."""

    inputs: Any
    reads: tuple[DeviceRange, ...]
    writes: tuple[DeviceRange, ...]


def check_elsewhere(layout: Layout) -> None:
    """QuantError: the CPU would have to read the ids, or vectors cannot be copied in whole parts."""
    if layout.gathers or layout.host is not None:
        raise QuantError(
            "the CPU reads ids of this request where its tables are placed; send them in the request's body"
        )
    if any(move.rows > 1 for move in _moves(layout.moves_out)):
        raise QuantError(
            "the vectors of this request are brought together by the CPU; have them sent in the response's "
            "body"
        )


def reads_of(layout: Layout, parts: Sequence[DeviceRange]) -> tuple[list[Copy], bytes]:
    """The copies into the staged inputs, and what else is moved there, as `Layout.moves_in`."""
    copies: list[Copy] = []
    moves: list[Move] = []
    parts = sorted(parts, key=lambda part: part.at)
    for move in _moves(layout.moves_in):
        at, end = move.source, move.source + move.bytes
        for part, first, after in _within(parts, at, end):
            if first > at:
                moves.append(Move(at, move.target + at - move.source, first - at))
            _add(
                copies, Copy(move.target + first - move.source, part.address + first - part.at, after - first)
            )
            at = after
        if at < end:
            moves.append(Move(at, move.target + at - move.source, end - at))
    return copies, as_bytes(moves)


def writes_of(layout: Layout, parts: Sequence[DeviceRange]) -> list[Copy]:
    """The copies out of the staged outputs."""
    moves = [Move(0, 0, layout.asked_bytes)] if layout.is_direct else _moves(layout.moves_out)
    copies: list[Copy] = []
    parts = sorted(parts, key=lambda part: part.at)
    for move in moves:
        for part, first, after in _within(parts, move.target, move.target + move.bytes):
            _add(
                copies, Copy(move.source + first - move.target, part.address + first - part.at, after - first)
            )
    return copies


def masks_of(layout: Layout, parts: Sequence[DeviceRange]) -> list[Copy]:
    """The copies out of ones: masks for tables with every id, which nothing on the device writes."""
    parts = sorted(parts, key=lambda part: part.at)
    return [
        Copy(0, part.address + first - part.at, after - first)
        for at, size in layout.all_found
        for part, first, after in _within(parts, at, at + size)
    ]


def run_copies(
    device: Device, stream: int | None, staged: int, copies: Sequence[Copy], *, to_staged: bool
) -> None:
    """Copies on the device in stream order. staged: base address of the copies' offsets."""
    for one in copies:
        target, source = (
            (staged + one.staged, one.address) if to_staged else (one.address, staged + one.staged)
        )
        device.copy(stream, target, source, one.size)


def whole_inputs(device: Device, request: Elsewhere) -> NDArray[np.uint8]:
    """All of a request's inputs on the host, as they are now."""
    found = np.array(np.frombuffer(request.inputs, np.uint8))
    for part in request.reads:
        device.copy_to_host(found.ctypes.data + part.at, part.address, part.size)
    return found


def gaps(copies: Sequence[Copy], end: int) -> Iterator[tuple[int, int]]:
    """The bytes of [0, end) that no copy writes, as (first, after the last)."""
    at = 0
    for one in sorted(copies):
        if one.staged > at:
            yield at, one.staged
        at = max(at, one.staged + one.size)
    if at < end:
        yield at, end


def _moves(moves: bytes) -> list[Move]:
    return [Move(*row) for row in np.frombuffer(moves, np.int64).reshape(-1, len(Move._fields)).tolist()]


def _within(parts: Sequence[DeviceRange], at: int, end: int) -> list[tuple[DeviceRange, int, int]]:
    """Returns the overlap of [at, end) with each of the ordered parts."""
    found = [(part, max(at, part.at), min(end, part.at + part.size)) for part in parts]
    return [one for one in found if one[1] < one[2]]


def _add(copies: list[Copy], new: Copy) -> None:
    """Adds a copy, to the last one where it goes on."""
    if copies:
        last = copies[-1]
        if (last.staged + last.size, last.address + last.size) == (new.staged, new.address):
            copies[-1] = last._replace(size=last.size + new.size)
            return
    copies.append(new)
