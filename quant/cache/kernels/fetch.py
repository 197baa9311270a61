"""Kernels that move rows from host tables to a staging buffer, and from there to slots.
`root`: address of the cache's record, int64 [ROOT_SIZE + ARRAY_SIZE]; `ticket`: of a batch's, int64
[TICKET_SIZE]. `find.enumerate_misses` writes each miss's destination to LOCATIONS at its rank: -2 - u for
unit u of the staging buffer, UNIT_BYTES each."""

import triton
import triton.language as tl

from tableside.quant.cache.kernels import state as s
from tableside.quant.cache.kernels.nodes import (
    ID_BITS,
    host_row,
    i32,
    i64,
    miss_count,
    padded,
    slot_of,
    table_at,
)
from tableside.quant.cache.kernels.state import (
    ARRAY_LOCATIONS,
    ARRAY_MISSES,
    ARRAY_NODES,
    ROOT_ARENA,
    ROOT_GATHER_FROM,
    ROOT_GATHER_LIST,
    ROOT_GATHER_MOST,
    ROOT_GATHERED,
    ROOT_GATHERED_UNITS,
    ROOT_STATE,
    ROOT_WIDEST_UNITS,
    STATE_GATHERED_BYTES,
    STATE_MISSES,
    TABLE_ROW_BYTES,
    TICKET_STAGING,
    TICKET_STAGING_UNITS,
)
from tableside.quant.device.launch import kernel

UNIT_BYTES = tl.constexpr(s.UNIT_BYTES)
LIST_HEAD = tl.constexpr(2)  # int64s of the list before its first row
ADDRESS_BITS = tl.constexpr(48)  # of a listed row; above them the row's words of 4 bytes
NOT_STAGED = tl.constexpr(2**31 - 1)  # the unit of a row that has none: units ascend along the list


@triton.jit
def copy_rows(target, source, row_bytes, ROWS: tl.constexpr, WORDS: tl.constexpr, TIGHT: tl.constexpr):
    """Copies rows of row_bytes [ROWS] between 16-aligned addresses [ROWS], WORDS of 4 bytes at once. TIGHT:
    the sources and bytes are multiples of 4, and rows are padded with zeros."""
    into = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)[:, None]
    out_of = source.to(tl.pointer_type(tl.int32))[:, None]
    if not TIGHT:
        out_of = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)[:, None]
    chunks = (padded(row_bytes) // 16)[:, None]
    for first in range(0, tl.max(padded(row_bytes), 0) // 4, WORDS):
        word = (first + tl.arange(0, WORDS))[None, :]
        is_word = word // 4 < chunks
        is_read = is_word
        if TIGHT:
            is_read = word < (row_bytes // 4)[:, None]
        tl.store(into + word, tl.load(out_of + word, is_read, 0), is_word)


@kernel
def list_rows(root: tl.int64, ticket: tl.int64, BLOCK: tl.constexpr):
    """Lists the rows for the CPU to gather, if there are many misses, as they will lie in the staging buffer.
    A program takes BLOCK misses a turn. Reads MISSES and LOCATIONS. Writes GATHERED_BYTES of the state and a
    page-locked list: number of rows, their span in bytes, each row's address in ADDRESS_BITS with its words
    above (0: nothing), then the unit of each row's place, ascending. The CPU reads it in stream order."""
    root = i64(root)
    state = i64(tl.load(root + ROOT_STATE))
    listed = i64(tl.load(root + ROOT_GATHER_LIST))
    units = i32(tl.load(root + ROOT_GATHER_LIST) + 8 * LIST_HEAD + 8 * tl.load(root + ROOT_GATHER_MOST))
    count = miss_count(state)
    gathered = tl.where(
        count >= tl.load(root + ROOT_GATHER_FROM), tl.minimum(count, tl.load(root + ROOT_GATHER_MOST)), 0
    )
    end = tl.minimum(tl.load(state + STATE_MISSES) >> 32, tl.load(root + ROOT_GATHERED_UNITS))
    end = tl.where(gathered > 0, tl.minimum(end, tl.load(i64(ticket) + TICKET_STAGING_UNITS)) * UNIT_BYTES, 0)
    is_first = tl.program_id(0) == 0
    tl.store(listed, gathered, is_first)
    tl.store(listed + 1, end, is_first)
    tl.store(state + STATE_GATHERED_BYTES, end, is_first)
    for block in range(tl.program_id(0), tl.cdiv(gathered, BLOCK), tl.num_programs(0)):
        at = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        is_row = at < gathered
        key = tl.load(i64(tl.load(root + ARRAY_MISSES)) + at, is_row, 0)
        source, row_bytes, slot_bytes = host_row(root, key, is_row)
        location = tl.load(i32(tl.load(root + ARRAY_LOCATIONS)) + at, is_row, -1)
        unit = tl.where(location < -1, -2 - location, NOT_STAGED)
        is_gathered = (location < -1) & (unit.to(tl.int64) * UNIT_BYTES + slot_bytes <= end)
        entry = source | ((row_bytes // 4) << ADDRESS_BITS)
        tl.store(listed + LIST_HEAD + at, tl.where(is_gathered, entry, 0), is_row)
        tl.store(units + at, unit, is_row)


@kernel
def copy_gathered(root: tl.int64, ticket: tl.int64, copied: tl.int64, CHUNKS: tl.constexpr):
    """Copies the rows that the CPU gathered to the staging buffer from byte `copied` on; a copy engine took
    the part before. A program takes CHUNKS of 16 bytes a turn. Reads GATHERED_BYTES of the state and GATHERED
    (written by the CPU); writes the ticket's staging buffer."""
    root = i64(root)
    end = tl.load(i64(tl.load(root + ROOT_STATE)) + STATE_GATHERED_BYTES)
    source = tl.load(root + ROOT_GATHERED) + copied
    target = tl.load(i64(ticket) + TICKET_STAGING) + copied
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    for block in range(tl.program_id(0), tl.cdiv(end - copied, CHUNKS * 16), tl.num_programs(0)):
        word = block * (4 * CHUNKS) + tl.arange(0, 4 * CHUNKS).to(tl.int64)
        is_word = word // 4 < (end - copied) // 16
        tl.store(target + word, tl.load(source + word, is_word, 0), is_word)


@kernel
def fetch_misses(
    root: tl.int64,
    ticket: tl.int64,
    GATHERS: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    TIGHT: tl.constexpr,
):
    """Fetches missing rows from the host into the ticket's staging buffer, if they have room there.
    A program takes ROWS misses a turn and copies WORDS of 4 bytes of each at once. Reads MISSES, LOCATIONS
    and host tables; writes the staging buffer. GATHERS: skips rows that the CPU gathered. REST: instead
    fetches admitted rows without room there straight into their slots, after `admit.insert`."""
    root = i64(root)
    ticket = i64(ticket)
    state = i64(tl.load(root + ROOT_STATE))
    count = miss_count(state)
    wanted = tl.load(state + STATE_MISSES) >> 32
    gathered = tl.zeros((), tl.int64)
    if REST:
        count = tl.where(
            wanted + tl.load(root + ROOT_WIDEST_UNITS) <= tl.load(ticket + TICKET_STAGING_UNITS), 0, count
        )
    elif GATHERS:
        gathered = tl.load(state + STATE_GATHERED_BYTES)
        count = tl.where(
            (wanted * UNIT_BYTES <= gathered) & (count <= tl.load(root + ROOT_GATHER_MOST)), 0, count
        )
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        at = block * ROWS + tl.arange(0, ROWS)
        is_row = at < count
        key = tl.load(i64(tl.load(root + ARRAY_MISSES)) + at, is_row, 0)
        source, row_bytes, slot_bytes = host_row(root, key, is_row)
        location = tl.load(i32(tl.load(root + ARRAY_LOCATIONS)) + at, is_row, -1)
        if REST:
            is_fetched = location >= 0
            target = tl.load(root + ROOT_ARENA) + location.to(tl.int64) * slot_bytes
        else:
            start = (-2 - location).to(tl.int64) * UNIT_BYTES
            is_gathered = (at < tl.load(root + ROOT_GATHER_MOST)) & (start + slot_bytes <= gathered)
            is_fetched = (location < -1) & (is_gathered == 0)
            target = tl.load(ticket + TICKET_STAGING) + start
        copy_rows(target, source, tl.where(is_fetched, row_bytes, 0), ROWS, WORDS, TIGHT)


@kernel
def fill_slots(root: tl.int64, ticket: tl.int64, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Copies admitted rows from the staging buffer to their slots while the lookup reads the buffer. A
    program takes ROWS misses a turn and copies WORDS of 4 bytes of each at once. Reads MISSES, NODES,
    LOCATIONS and the ticket's staging buffer; writes the slots of NODES."""
    root = i64(root)
    count = miss_count(i64(tl.load(root + ROOT_STATE)))
    staging = tl.load(i64(ticket) + TICKET_STAGING)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        at = block * ROWS + tl.arange(0, ROWS)
        is_row = at < count
        node = tl.load(i32(tl.load(root + ARRAY_NODES)) + at, is_row, -1)
        key = tl.load(i64(tl.load(root + ARRAY_MISSES)) + at, is_row, 0)
        row_bytes = padded(tl.load(table_at(root, key >> ID_BITS) + TABLE_ROW_BYTES, is_row, 0))
        start = (-2 - tl.load(i32(tl.load(root + ARRAY_LOCATIONS)) + at, is_row, -2)).to(
            tl.int64
        ) * UNIT_BYTES
        target = (
            tl.load(root + ROOT_ARENA)
            + slot_of(root, tl.maximum(node, 0), node >= 0).to(tl.int64) * row_bytes
        )
        copy_rows(target, staging + start, tl.where(node >= 0, row_bytes, 0), ROWS, WORDS, False)
