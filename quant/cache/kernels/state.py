"""The state that the cache's kernels share: int64 records in device memory, and the constants to read them.
    arena   page 0 | page 1 | … | staging buffers
    page    nodes [slots] · rows [slots, row_bytes], at a multiple of row_bytes from the arena's start
    node    16 bytes: key int64 (-1: free) · next int32 (in its bucket's chain; -1: none) · use int32
    use     LRU: the last ticket that used the node. LFU: the node's score; low USED_BITS are that ticket's
    ghost   int32: a score; its low TAG_BITS are a tag of the missed key (LFU)
A page holds rows of one size, its class. A node's number is `page << node bits | place in the page`, so
finding it needs no class. Row `i` of a page lies at `(first row + i) * row_bytes`. A key is `table << ID_BITS
| id`. A bucket is the head of a chain of nodes. Any key fits into any slot, no hash table fills up before the
slots, and removed keys leave nothing behind. Misses of a batch are bits of a map over each table, so each row
is fetched once, in address order, without a sort or hash table. A row's rank is its place among the misses.
Dirty flags mark groups of map words with any bits. Tickets and scores are int32 where space matters, and may
wrap. USED_BITS of a ticket identify slots in flight: a slot last used a multiple of 2 ** USED_BITS tickets
ago looks in flight too and is evicted a little later."""

from enum import IntEnum

from tableside.quant.device.launch import constants

ID_BITS = 40  # of a key; the table's number lies above them
NODE_BYTES, NODE_NEXT, NODE_USE = 16, 8, 12  # of a node: its size, and where next and use lie
USED_BITS, TAG_BITS = 10, 16  # of a node's and of a ghost's score, which are not the score's
UNIT_BYTES = 16  # staging buffers are counted in these
WORD_BITS = 32  # rows of one word of a map
GROUP_WORDS = 256  # words of a map that share one dirty flag
ROWS_PER_FLAG = WORD_BITS * GROUP_WORDS
CLASSES = 64  # row sizes at most
MOST_IN_FLIGHT = 1024  # batches in flight at once
FREE, NO_NODE = -1, -1
IN_TABLE = -1  # a location: read the table itself
UNRESOLVED = -(2**31)  # a location that is not known yet
BUSY = -2  # the head of a bucket whose chain is being rebuilt
SCORE_UNIT = 1 << 22  # a score is a logarithm to base 2, in this many parts; it wraps after 1024 half lives
MOST_AHEAD = (
    40  # doublings by which a score can be ahead of the tick; one that seems further ahead has wrapped
)
PRIORITY_LIMIT = 2**30  # eviction priorities of slots that hold a row lie between minus this and this
FREE_PRIORITY = 2**31 - 1  # of a slot that holds no row
LOCKED_PRIORITY = -(2**31)  # of a slot that a batch in flight may read: it is never evicted
PAGE_STRIDE = (
    7919  # pages that `evict` begins further on with each ticket: a prime, so that it comes to all of them
)


class Root(IntEnum):
    """The cache's addresses and sizes. The host writes them when tables, pages or memory change."""

    ARENA = 0
    PAGE_BYTES = 1
    PAGES = 2  # int32 [pages, 2]: class (-1: none), first row
    PAGE_COUNT = 3
    NODE_BITS = 4
    HEADS = 5  # int32 [buckets]: the first node of each chain; -1: none
    BUCKETS = 6
    TABLES = 7  # int64 [tables, len(TableField)]
    CLASSES = 8  # int64 [CLASSES, len(ClassField)]
    STATE = 9  # int64 [len(BatchState) + CLASSES * len(ClassState)]
    COUNTERS = 10  # int64 [tables, len(Counter)]
    IN_FLIGHT = 11  # int64 [MOST_IN_FLIGHT]: the number of the ticket at each place; 0: none
    GHOSTS = 12  # int32 [pairs, 2]: scores and tags of keys that were missed (LFU)
    GHOST_PAIRS = 13
    RATE = 14  # by how much the tick grows a ticket; SCORE_UNIT is one half life
    GROUPS = 15  # int32 [programs of `enumerate_misses`, 2]: table, its first dirty flag
    MOST_SLOTS = 16  # of a page, of any class
    WIDEST_UNITS = 17  # UNIT_BYTES of a row, of any class
    # page-locked int64 [2 + GATHER_MOST], then int32 [GATHER_MOST]: what the CPU gathers (`fetch.list_rows`)
    GATHER_LIST = 18
    GATHER_FROM = 19  # misses of a batch from which the CPU gathers them
    GATHER_MOST = 20  # misses of a batch that the CPU gathers, at most
    GATHERED = 21  # page-locked memory where the CPU puts them, laid out as in the staging buffer
    GATHERED_UNITS = 22  # its size


class BatchArray(IntEnum):
    """Addresses of arrays that a batch writes, an element an id at most, behind Root in the same record."""

    MISSES = 0  # int64 [misses]: keys, in the order of their ranks
    SCORES = 1  # int32 [misses]: their scores (LFU)
    RANKS = 2  # int32 [misses]: the place of each among the admitted of its class; -1: it is not admitted
    NODES = 3  # int32 [misses]: the node whose slot gets the row from the staging buffer; -1: none does
    LOCATIONS = 4  # int32 [misses]: where the lookup finds it, as a ticket's locations
    VICTIMS = 5  # int32 [misses]: nodes for the admitted, those of a class from its FIRST_VICTIM on
    VICTIM_BUCKETS = 6  # int32 [misses]: the bucket of the key that each victim held; -1: none


class TableField(IntEnum):
    """A table of a cache."""

    ADDRESS = 0  # of the first row, where the device reads it; 0: the host fetches rows
    ROWS = 1
    ROW_BYTES = 2  # there; slots and staging buffers have rows padded to UNIT_BYTES
    CLASS = 3
    MISSES = 4  # int32 [words, 2]: bits of the rows that the batch misses, and the rank of the first of them
    DIRTY = 5  # int32 [flags]: whether any of GROUP_WORDS words has bits


class ClassField(IntEnum):
    """Rows of one size."""

    ROW_BYTES = 0
    SLOTS = 1  # of a page
    PAGE_LIST = 2  # int32 [pages]
    PAGES = 3


class BatchState(IntEnum):
    """State of the current batch; `len(ClassState)` more for each class follow."""

    NOW = 0  # the last ticket
    DONE = 1  # all tickets up to it are released
    MISSES = 2  # of the batch; above 32 bits the units that their rows take in a staging buffer
    INSERTED = 3  # rows put into slots; from here on: since the cache was made
    FREED = 4  # rows that were dropped with their page or table, and for no other row
    STAGED = 5  # rows read from a staging buffer that were not admitted
    LOCKED_OUT = 6  # rows that were admitted and got no slot, since batches in flight held them all
    GATHERED_BYTES = 7  # of the staging buffer, those that the CPU gathers in this batch
    UNREAD = 8  # the location of rows that the host could not fetch; 0: there are none


class ClassState(IntEnum):
    """A class in a batch. OCCUPIED lasts."""

    MISSES = 0
    ADMITTED = 1  # of them
    VICTIMS = 2  # slots found for them, or more
    THRESHOLD = 3  # misses whose eviction priority is below it are admitted
    VICTIM_PRIORITY = 4  # slots whose eviction priority is at least this are victims
    FIRST_VICTIM = 5  # where the class's victims begin in VICTIMS
    OCCUPIED = 6  # slots that hold a row


class TableCounter(IntEnum):
    """Counts of a table since it was registered."""

    IDS = 0  # of its own rows
    HITS = 1
    FETCHED = 2  # rows that were missing, each once a batch
    IN_PLACE = 3  # ids whose row found no room in slots and staging buffer


class ProbeField(IntEnum):
    """One lookup of a batch."""

    TABLE = 0
    IDS_AT = 1  # byte in the inputs, int64
    IDS = 2
    LOCATIONS_AT = 3  # byte in the locations, int32
    FIRST_BLOCK = 4


class TicketField(IntEnum):
    """A batch in flight. The host writes the first three, `begin` the others."""

    STAGING = 0  # address of its staging buffer
    STAGING_UNITS = 1
    PLACE = 2  # in IN_FLIGHT
    NUMBER = 3
    JOBS = 4  # address of int64 [jobs, len(ProbeField)], written by `quant.cache.jobs`
    JOB_OF_BLOCK = 5  # address of int32 [blocks], written there too
    BLOCKS = 6  # how many
    INPUTS = 7  # address of the batch's inputs; int64 ids lie at byte IDS_AT, written before the batch begins
    LOCATIONS = (
        8  # address of the batch's locations; int32 [ids] at byte LOCATIONS_AT, written by `find.probe`
    )


def occupied_at(number: int) -> int:
    """Position of a class's OCCUPIED in the state."""
    return len(BatchState) + number * len(ClassState) + ClassState.OCCUPIED


globals().update(
    constants("ROOT", Root)
    | constants("ARRAY", BatchArray, first=len(Root))
    | constants("TABLE", TableField)
    | constants("CLASS", ClassField)
    | constants("STATE", BatchState)
    | constants("CLASS_STATE", ClassState)
    | constants("COUNTER", TableCounter)
    | constants("PROBE", ProbeField)
    | constants("TICKET", TicketField)
)
