"""What each kernel of the cache does, in plain Python, one row after another: what tests hold the kernels to.

A step changes `Contents` as its kernel changes the device's memory. Where a kernel looks at samples, the
reference looks at everything, so it agrees with caches of no more slots than one sample. Nothing here is
fast.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from cache_contents import Contents, Node, bucket_of, hash_of

from tableside.quant.cache.kernels.state import (
    FREE,
    FREE_PRIORITY,
    GROUP_WORDS,
    ID_BITS,
    IN_TABLE,
    LOCKED_PRIORITY,
    MOST_AHEAD,
    NO_NODE,
    PAGE_STRIDE,
    PRIORITY_LIMIT,
    ROWS_PER_FLAG,
    SCORE_UNIT,
    TAG_BITS,
    UNIT_BYTES,
    UNRESOLVED,
    USED_BITS,
    WORD_BITS,
    BatchArray,
    BatchState,
    ClassState,
    TableCounter,
)

RowOf = Callable[[int], bytes]  # a key's row in its table
_USED_MASK, _TAG_MASK = (1 << USED_BITS) - 1, (1 << TAG_BITS) - 1

# ---- numbers ----


def int32(value: int) -> int:
    """What is left of a number in 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


def tick_of(c: Contents) -> int:
    """The score of one use now."""
    return int32(c.now * c.rate)


def marked(score: int, mark: int, mask: int) -> int:
    """A score with what its lowest bits hold."""
    return int32((score & ~mask) | (mark & mask))


def ahead_of(score: int, tick: int) -> int:
    """By how much a score is ahead of the tick; one that seems far ahead has wrapped, and is far behind."""
    ahead = int32(score - tick)
    return -PRIORITY_LIMIT if ahead > MOST_AHEAD * SCORE_UNIT else ahead


def used_once_more(ahead: int) -> int:
    """log2(2 ** ahead + 1) in SCORE_UNITs, in fp32."""
    apart = np.float32(abs(ahead)) / np.float32(SCORE_UNIT)
    more = np.log2(np.float32(1) + np.exp2(-apart)) * np.float32(SCORE_UNIT)
    return max(ahead, 0) + int(more)


def row_priority(c: Contents, score: int) -> int:
    """The eviction priority of a row by its score (LFU)."""
    return max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, -ahead_of(score, tick_of(c))))


def miss_priority(c: Contents, rank: int) -> int:
    """The eviction priority that a miss would have in a slot."""
    behind = int32(tick_of(c) - c.arrays[BatchArray.SCORES][rank])
    return max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, behind))


def eviction_priority(c: Contents, number: int) -> int:
    """Slots with the highest one go first: free ones, then those used least (LFU) or not for longest. Locked
    ones never go.
    """
    node, in_flight = c.nodes[number], c.now - c.state[BatchState.DONE]
    tickets = 2 ** (USED_BITS if c.is_lfu else 32)
    if (c.now - node.use) % tickets < min(in_flight, tickets):
        return LOCKED_PRIORITY
    if node.key < 0:
        return FREE_PRIORITY
    if c.is_lfu:
        return row_priority(c, node.use & ~_USED_MASK)
    return max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, int32(c.now - node.use)))


# ---- find ----


def begin(c: Contents, place: int) -> None:
    """The next ticket, at a place among those in flight; all tickets before the oldest of them are done."""
    c.state[BatchState.NOW] += 1
    c.state[BatchState.DONE] = min([c.now, *(number for number in c.in_flight if number)]) - 1
    c.in_flight[place] = c.now
    c.state[BatchState.MISSES] = 0
    for of_class in c.classes:
        of_class[ClassState.MISSES] = of_class[ClassState.ADMITTED] = of_class[ClassState.VICTIMS] = 0


def probe(c: Contents, number: int, ids: Sequence[int]) -> list[int]:
    """The locations of ids of a table, as far as they are known."""
    table, locations = c.tables[number], []
    for id in ids:
        found = [n for n in c.chain_of(number << ID_BITS | id) if c.nodes[n].key == number << ID_BITS | id]
        if not 0 <= id < table.rows:
            locations.append(IN_TABLE)
        elif found:
            _touch(c, c.nodes[found[0]])
            locations.append(c.slot(found[0]))
        else:
            table.missed.add(id)
            table.dirty.add(id // ROWS_PER_FLAG)
            locations.append(UNRESOLVED)
    table.counters[TableCounter.IDS] += sum(0 <= id < table.rows for id in ids)
    table.counters[TableCounter.HITS] += sum(location >= 0 for location in locations)
    return locations


def _touch(c: Contents, node: Node) -> None:
    """A node is used: once a ticket, however often it is hit."""
    if not c.is_lfu:
        node.use = int32(c.now)
    elif (node.use ^ c.now) & _USED_MASK:
        tick = tick_of(c)
        node.use = marked(tick + used_once_more(ahead_of(node.use & ~_USED_MASK, tick)), c.now, _USED_MASK)


def enumerate_misses(c: Contents, staging_units: int) -> None:
    """Lists the misses in the order of their tables and ids, with their scores and their room in the staging
    buffer.
    """
    misses, locations = c.arrays[BatchArray.MISSES], c.arrays[BatchArray.LOCATIONS]
    for number, table in c.tables.items():
        units = table.row_bytes // UNIT_BYTES
        for flag in sorted(table.dirty):
            ids = sorted(id for id in table.missed if id // ROWS_PER_FLAG == flag)
            first_rank, first_unit = c.misses, c.state[BatchState.MISSES] >> 32
            for n, id in enumerate(ids):
                unit = first_unit + n * units
                misses[first_rank + n] = number << ID_BITS | id
                locations[first_rank + n] = -2 - unit if unit + c.widest_units <= staging_units else IN_TABLE
            if c.is_lfu:
                for together in _rounds(ids):
                    _score(c, [first_rank + ids.index(id) for id in together])
            c.state[BatchState.MISSES] += len(ids) * ((units << 32) + 1)
            c.classes[table.row_class][ClassState.MISSES] += len(ids)
            table.counters[TableCounter.FETCHED] += len(ids)
        table.dirty.clear()


def _rounds(ids: Sequence[int]) -> Iterator[list[int]]:
    """Ids that the kernel scores at once: the first of each word, then the second of each, and so on."""
    words: dict[int, list[int]] = {}
    for id in ids:
        words.setdefault(id // WORD_BITS % GROUP_WORDS, []).append(id)
    for n in range(max(map(len, words.values()), default=0)):
        yield [word[n] for word in words.values() if len(word) > n]


def _score(c: Contents, ranks: list[int]) -> None:
    """Scores misses by their ghosts; two of them remember the two keys whose scores are the highest."""
    tick, changed = tick_of(c), {}
    for rank in ranks:
        key = c.arrays[BatchArray.MISSES][rank]
        tag = key ^ (hash_of(key) >> 7)
        ghost = _ghost_of(c, 2 * bucket_of(key, len(c.ghosts) // 2), tag, tick)
        known = c.ghosts[ghost]
        ahead, is_it = ahead_of(known & ~_TAG_MASK, tick), (known ^ tag) & _TAG_MASK == 0
        more = used_once_more(ahead) if is_it else 0
        is_kept = not is_it and ahead > 0
        score, its_tag = (ahead - SCORE_UNIT, known) if is_kept else (more, tag)
        changed[ghost] = marked(tick + score, its_tag, _TAG_MASK)
        c.arrays[BatchArray.SCORES][rank] = int32(tick + more)
    for ghost, entry in changed.items():
        c.ghosts[ghost] = entry


def _ghost_of(c: Contents, first: int, tag: int, tick: int) -> int:
    """Which of two ghosts is a key's: the one with its tag, or the one with the lower score."""
    for ghost in (first, first + 1):
        if (c.ghosts[ghost] ^ tag) & _TAG_MASK == 0:
            return ghost
    one, other = (ahead_of(c.ghosts[ghost] & ~_TAG_MASK, tick) for ghost in (first, first + 1))
    return first + (other < one)


def resolve(c: Contents, number: int, ids: Sequence[int], locations: Sequence[int]) -> list[int]:
    """The locations of a table's ids, those that were UNRESOLVED included."""
    where = dict(zip(c.arrays[BatchArray.MISSES][: c.misses], c.arrays[BatchArray.LOCATIONS], strict=False))
    pairs = zip(ids, locations, strict=True)
    found = [where[number << ID_BITS | id] if known == UNRESOLVED else known for id, known in pairs]
    were_missed = zip(found, locations, strict=True)
    c.tables[number].counters[TableCounter.IN_PLACE] += sum(
        now == IN_TABLE and was == UNRESOLVED for now, was in were_missed
    )
    return found


# ---- admit ----


def choose_threshold(c: Contents, admit_all: bool) -> None:
    """The largest threshold for which no more misses have an eviction priority below it than slots have one
    at or above it.
    """
    first_victim = 0
    for row_class, of_class in enumerate(c.classes):
        of_class[ClassState.FIRST_VICTIM] = first_victim
        first_victim += of_class[ClassState.MISSES]
        if not of_class[ClassState.MISSES]:
            continue
        slots = [eviction_priority(c, node) for node in c.nodes_of(row_class)]
        mine = [
            r for r in range(c.misses) if c.table_of(c.arrays[BatchArray.MISSES][r]).row_class == row_class
        ]
        threshold, need = FREE_PRIORITY, len(mine)
        if c.is_lfu and not admit_all:
            misses = [miss_priority(c, rank) for rank in mine]
            candidates = {-(2**31) + 1, FREE_PRIORITY, *misses, *slots}
            fits = (t for t in candidates if sum(m < t for m in misses) <= sum(s >= t for s in slots))
            threshold = max(fits)
            need = sum(m < threshold for m in misses)
        of_class[ClassState.THRESHOLD] = threshold
        of_class[ClassState.VICTIM_PRIORITY] = _victim_priority(slots, need)


def _victim_priority(slots: list[int], need: int) -> int:
    """The largest eviction priority that `need` slots reach; that of free slots alone, where there are
    many."""
    free = slots.count(FREE_PRIORITY)
    wanted = 1 if free >= 16 and free * 4 > need * 5 else min(need, len(slots))
    lowest = -(2**31) + 1
    return max(max(lowest, sorted(slots, reverse=True)[wanted - 1]) if wanted else FREE_PRIORITY, lowest)


def rank_admitted(c: Contents) -> None:
    """Numbers the admitted misses of each class; the others get -1."""
    for rank in range(c.misses):
        of_class = c.classes[c.table_of(c.arrays[BatchArray.MISSES][rank]).row_class]
        is_admitted = not c.is_lfu or miss_priority(c, rank) < of_class[ClassState.THRESHOLD]
        c.arrays[BatchArray.RANKS][rank] = of_class[ClassState.ADMITTED] if is_admitted else -1
        of_class[ClassState.ADMITTED] += is_admitted


def evict(c: Contents, is_any: bool) -> None:
    """Takes slots page by page, until each class has as many victims as admitted rows."""
    for turn in range(len(c.pages)):
        page = (turn + c.now * PAGE_STRIDE) % len(c.pages)
        if c.pages[page][0] < 0:
            continue
        of_class = c.classes[c.pages[page][0]]
        if of_class[ClassState.VICTIMS] >= of_class[ClassState.ADMITTED]:
            continue
        least = (
            LOCKED_PRIORITY + 1 if is_any else max(LOCKED_PRIORITY + 1, of_class[ClassState.VICTIM_PRIORITY])
        )
        victims = [n for n in c.nodes if n >> c.node_bits == page and eviction_priority(c, n) >= least]
        for rank, node in enumerate(victims, of_class[ClassState.VICTIMS]):
            if rank < of_class[ClassState.ADMITTED]:
                _take(c, node, of_class, of_class[ClassState.FIRST_VICTIM] + rank)
        of_class[ClassState.VICTIMS] += len(victims)


def _take(c: Contents, number: int, of_class: list[int], at: int) -> None:
    node = c.nodes[number]
    c.arrays[BatchArray.VICTIMS][at] = number
    c.arrays[BatchArray.VICTIM_BUCKETS][at] = bucket_of(node.key, len(c.chains)) if node.key >= 0 else -1
    of_class[ClassState.OCCUPIED] += node.key < 0
    node.key, node.use = FREE, int32(c.now)


def unlink(c: Contents) -> None:
    """Takes the nodes without a key out of the chains that victims were in."""
    for bucket in c.arrays[BatchArray.VICTIM_BUCKETS][: c.misses]:
        if bucket >= 0:
            c.chains[bucket] = [node for node in c.chains[bucket] if c.nodes[node].key >= 0]


def insert(c: Contents) -> None:
    """Gives the admitted misses their victims' slots, in the order of their ranks, as far as there are
    victims.
    """
    locations = c.arrays[BatchArray.LOCATIONS]
    for n in range(c.misses):
        key, rank = c.arrays[BatchArray.MISSES][n], c.arrays[BatchArray.RANKS][n]
        of_class = c.classes[c.table_of(key).row_class]
        is_staged = locations[n] < IN_TABLE
        c.arrays[BatchArray.NODES][n] = NO_NODE
        if 0 <= rank < min(of_class[ClassState.VICTIMS], of_class[ClassState.ADMITTED]):
            number = c.arrays[BatchArray.VICTIMS][of_class[ClassState.FIRST_VICTIM] + rank]
            c.nodes[number].key = key
            c.chain_of(key).insert(0, number)
            if c.is_lfu:
                c.nodes[number].use = marked(c.arrays[BatchArray.SCORES][n], c.now, _USED_MASK)
            if is_staged:
                c.arrays[BatchArray.NODES][n] = number
            else:
                locations[n] = c.slot(number)
            c.state[BatchState.INSERTED] += 1
        else:
            c.state[BatchState.STAGED] += is_staged
            c.state[BatchState.LOCKED_OUT] += rank >= 0


# ---- fetch ----


def list_rows(c: Contents, gather_from: int, room_units: int) -> list[tuple[int, int]]:
    """What the CPU gathers: key and unit of each row that has room in its area and in the staging buffer,
    `room_units` at most.
    """
    units = min(c.state[BatchState.MISSES] >> 32, room_units) if c.misses >= gather_from else 0
    c.state[BatchState.GATHERED_BYTES] = units * UNIT_BYTES
    placed = [(key, -2 - location) for key, location in _located(c) if location < IN_TABLE]
    return [(key, unit) for key, unit in placed if unit + c.table_of(key).row_bytes // UNIT_BYTES <= units]


def fetch_misses(c: Contents, row_of: RowOf, staging: bytearray) -> None:
    """Fetches the rows of misses into the staging buffer, as far as they have room there."""
    for key, location in _located(c):
        if location < IN_TABLE:
            start, row = (-2 - location) * UNIT_BYTES, row_of(key)
            staging[start : start + len(row)] = row


def fetch_rest(c: Contents, row_of: RowOf) -> None:
    """Fetches admitted rows that have no room in the staging buffer into their slots."""
    for key, location in _located(c):
        if location >= 0:
            number = next(n for n in c.chain_of(key) if c.nodes[n].key == key)
            c.nodes[number].row = row_of(key)


def fill_slots(c: Contents, staging: bytearray) -> None:
    """Copies admitted rows from the staging buffer to their slots."""
    for n, (key, location) in enumerate(_located(c)):
        if (number := c.arrays[BatchArray.NODES][n]) != NO_NODE:
            start = (-2 - location) * UNIT_BYTES
            c.nodes[number].row = bytes(staging[start : start + c.table_of(key).row_bytes])


def _located(c: Contents) -> list[tuple[int, int]]:
    """Key and location of each miss."""
    return list(zip(c.arrays[BatchArray.MISSES][: c.misses], c.arrays[BatchArray.LOCATIONS], strict=False))


def end(c: Contents) -> None:
    """Empties the maps of misses and the buckets of victims."""
    for table in c.tables.values():
        table.missed.clear()
    c.arrays[BatchArray.VICTIM_BUCKETS][: c.misses] = [-1] * c.misses


def release(c: Contents, place: int) -> None:
    """A ticket is not in flight any more."""
    c.in_flight[place] = 0
