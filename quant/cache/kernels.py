"""The kernels of the cache (`quant.cache.cache`), in Triton: find rows, choose victims, take rows in.

A *node* is 16 bytes: key int64 (-1: free), next int32 (the node after it in its bucket's chain, -1: none), used int32 (the last
ticket that touched it). Its number is `page << NODE_BITS | place`. A *page* belongs to one class, the rows of one size, and holds

    nodes [slots] · rows [slots, row_bytes], the first at a multiple of row_bytes from the arena's start · scores int32, backwards

so that nodes and scores are found without knowing the class, and row `i` of a page lies at `(first_row + i) * row_bytes`.

A key is `table << ID_BITS | id`. Buckets are heads of chains: any key fits into any slot, no table of keys can be full before
the slots are, and nothing is left behind by a key that goes. Rows that a batch lacks are bits of a map over each table, so that
each is fetched once and in the order of its address, with neither a sort nor a hash table; a row's place among them is its rank.

Kernels of one cache run one after another on one stream, but for `release`, and for those that move rows: `list_rows`, `bring`
and `fetch` run beside those that choose (`choose` to `resolve`), `place` and `end` after both. Tickets and ages are int32 and may
wrap.
"""

from enum import IntEnum

import triton
import triton.language as tl

ID_BITS = 40
NODE_BYTES = 16
WORDS = 256  # of a map, that share one mark; 32 rows each
ROWS_PER_MARK = 32 * WORDS
CLASSES = 64  # row sizes at most
BERTHS = 1024  # tickets that are out at once, at most
MISSED = -(2**31)  # a location not yet known
NONE = -1  # a location: read the table itself
BUSY = -2  # a bucket whose chain is being mended


class Root(IntEnum):
    """What a cache is, int64: addresses and sizes."""

    ARENA = 0
    PAGE_BYTES = 1
    PAGES = 2  # int32 [pages, 2]: class (-1: none), first row
    PAGE_COUNT = 3
    NODE_BITS = 4
    HEADS = 5  # int32 [buckets]
    BUCKET_MASK = 6
    TABLES = 7  # int64 [tables, len(TableField)]
    CLASSES_AT = 8  # int64 [CLASSES, len(ClassField)]
    STATE = 9  # int64 [len(State) + CLASSES * len(ClassState)]
    COUNTERS = 10  # int64 [tables, len(Counter)]
    OUT = 11  # int64 [BERTHS]: the number of the ticket at each berth that is out; 0: none
    GHOSTS = 12  # int32 [ghosts, 2]: marks and scores of keys that were missed (LFU)
    GHOST_MASK = 13
    RATE = 14  # by how much scores age a ticket; SCORE_UNIT is a half
    MARKS = 15  # int32 [programs of `enumerate_missing`, 2]: table, its first mark
    MISSING = 16  # int64 [ids]: keys that the batch lacks
    SCORES = 17  # int32 [ids]: what each one's score is
    RANKS = 18  # int32 [ids]: each one's place among those of its class that are taken in, -1: it is not; then its node, or -1
    PLACES = 19  # int32 [ids]: each one's location
    VICTIMS = 20  # int32 [ids]: nodes to be used
    VICTIM_BUCKETS = 21  # int32 [ids]: where each was; -1: nowhere
    MOST_SLOTS = 22  # of a page, of any class
    LIST = 23  # int64 [2 + MOST_GATHERED], then int32 [MOST_GATHERED], page-locked: what the CPU is to gather, see `list_rows`
    LEAST_GATHERED = 24  # missing rows from which the CPU gathers them
    MOST_GATHERED = 25
    STAGING = 26  # where they are then, as in the pad
    STAGING_UNITS = 27
    WIDEST_UNITS = 28  # of a row, of any class


class TableField(IntEnum):
    """A table of a cache."""

    ADDRESS = 0  # of the first row, where the device reads it
    ROWS = 1
    ROW_BYTES = 2
    CLASS = 3
    BITS = 4  # int32 [words]: the rows that the batch lacks
    FIRST_RANKS = 5  # int32 [words]: how many of the batch's missing rows come before the word's
    MARK_AT = 6  # int32 [marks]: whether there are bits


class ClassField(IntEnum):
    """Rows of one size."""

    ROW_BYTES = 0
    SLOTS = 1  # of a page
    PAGE_LIST = 2  # int32 [pages]
    PAGES = 3


class State(IntEnum):
    """What changes with each batch; `len(ClassState)` more for each class follow."""

    NOW = 0  # the last ticket
    DONE = 1  # all tickets up to it are released
    MISSING = 2  # keys that the batch lacks, and above 32 bits the units that their rows take in a pad
    INSERTED = 3  # from here on: since the cache was made
    FREED = 4  # rows that were dropped for no other
    PADDED = 5
    LOCKED_OUT = 6  # rows that were to be taken in when every slot was locked
    GATHERED = 7  # bytes of the pad that the CPU gathers


class ClassState(IntEnum):
    """A class in a batch. OCCUPIED lasts."""

    MISSING = 0  # keys that the batch lacks
    ADMITTED = 1  # of them, those to be taken in
    VICTIMS = 2  # nodes found for them, or more
    WARMEST = 3  # keys warmer than this coldness are taken in
    COLDEST = 4  # nodes at least as cold as this are victims
    FIRST = 5  # the first victim in VICTIMS
    OCCUPIED = 6


def occupied_at(number: int) -> int:
    """Where in the state the OCCUPIED of a class is."""
    return len(State) + number * len(ClassState) + ClassState.OCCUPIED


class Counter(IntEnum):
    """Of a table, since it was registered."""

    IDS = 0
    HITS = 1
    FETCHED = 2  # rows that were missing, each once a batch
    IN_PLACE = 3  # ids whose row found no room in slots and pad


class JobField(IntEnum):
    """One lookup of a batch."""

    TABLE = 0
    IDS_AT = 1  # byte in the inputs, int64
    IDS = 2
    LOCATIONS_AT = 3  # byte in the locations, int32
    FIRST_BLOCK = 4


class TicketField(IntEnum):
    """A ticket, int64."""

    NUMBER = 0
    PAD = 1  # address
    PAD_UNITS = 2  # of 16 bytes
    BERTH = 3  # its place in OUT


SCORE_UNIT = 1 << 16  # a score is a logarithm to base 2, in this many parts
PAD_UNIT = 16

(_ARENA, _PAGE_BYTES, _PAGES, _PAGE_COUNT, _NODE_BITS, _HEADS, _BUCKET_MASK, _TABLES, _CLASSES_AT, _STATE, _COUNTERS) = (
    tl.constexpr(int(f)) for f in list(Root)[: Root.OUT]
)
(_OUT, _GHOSTS, _GHOST_MASK, _RATE, _MARKS, _MISSING, _SCORES, _RANKS, _PLACES, _VICTIMS, _VICTIM_BUCKETS) = (
    tl.constexpr(int(f)) for f in list(Root)[Root.OUT : Root.MOST_SLOTS]
)
_MOST_SLOTS, _LIST, _LEAST_GATHERED, _MOST_GATHERED, _STAGING, _STAGING_UNITS, _WIDEST_UNITS = (
    tl.constexpr(int(f)) for f in list(Root)[Root.MOST_SLOTS :]
)
_T_ADDRESS, _T_ROWS, _T_ROW_BYTES, _T_CLASS, _T_BITS, _T_FIRST_RANKS, _T_MARK_AT = (tl.constexpr(int(f)) for f in TableField)
_C_ROW_BYTES, _C_SLOTS, _C_PAGE_LIST, _C_PAGES = (tl.constexpr(int(f)) for f in ClassField)
_S_NOW, _S_DONE, _S_MISSING, _S_INSERTED, _S_FREED, _S_PADDED, _S_LOCKED_OUT, _S_GATHERED = (tl.constexpr(int(f)) for f in State)
_LACKED, _ADMITTED, _FOUND, _WARMEST, _COLDEST, _FIRST, _OCCUPIED = (tl.constexpr(int(f)) for f in ClassState)
_N_IDS, _N_HITS, _N_FETCHED, _N_IN_PLACE = (tl.constexpr(int(f)) for f in Counter)
_J_TABLE, _J_IDS_AT, _J_IDS, _J_LOCATIONS_AT, _J_FIRST_BLOCK = (tl.constexpr(int(f)) for f in JobField)
_K_NUMBER, _K_PAD, _K_PAD_UNITS, _K_BERTH = (tl.constexpr(int(f)) for f in TicketField)
_TABLE_FIELDS, _CLASS_FIELDS, _STATES, _CLASS_STATES, _COUNTS, _JOB_FIELDS = (
    tl.constexpr(len(e)) for e in (TableField, ClassField, State, ClassState, Counter, JobField)
)
_ID_BITS, _WORDS, _CLASSES, _BERTHS, _MISSED, _BUSY = (tl.constexpr(n) for n in (ID_BITS, WORDS, CLASSES, BERTHS, MISSED, BUSY))
_UNIT, _PAD_UNIT, _ID_MASK = tl.constexpr(SCORE_UNIT), tl.constexpr(PAD_UNIT), tl.constexpr((1 << ID_BITS) - 1)
_FREE_COLDNESS = tl.constexpr(2**31 - 1)
_LOCKED_COLDNESS = tl.constexpr(-(2**31))


@triton.jit
def _i64(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _i32(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _hash(key):
    """int64 keys [n], not negative -> int64, of which the low 31 bits are well mixed."""
    x = key ^ (key >> 29)
    x = x * 0x2545F4914F6CDD1D
    x = x ^ ((x >> 32) & 0xFFFFFFFF)
    x = x * 0x1B03738712FAD5C9
    return (x >> 33) & 0x7FFFFFFF


@triton.jit
def _node(root, number):
    """Addresses of nodes, int64, from their int32 numbers."""
    bits = tl.load(root + _NODE_BITS).to(tl.int32)
    page = (number >> bits).to(tl.int64)
    place = (number & ((1 << bits) - 1)).to(tl.int64)
    return tl.load(root + _ARENA) + page * tl.load(root + _PAGE_BYTES) + place * 16


@triton.jit
def _score(root, number):
    """Addresses of their scores."""
    bits = tl.load(root + _NODE_BITS).to(tl.int32)
    page = (number >> bits).to(tl.int64)
    place = (number & ((1 << bits) - 1)).to(tl.int64)
    return tl.load(root + _ARENA) + (page + 1) * tl.load(root + _PAGE_BYTES) - 4 - place * 4


@triton.jit
def _location(root, number, mask):
    """Where their rows lie, in rows of their class from the arena's start."""
    bits = tl.load(root + _NODE_BITS).to(tl.int32)
    first = tl.load(_i32(tl.load(root + _PAGES)) + (number >> bits) * 2 + 1, mask, 0)
    return first + (number & ((1 << bits) - 1))


@triton.jit
def _table(root, number):
    return _i64(tl.load(root + _TABLES)) + number * _TABLE_FIELDS


@triton.jit
def _class_state(root, number):
    return _i64(tl.load(root + _STATE)) + _STATES + number * _CLASS_STATES


@triton.jit
def _missing(state):
    """How many keys the batch lacks."""
    return tl.load(state + _S_MISSING) & 0xFFFFFFFF


@triton.jit
def _bits(word):
    """How many bits of each int32 are set."""
    x = word - ((word >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
def _tick(root, now):
    """What a score is that was made now, int32; it wraps."""
    return (now * tl.load(root + _RATE)).to(tl.int32)


@triton.jit
def _ahead(score, tick):
    """By how much scores are ahead of the tick. What is so by 40 halves is a score so old that it wrapped: far behind."""
    ahead = score - tick
    return tl.where(ahead > 40 * _UNIT, -(2**30), ahead)


@triton.jit
def _used_once_more(ahead):
    """By how much a score of `ahead` over the tick exceeds the tick once it is used now: log2(2 ** ahead + 1), in SCORE_UNITs."""
    apart = tl.abs(ahead).to(tl.float32) / _UNIT
    return tl.maximum(ahead, 0) + (tl.log2(1.0 + tl.exp2(-apart)) * _UNIT).to(tl.int32)


@triton.jit
def _touch(root, number, used, hit, now, LFU: tl.constexpr):
    """Notes that nodes were used by ticket `now`; once a ticket, however often they are hit."""
    address = _i32(_node(root, number) + 12)
    now32 = now.to(tl.int32)
    is_first = hit & (used != now32)
    if LFU:
        was = tl.atomic_xchg(address, tl.zeros_like(number) + now32, is_first, sem="relaxed")
        is_first = is_first & (was != now32)
        at = _i32(_score(root, number))
        tick = _tick(root, now)
        ahead = _ahead(tl.load(at, is_first, 0), tick)
        tl.store(at, tick + _used_once_more(ahead), is_first)
    else:
        tl.store(address, tl.zeros_like(number) + now32, is_first)


@triton.jit
def _find(root, key, wanted):
    """Nodes of the keys, int32, -1 where there is none; and when each was used."""
    mask = tl.load(root + _BUCKET_MASK)
    heads = _i32(tl.load(root + _HEADS))
    node = tl.load(heads + (_hash(key) & mask), wanted, -1)
    found = tl.full(key.shape, -1, tl.int32)
    used = tl.zeros_like(found)
    looks = wanted & (node >= 0)
    while tl.max(looks.to(tl.int32), 0) > 0:
        at = _node(root, node)
        its_key = tl.load(_i64(at), looks, -1)
        after = tl.load(_i32(at + 8), looks, -1)
        when = tl.load(_i32(at + 12), looks, 0)
        is_it = looks & (its_key == key)
        found = tl.where(is_it, node, found)
        used = tl.where(is_it, when, used)
        looks = looks & (its_key != key) & (after >= 0)
        node = tl.where(looks, after, node)
    return found, used


@triton.jit(do_not_specialize=["root", "ticket"])
def begin(root: tl.int64, ticket: tl.int64, CLASS_LANES: tl.constexpr):
    """One program: a new ticket; what was released in the meantime; empty counts."""
    root = _i64(root)
    ticket = _i64(ticket)
    state = _i64(tl.load(root + _STATE))
    out = _i64(tl.load(root + _OUT))
    now = tl.load(state + _S_NOW) + 1
    tl.store(state + _S_NOW, now)
    tl.store(ticket + _K_NUMBER, now)
    others = tl.load(out + tl.arange(0, _BERTHS), cache_modifier=".cg")
    tl.store(state + _S_DONE, tl.min(tl.where(others == 0, now, others), 0) - 1)
    tl.store(out + tl.load(ticket + _K_BERTH), now)
    tl.store(state + _S_MISSING, 0)
    of_class = _class_state(root, tl.arange(0, CLASS_LANES))
    zeros = tl.zeros((CLASS_LANES,), tl.int64)
    tl.store(of_class + _LACKED, zeros)
    tl.store(of_class + _ADMITTED, zeros)
    tl.store(of_class + _FOUND, zeros)


@triton.jit(do_not_specialize=["root", "ticket"])
def release(root: tl.int64, ticket: tl.int64):
    """One program: what the ticket used may be evicted, from the next `begin` on."""
    tl.store(_i64(tl.load(_i64(root) + _OUT)) + tl.load(_i64(ticket) + _K_BERTH), 0)


@triton.jit(do_not_specialize=["root", "jobs", "job_of_block", "blocks", "inputs", "locations"])
def probe(
    root: tl.int64,
    jobs: tl.int64,
    job_of_block: tl.int64,
    blocks: tl.int64,
    inputs: tl.int64,
    locations: tl.int64,
    LFU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK ids a turn: the location of each that is in a slot; MISSED, and a bit of the table's map, for each other one.

    An id out of range gets NONE; the lookup refuses it.
    """
    root = _i64(root)
    now = tl.load(_i64(tl.load(root + _STATE)) + _S_NOW)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        job = _i64(jobs) + tl.load(_i32(job_of_block) + block).to(tl.int64) * _JOB_FIELDS
        number = tl.load(job + _J_TABLE)
        table = _table(root, number)
        first = (block - tl.load(job + _J_FIRST_BLOCK)) * BLOCK
        at = first + tl.arange(0, BLOCK)
        is_id = at < tl.load(job + _J_IDS)
        id = tl.load(_i64(inputs + tl.load(job + _J_IDS_AT)) + at, is_id, -1)
        is_known = (id >= 0) & (id < tl.load(table + _T_ROWS))

        found, used = _find(root, (number << _ID_BITS) | id, is_known)
        is_hit = is_known & (found >= 0)
        _touch(root, found, used, is_hit, now, LFU)
        is_missed = is_known & (found < 0)
        word = _i32(tl.load(table + _T_BITS)) + (id >> 5)
        bit = tl.full((BLOCK,), 1, tl.int32) << (id & 31).to(tl.int32)
        is_new = is_missed & ((tl.load(word, is_missed, 0) & bit) == 0)
        tl.atomic_or(word, bit, is_new, sem="relaxed")
        tl.store(_i32(tl.load(table + _T_MARK_AT)) + (id >> 5) // _WORDS, 1, is_new)

        location = tl.where(is_hit, _location(root, found, is_hit), tl.where(is_missed, _MISSED, -1))
        tl.store(_i32(locations + tl.load(job + _J_LOCATIONS_AT)) + at, location, is_id)
        counters = _i64(tl.load(root + _COUNTERS)) + number * _COUNTS
        tl.atomic_add(counters + _N_IDS, tl.sum(is_id.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(counters + _N_HITS, tl.sum(is_hit.to(tl.int64), 0), sem="relaxed")


@triton.jit
def _ghost_score(root, key, mask, tick):
    """The scores of missed keys, int32: of all their misses that are remembered, this one included.

    A ghost remembers one of the keys that share it: the one whose score is the highest, which falls when another is missed.
    """
    mixed = _hash(key)
    ghost = _i32(tl.load(root + _GHOSTS)) + (mixed & tl.load(root + _GHOST_MASK)) * 2
    mark = (key ^ (mixed >> 7)).to(tl.int32)
    ahead = _ahead(tl.load(ghost + 1, mask, 0), tick)
    is_it = tl.load(ghost, mask, 0) == mark
    more = tl.where(is_it, _used_once_more(ahead), 0)
    is_kept = (is_it == 0) & (ahead > 0)
    tl.store(ghost, mark, mask & (is_kept == 0))
    tl.store(ghost + 1, tick + tl.where(is_kept, ahead - _UNIT, more), mask)
    return tick + more


@triton.jit(do_not_specialize=["root", "ticket"])
def enumerate_missing(root: tl.int64, ticket: tl.int64, LFU: tl.constexpr, MARKS: tl.constexpr):
    """MARKS marks of one table a program: the keys that its maps name, in the order of their rows, their scores, and room for
    each in the ticket's pad, as far as there is any."""
    root = _i64(root)
    last_unit = tl.load(_i64(ticket) + _K_PAD_UNITS) - tl.load(root + _WIDEST_UNITS)  # behind it none has room
    mine = _i32(tl.load(root + _MARKS)) + tl.program_id(0) * 2
    number = tl.load(mine).to(tl.int64)
    first_mark = tl.load(mine + 1).to(tl.int64)
    table = _table(root, number)
    state = _i64(tl.load(root + _STATE))
    tick = _tick(root, tl.load(state + _S_NOW))
    missing = _i64(tl.load(root + _MISSING))
    scores = _i32(tl.load(root + _SCORES))
    places = _i32(tl.load(root + _PLACES))
    units = tl.load(table + _T_ROW_BYTES) // _PAD_UNIT
    marks = _i32(tl.load(table + _T_MARK_AT))
    mark_count = (tl.load(table + _T_ROWS) + 32 * _WORDS - 1) // (32 * _WORDS)
    for n in range(first_mark, tl.minimum(first_mark + MARKS, mark_count)):
        if tl.load(marks + n) != 0:
            word_at = tl.arange(0, _WORDS).to(tl.int64) + n * _WORDS
            word = tl.load(_i32(tl.load(table + _T_BITS)) + word_at)
            count = _bits(word)
            total = tl.sum(count, 0)
            before = tl.atomic_add(state + _S_MISSING, total.to(tl.int64) * ((units << 32) + 1), sem="relaxed")
            base = before.to(tl.int32)
            start = before >> 32
            rank = base + tl.cumsum(count, 0) - count
            tl.store(_i32(tl.load(table + _T_FIRST_RANKS)) + word_at, rank, word != 0)
            for _ in range(tl.max(count, 0)):
                is_one = word != 0
                bit = word & -word
                key = (number << _ID_BITS) | (word_at * 32 + _bits(bit - 1))
                tl.store(missing + rank, key, is_one)
                unit = start + (rank - base) * units
                tl.store(places + rank, tl.where(unit <= last_unit, -2 - unit, -1).to(tl.int32), is_one)
                if LFU:
                    tl.store(scores + rank, _ghost_score(root, key, is_one, tick), is_one)
                word = word ^ bit
                rank += is_one.to(tl.int32)
            tl.atomic_add(_class_state(root, tl.load(table + _T_CLASS)) + _LACKED, total.to(tl.int64), sem="relaxed")
            counters = _i64(tl.load(root + _COUNTERS)) + number * _COUNTS
            tl.atomic_add(counters + _N_FETCHED, total.to(tl.int64), sem="relaxed")
            tl.store(marks + n, 0)  # last: by now every warp has read it


@triton.jit
def _coldness(root, number, mask, now, done, LFU: tl.constexpr):
    """How cold nodes are, int32: free ones coldest, locked ones never cold; and whether each holds a key."""
    at = _node(root, number)
    key = tl.load(_i64(at), mask, 0)
    used = tl.load(_i32(at + 12), mask, 0)
    if LFU:
        cold = -_ahead(tl.load(_i32(_score(root, number)), mask, 0), _tick(root, now))
    else:
        cold = now.to(tl.int32) - used
    cold = tl.minimum(tl.maximum(cold, -(2**30)), 2**30)
    cold = tl.where(key < 0, _FREE_COLDNESS, cold)
    # Used by a ticket after the last that is done; numbers wrap.
    is_locked = (now.to(tl.int32) - used).to(tl.uint32) < (now - done).to(tl.int32).to(tl.uint32)
    return tl.where(is_locked | (mask == 0), _LOCKED_COLDNESS, cold), key


@triton.jit(do_not_specialize=["root", "takes_all"])
def choose(root: tl.int64, takes_all: tl.int64, LFU: tl.constexpr, SAMPLE: tl.constexpr, CLASS_LANES: tl.constexpr):
    """One program a class: from samples, how warm a missing key must be to be taken in, and how cold a node to be its victim.

    As many keys are to be warmer than the one coldness as nodes are colder, or free. takes_all: every key, as always with LRU.
    """
    root = _i64(root)
    number = tl.program_id(0).to(tl.int64)
    of_class = _class_state(root, number)
    lanes = tl.arange(0, CLASS_LANES)
    before = tl.load(_class_state(root, lanes) + _LACKED, lanes < number, 0)
    tl.store(of_class + _FIRST, tl.sum(before, 0))
    lacked = tl.load(of_class + _LACKED)
    if lacked > 0:
        the_class = _i64(tl.load(root + _CLASSES_AT)) + number * _CLASS_FIELDS
        state = _i64(tl.load(root + _STATE))
        now = tl.load(state + _S_NOW)
        slots = tl.load(the_class + _C_SLOTS)
        total = slots * tl.load(the_class + _C_PAGES)
        n = tl.arange(0, SAMPLE).to(tl.int64)
        spread = _hash(n + now * SAMPLE)
        at = tl.where(total > SAMPLE, (n * total) // SAMPLE + spread % tl.maximum(total // SAMPLE, 1), n)
        is_in = n < total
        page = tl.load(_i32(tl.load(the_class + _C_PAGE_LIST)) + at // slots, is_in, 0)
        node = (page << tl.load(root + _NODE_BITS).to(tl.int32)) + (at % slots).to(tl.int32)
        cold, _ = _coldness(root, node, is_in, now, tl.load(state + _S_DONE), LFU)
        sampled = tl.minimum(total, SAMPLE)
        need = lacked
        warmest = tl.full((), 2**31 - 1, tl.int64)
        if LFU:
            missing = _missing(state)
            which = tl.where(missing > SAMPLE, (n * missing) // SAMPLE + spread % tl.maximum(missing // SAMPLE, 1), n)
            is_key = n < missing
            key = tl.load(_i64(tl.load(root + _MISSING)) + which, is_key, 0)
            is_key = is_key & (tl.load(_table(root, key >> _ID_BITS) + _T_CLASS, is_key, -1) == number)
            key_cold = _tick(root, now) - tl.load(_i32(tl.load(root + _SCORES)) + which, is_key, 0)
            key_cold = tl.minimum(tl.maximum(key_cold, -(2**30)), 2**30)
            keys = tl.maximum(tl.sum(is_key.to(tl.int64), 0), 1)
            if takes_all == 0:
                low = tl.full((), -(2**31) + 1, tl.int64)
                while low < warmest:
                    middle = low + (warmest - low + 1) // 2
                    warmer = tl.sum((is_key & (key_cold < middle)).to(tl.int64), 0)
                    colder = tl.sum((cold.to(tl.int64) >= middle).to(tl.int64), 0)
                    if warmer * lacked * sampled <= colder * total * keys:
                        low = middle
                    else:
                        warmest = middle - 1
                need = (tl.sum((is_key & (key_cold < warmest)).to(tl.int64), 0) * lacked + keys - 1) // keys
        # All slots of a cache that is not large, eight a victim of one that is; and a quarter more against the samples' error.
        window = tl.minimum(tl.maximum(need * 8, 1 << 20), total)
        wanted = tl.where(total > SAMPLE, (need * sampled * 5) // (window * 4) + 1, need)
        wanted = tl.minimum(wanted, sampled)
        free = tl.sum((cold == _FREE_COLDNESS).to(tl.int64), 0)
        # Where there are enough that hold nothing, those alone; few of them in the sample say little.
        wanted = tl.where((free >= 16) & (free * total * 4 > need * sampled * 5), 1, wanted)
        least = tl.full((), -(2**31) + 1, tl.int64)
        most = tl.full((), 2**31 - 1, tl.int64)
        while least < most:
            middle = least + (most - least + 1) // 2
            if tl.sum((cold.to(tl.int64) >= middle).to(tl.int64), 0) >= wanted:
                least = middle
            else:
                most = middle - 1
        tl.store(of_class + _WARMEST, warmest)
        tl.store(of_class + _COLDEST, least)


@triton.jit(do_not_specialize=["root"])
def admit(root: tl.int64, LFU: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK missing keys a turn: which are taken in, and the place of each among those of its class."""
    root = _i64(root)
    state = _i64(tl.load(root + _STATE))
    count = _missing(state)
    tick = _tick(root, tl.load(state + _S_NOW))
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        is_key = at < count
        key = tl.load(_i64(tl.load(root + _MISSING)) + at, is_key, 0)
        row_class = tl.load(_table(root, key >> _ID_BITS) + _T_CLASS, is_key, -1).to(tl.int32)
        is_warm = is_key
        if LFU:
            cold = tick - tl.load(_i32(tl.load(root + _SCORES)) + at, is_key, 0)
            warmest = tl.load(_class_state(root, row_class.to(tl.int64)) + _WARMEST, is_key, 0)
            is_warm = is_key & (tl.minimum(tl.maximum(cold, -(2**30)), 2**30) < warmest)
        rank = tl.full((BLOCK,), -1, tl.int32)
        for number in range(tl.min(tl.where(is_key, row_class, 2**30), 0), tl.max(row_class, 0) + 1):
            mine = is_warm & (row_class == number)
            ones = mine.to(tl.int32)
            of_class = _class_state(root, tl.zeros((), tl.int64) + number)
            first = tl.atomic_add(of_class + _ADMITTED, tl.sum(ones, 0).to(tl.int64), sem="relaxed")
            rank = tl.where(mine, first.to(tl.int32) + tl.cumsum(ones, 0) - ones, rank)
        tl.store(_i32(tl.load(root + _RANKS)) + at, rank, is_key)


@triton.jit(do_not_specialize=["root"])
def evict(root: tl.int64, ANY: tl.constexpr, LFU: tl.constexpr, BLOCK: tl.constexpr, CLASS_LANES: tl.constexpr):
    """BLOCK slots of a page a turn, as long as their class needs some: takes those that are cold enough. ANY: all not locked.

    A program is one warp, so that what others change while it reads is the same for all its threads.
    """
    root = _i64(root)
    state = _i64(tl.load(root + _STATE))
    now = tl.load(state + _S_NOW)
    done = tl.load(state + _S_DONE)
    pages = tl.load(root + _PAGE_COUNT)
    bits = tl.load(root + _NODE_BITS).to(tl.int32)
    parts = tl.cdiv(tl.load(root + _MOST_SLOTS), BLOCK)
    victims = _i32(tl.load(root + _VICTIMS))
    buckets = _i32(tl.load(root + _VICTIM_BUCKETS))
    mask = tl.load(root + _BUCKET_MASK)
    classes = _class_state(root, tl.arange(0, CLASS_LANES))
    lacks = tl.load(classes + _FOUND, cache_modifier=".cg") < tl.load(classes + _ADMITTED)
    turns = tl.where(tl.max(lacks.to(tl.int32), 0) > 0, pages * parts, 0)
    # As many turns as there are parts of pages, from another page on each time.
    for turn in range(tl.program_id(0), turns, tl.num_programs(0)):
        page = (turn // parts + now * 7919) % pages
        row_class = tl.load(_i32(tl.load(root + _PAGES)) + page * 2).to(tl.int64)
        of_class = _class_state(root, tl.maximum(row_class, 0))
        need = tl.load(of_class + _ADMITTED)
        the_class = _i64(tl.load(root + _CLASSES_AT)) + tl.maximum(row_class, 0) * _CLASS_FIELDS
        slots = tl.load(the_class + _C_SLOTS).to(tl.int32)
        first = (turn % parts).to(tl.int32) * BLOCK
        found = tl.load(of_class + _FOUND, cache_modifier=".cg")
        if (row_class >= 0) & (first < slots) & (found < need):
            coldest = tl.load(of_class + _COLDEST).to(tl.int32)
            place = first + tl.arange(0, BLOCK)
            is_slot = place < slots
            node = (page.to(tl.int32) << bits) + place
            cold, key = _coldness(root, node, is_slot, now, done, LFU)
            is_cold = cold > _LOCKED_COLDNESS
            if not ANY:
                is_cold = is_cold & (cold >= coldest)
            ones = is_cold.to(tl.int32)
            total = tl.sum(ones, 0)
            if total > 0:
                base = tl.atomic_add(of_class + _FOUND, total.to(tl.int64), sem="relaxed")
                rank = base + tl.cumsum(ones, 0) - ones
                is_victim = is_cold & (rank < need)
                had_key = is_victim & (key >= 0)
                first_victim = tl.load(of_class + _FIRST)
                at = _node(root, node)
                tl.store(victims + first_victim + rank, node, is_victim)
                bucket = (_hash(key) & mask).to(tl.int32)
                tl.store(buckets + first_victim + rank, tl.where(had_key, bucket, -1), is_victim)
                tl.store(_i64(at), tl.full((BLOCK,), -1, tl.int64), is_victim)
                tl.store(_i32(at + 12), tl.zeros_like(node) + now.to(tl.int32), is_victim)
                were_free = tl.sum((is_victim & (key < 0)).to(tl.int64), 0)
                if were_free > 0:
                    tl.atomic_add(of_class + _OCCUPIED, were_free, sem="relaxed")


@triton.jit(do_not_specialize=["root"])
def unlink(root: tl.int64, BLOCK: tl.constexpr):
    """BLOCK victims a turn: takes the nodes without a key out of the chains that victims were in.

    Who finds a bucket not BUSY has it to himself; who finds it BUSY leaves it to the one who has.
    """
    root = _i64(root)
    count = _missing(_i64(tl.load(root + _STATE)))
    heads = _i32(tl.load(root + _HEADS))
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        bucket = tl.load(_i32(tl.load(root + _VICTIM_BUCKETS)) + at, at < count, -1)
        node = tl.atomic_xchg(heads + bucket, tl.full((BLOCK,), _BUSY, tl.int32), bucket >= 0, sem="acquire")
        is_mine = (bucket >= 0) & (node != _BUSY)
        walks = is_mine & (node >= 0)
        head = tl.full((BLOCK,), -1, tl.int32)
        last = tl.full((BLOCK,), -1, tl.int32)
        while tl.max(walks.to(tl.int32), 0) > 0:
            here = _node(root, node)
            stays = walks & (tl.load(_i64(here), walks, -1, cache_modifier=".cg") >= 0)
            after = tl.load(_i32(here + 8), walks, -1, cache_modifier=".cg")
            tl.store(_i32(_node(root, last) + 8), node, stays & (last >= 0))
            head = tl.where(stays & (head < 0), node, head)
            last = tl.where(stays, node, last)
            walks = walks & (after >= 0)
            node = tl.where(walks, after, node)
        tl.store(_i32(_node(root, last) + 8), tl.full((BLOCK,), -1, tl.int32), is_mine & (last >= 0))
        tl.atomic_xchg(heads + bucket, head, is_mine, sem="release")


@triton.jit
def _link(root, node, key, mask):
    """Puts nodes first into the chains of their keys' buckets; nobody walks a chain meanwhile."""
    head = _i32(tl.load(root + _HEADS)) + (_hash(key) & tl.load(root + _BUCKET_MASK))
    after = tl.atomic_xchg(head, node, mask, sem="relaxed")
    tl.store(_i32(_node(root, node) + 8), after, mask)


@triton.jit
def _copy_rows(target, source, row_bytes, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Rows of row_bytes [ROWS] from `source` to `target`, addresses [ROWS], multiples of 16."""
    into = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)[:, None]
    out_of = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)[:, None]
    pieces = (row_bytes // 16)[:, None]
    for first in range(0, tl.max(row_bytes, 0) // 4, WORDS):
        word = (first + tl.arange(0, WORDS))[None, :]
        is_word = word // 4 < pieces
        tl.store(into + word, tl.load(out_of + word, is_word, 0), is_word)


@triton.jit
def _source(root, key, mask):
    """Where the rows of missing keys lie, and their bytes."""
    table = _table(root, key >> _ID_BITS)
    row_bytes = tl.load(table + _T_ROW_BYTES, mask, 0)
    return tl.load(table + _T_ADDRESS, mask, 0) + (key & _ID_MASK) * row_bytes, row_bytes


@triton.jit(do_not_specialize=["root", "ticket"])
def list_rows(root: tl.int64, ticket: tl.int64, BLOCK: tl.constexpr):
    """BLOCK missing keys a turn: what the CPU is to gather, if there are many; it lays the rows out as they will lie in the pad.

    The list: how many rows, the bytes from the first one's begin to the last one's end, then each row's address in 48 bits with
    its bytes / 16 above (0: nothing), then the place of each, in units of 16 bytes, which ascend.
    """
    root = _i64(root)
    state = _i64(tl.load(root + _STATE))
    listed = _i64(tl.load(root + _LIST))
    units = _i32(tl.load(root + _LIST) + 16 + 8 * tl.load(root + _MOST_GATHERED))
    count = _missing(state)
    gathered = tl.where(count >= tl.load(root + _LEAST_GATHERED), tl.minimum(count, tl.load(root + _MOST_GATHERED)), 0)
    staged = tl.minimum(tl.load(state + _S_MISSING) >> 32, tl.load(root + _STAGING_UNITS))
    staged = tl.where(gathered > 0, tl.minimum(staged, tl.load(_i64(ticket) + _K_PAD_UNITS)) * _PAD_UNIT, 0)
    is_first = tl.program_id(0) == 0
    tl.store(listed, gathered, is_first)
    tl.store(listed + 1, staged, is_first)
    tl.store(state + _S_GATHERED, staged, is_first)
    for block in range(tl.program_id(0), tl.cdiv(gathered, BLOCK), tl.num_programs(0)):
        at = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        is_row = at < gathered
        key = tl.load(_i64(tl.load(root + _MISSING)) + at, is_row, 0)
        source, row_bytes = _source(root, key, is_row)
        place = tl.load(_i32(tl.load(root + _PLACES)) + at, is_row, -1)
        unit = tl.where(place < -1, -2 - place, 2**31 - 1)
        is_gathered = (place < -1) & (unit.to(tl.int64) * _PAD_UNIT + row_bytes <= staged)
        tl.store(listed + 2 + at, tl.where(is_gathered, source | ((row_bytes // _PAD_UNIT) << 48), 0), is_row)
        tl.store(units + at, unit, is_row)


@triton.jit(do_not_specialize=["root", "ticket", "copied"])
def bring(root: tl.int64, ticket: tl.int64, copied: tl.int64, PIECES: tl.constexpr):
    """PIECES of 16 bytes a turn of what the CPU gathered, to the pad, from byte `copied` on."""
    root = _i64(root)
    end = tl.load(_i64(tl.load(root + _STATE)) + _S_GATHERED)
    source = tl.load(root + _STAGING) + copied
    target = tl.load(_i64(ticket) + _K_PAD) + copied
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    for block in range(tl.program_id(0), tl.cdiv(end - copied, PIECES * 16), tl.num_programs(0)):
        word = block * (4 * PIECES) + tl.arange(0, 4 * PIECES).to(tl.int64)
        is_word = word // 4 < (end - copied) // 16
        tl.store(target + word, tl.load(source + word, is_word, 0), is_word)


@triton.jit(do_not_specialize=["root", "ticket"])
def fetch(root: tl.int64, ticket: tl.int64, GATHERS: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """ROWS missing keys a turn: their rows, from the host to the ticket's pad, where they have room there.

    GATHERS: but for those that the CPU gathered. REST: instead, those without room, to the slots that they got. WORDS: of
    a row that are copied at once.
    """
    root = _i64(root)
    ticket = _i64(ticket)
    state = _i64(tl.load(root + _STATE))
    count = _missing(state)
    wanted = tl.load(state + _S_MISSING) >> 32
    staged = tl.zeros((), tl.int64)
    if REST:
        count = tl.where(wanted + tl.load(root + _WIDEST_UNITS) <= tl.load(ticket + _K_PAD_UNITS), 0, count)
    elif GATHERS:
        staged = tl.load(state + _S_GATHERED)
        count = tl.where((wanted * _PAD_UNIT <= staged) & (count <= tl.load(root + _MOST_GATHERED)), 0, count)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        at = block * ROWS + tl.arange(0, ROWS)
        is_row = at < count
        key = tl.load(_i64(tl.load(root + _MISSING)) + at, is_row, 0)
        source, row_bytes = _source(root, key, is_row)
        place = tl.load(_i32(tl.load(root + _PLACES)) + at, is_row, -1)
        if REST:
            is_fetched = place >= 0
            target = tl.load(root + _ARENA) + place.to(tl.int64) * row_bytes
        else:
            start = (-2 - place).to(tl.int64) * _PAD_UNIT
            is_gathered = (at < tl.load(root + _MOST_GATHERED)) & (start + row_bytes <= staged)
            is_fetched = (place < -1) & (is_gathered == 0)
            target = tl.load(ticket + _K_PAD) + start
        _copy_rows(target, source, tl.where(is_fetched, row_bytes, 0), ROWS, WORDS)


@triton.jit(do_not_specialize=["root"])
def take_in(root: tl.int64, LFU: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK missing keys a turn: each that is taken in gets its slot; where it has no room in the pad, that is its location."""
    root = _i64(root)
    state = _i64(tl.load(root + _STATE))
    count = _missing(state)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        is_row = at < count
        key = tl.load(_i64(tl.load(root + _MISSING)) + at, is_row, 0)
        of_class = _class_state(root, tl.load(_table(root, key >> _ID_BITS) + _T_CLASS, is_row, 0))
        ranks = _i32(tl.load(root + _RANKS)) + at
        rank = tl.load(ranks, is_row, -1)
        found = tl.minimum(tl.load(of_class + _FOUND, is_row, 0), tl.load(of_class + _ADMITTED, is_row, 0))
        is_taken = (rank >= 0) & (rank < found)
        victim = _i32(tl.load(root + _VICTIMS)) + tl.load(of_class + _FIRST, is_row, 0) + rank
        node = tl.load(victim, is_taken, 0)
        tl.store(_i64(_node(root, node)), key, is_taken)
        _link(root, node, key, is_taken)
        if LFU:
            score = tl.load(_i32(tl.load(root + _SCORES)) + at, is_taken, 0)
            tl.store(_i32(_score(root, node)), score, is_taken)
        places = _i32(tl.load(root + _PLACES)) + at
        has_room = tl.load(places, is_row, -1) < -1
        tl.store(places, _location(root, node, is_taken), is_taken & (has_room == 0))
        tl.store(ranks, tl.where(is_taken & has_room, node, -1), is_row)
        taken = tl.sum(is_taken.to(tl.int64), 0)
        padded = tl.sum((is_row & has_room & (is_taken == 0)).to(tl.int64), 0)
        tl.atomic_add(state + _S_INSERTED, taken, sem="relaxed")
        tl.atomic_add(state + _S_PADDED, padded, sem="relaxed")
        locked_out = (rank >= 0) & (is_taken == 0)
        tl.atomic_add(state + _S_LOCKED_OUT, tl.sum(locked_out.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["root", "ticket"])
def place(root: tl.int64, ticket: tl.int64, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """ROWS missing keys a turn: copies what was taken in from the pad to its slot."""
    root = _i64(root)
    count = _missing(_i64(tl.load(root + _STATE)))
    pad = tl.load(_i64(ticket) + _K_PAD)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        at = block * ROWS + tl.arange(0, ROWS)
        is_row = at < count
        node = tl.load(_i32(tl.load(root + _RANKS)) + at, is_row, -1)
        key = tl.load(_i64(tl.load(root + _MISSING)) + at, is_row, 0)
        row_bytes = tl.load(_table(root, key >> _ID_BITS) + _T_ROW_BYTES, is_row, 0)
        start = (-2 - tl.load(_i32(tl.load(root + _PLACES)) + at, is_row, -2)).to(tl.int64) * _PAD_UNIT
        target = tl.load(root + _ARENA) + _location(root, tl.maximum(node, 0), node >= 0).to(tl.int64) * row_bytes
        _copy_rows(target, pad + start, tl.where(node >= 0, row_bytes, 0), ROWS, WORDS)


@triton.jit(do_not_specialize=["root", "jobs", "job_of_block", "blocks", "inputs", "locations"])
def resolve(
    root: tl.int64,
    jobs: tl.int64,
    job_of_block: tl.int64,
    blocks: tl.int64,
    inputs: tl.int64,
    locations: tl.int64,
    BLOCK: tl.constexpr,
):
    """As `probe`, after `take_in`: the locations that were not known then."""
    root = _i64(root)
    blocks = tl.where(_missing(_i64(tl.load(root + _STATE))) > 0, blocks, 0)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        job = _i64(jobs) + tl.load(_i32(job_of_block) + block).to(tl.int64) * _JOB_FIELDS
        number = tl.load(job + _J_TABLE)
        table = _table(root, number)
        at = (block - tl.load(job + _J_FIRST_BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        location_at = _i32(locations + tl.load(job + _J_LOCATIONS_AT)) + at
        is_missed = (at < tl.load(job + _J_IDS)) & (tl.load(location_at, at < tl.load(job + _J_IDS), 0) == _MISSED)
        id = tl.load(_i64(inputs + tl.load(job + _J_IDS_AT)) + at, is_missed, 0)
        word = tl.load(_i32(tl.load(table + _T_BITS)) + (id >> 5), is_missed, 0)
        first = tl.load(_i32(tl.load(table + _T_FIRST_RANKS)) + (id >> 5), is_missed, 0)
        below = (tl.full((BLOCK,), 1, tl.int32) << (id & 31).to(tl.int32)) - 1
        place = tl.load(_i32(tl.load(root + _PLACES)) + first + _bits(word & below), is_missed, 0)
        tl.store(location_at, place, is_missed)
        in_place = (is_missed & (place == -1)).to(tl.int64)
        tl.atomic_add(_i64(tl.load(root + _COUNTERS)) + number * _COUNTS + _N_IN_PLACE, tl.sum(in_place, 0), sem="relaxed")


@triton.jit(do_not_specialize=["root"])
def end(root: tl.int64, BLOCK: tl.constexpr):
    """BLOCK missing keys a turn: empties the maps and the victims for the next batch."""
    root = _i64(root)
    count = _missing(_i64(tl.load(root + _STATE)))
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        is_row = at < count
        key = tl.load(_i64(tl.load(root + _MISSING)) + at, is_row, 0)
        bits = tl.load(_table(root, key >> _ID_BITS) + _T_BITS, is_row, 0)
        tl.store(_i32(bits) + ((key & _ID_MASK) >> 5), tl.zeros((BLOCK,), tl.int32), is_row)
        nothing = tl.full((BLOCK,), -1, tl.int32)
        tl.store(_i32(tl.load(root + _VICTIM_BUCKETS)) + at, nothing, is_row)


@triton.jit(do_not_specialize=["root"])
def link_all(root: tl.int64, BLOCK: tl.constexpr):
    """One page a program: every node that has a key, into chains that were emptied."""
    root = _i64(root)
    page = tl.program_id(0)
    row_class = tl.load(_i32(tl.load(root + _PAGES)) + page * 2).to(tl.int64)
    if row_class >= 0:
        slots = tl.load(_i64(tl.load(root + _CLASSES_AT)) + row_class * _CLASS_FIELDS + _C_SLOTS).to(tl.int32)
        for first in range(0, slots, BLOCK):
            place = first + tl.arange(0, BLOCK)
            node = (page << tl.load(root + _NODE_BITS).to(tl.int32)) + place
            key = tl.load(_i64(_node(root, node)), place < slots, -1)
            _link(root, node, key, key >= 0)


@triton.jit(do_not_specialize=["root", "number"])
def forget(root: tl.int64, number: tl.int64, BLOCK: tl.constexpr):
    """One page a program: frees the nodes of a table. They stay in their chains until `link_all`."""
    root = _i64(root)
    page = tl.program_id(0)
    row_class = tl.load(_i32(tl.load(root + _PAGES)) + page * 2).to(tl.int64)
    if row_class >= 0:
        slots = tl.load(_i64(tl.load(root + _CLASSES_AT)) + row_class * _CLASS_FIELDS + _C_SLOTS).to(tl.int32)
        freed = tl.zeros((), tl.int64)
        for first in range(0, slots, BLOCK):
            place = first + tl.arange(0, BLOCK)
            at = _i64(_node(root, (page << tl.load(root + _NODE_BITS).to(tl.int32)) + place))
            goes = (tl.load(at, place < slots, -1) >> _ID_BITS) == number
            tl.store(at, tl.full((BLOCK,), -1, tl.int64), goes)
            freed += tl.sum(goes.to(tl.int64), 0)
        tl.atomic_add(_class_state(root, row_class) + _OCCUPIED, -freed, sem="relaxed")
        tl.atomic_add(_i64(tl.load(root + _STATE)) + _S_FREED, freed, sem="relaxed")
