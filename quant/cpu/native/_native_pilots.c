/* Finds the pilots of an id index's bucket (quant/rows/ids.py), by which no two of its ids share a row.
 * Groups of ids with a common pilot are placed by size, largest first, with the first pilot that finds
 * free slots for all. Failing that, a group takes the cheapest pilot and drives out the groups in its way,
 * which are placed anew: so PtrHash (Groot Koerkamp, 2025) fills tables to 98 % with one-byte pilots. */
#include "_native_index.h"
#include <stdlib.h>
#include <string.h>
#include "_ids.h"

enum { PILOTS = 256, SEEDS = 64, LARGEST_GROUP = 64, RECENT = 16 };

/* A bucket while its pilots are sought. Group g has ids [start[g], start[g + 1]) of `spreads`. */
typedef struct {
    uint64_t slots, groups;
    uint64_t *spreads;
    uint32_t *start, *order; /* order: groups by size, the largest first */
    uint32_t *owner;         /* of each slot: its group + 1, or 0 */
    uint64_t *taken;         /* a bit for each slot, which are in fewer lines of the cache than the owners */
    uint32_t *stack;         /* groups that were driven out */
    uint8_t *pilots;
    uint64_t turn; /* where the search for a pilot begins */
} bucket;

static uint32_t size_of(const bucket *b, uint32_t group) { return b->start[group + 1] - b->start[group]; }

/* The slots of a group with a pilot; 0: two of its ids meet. */
static int slots_with(const bucket *b, uint32_t group, uint64_t pilot, uint32_t *slots) {
    const uint64_t *spreads = b->spreads + b->start[group];
    const uint32_t size = size_of(b, group);
    for (uint32_t i = 0; i < size; i++) {
        slots[i] = (uint32_t)slot_of(spreads[i], pilot, b->slots);
        for (uint32_t k = 0; k < i; k++)
            if (slots[k] == slots[i]) return 0;
    }
    return 1;
}

/* What it costs to take these slots: the squares of the sizes of the groups that have them. */
static uint64_t cost_of(const bucket *b, const uint32_t *slots, uint32_t size, uint64_t limit) {
    uint64_t cost = 0;
    for (uint32_t i = 0; i < size && cost < limit; i++) {
        const uint32_t owner = b->owner[slots[i]];
        if (owner) cost += (uint64_t)size_of(b, owner - 1) * size_of(b, owner - 1);
    }
    return cost;
}

static void take_slots(bucket *b, uint32_t group, const uint32_t *slots) {
    for (uint32_t i = 0; i < size_of(b, group); i++) {
        b->owner[slots[i]] = group + 1;
        b->taken[slots[i] / 64] |= (uint64_t)1 << slots[i] % 64;
    }
}

static void free_slots(bucket *b, uint32_t group) {
    uint32_t slots[LARGEST_GROUP];
    slots_with(b, group, b->pilots[group], slots);
    for (uint32_t i = 0; i < size_of(b, group); i++) {
        b->owner[slots[i]] = 0;
        b->taken[slots[i] / 64] &= ~((uint64_t)1 << slots[i] % 64);
    }
}

/* The first pilot by which all ids of a group find free slots; PILOTS: none. */
static uint64_t free_pilot(const bucket *b, uint32_t group, uint32_t *slots) {
    const uint64_t *spreads = b->spreads + b->start[group];
    const uint32_t size = size_of(b, group);
    for (uint64_t i = 0; i < PILOTS; i++) {
        const uint64_t pilot = (b->turn + i) % PILOTS;
        uint32_t k = 0;
        for (; k < size; k++) {
            slots[k] = (uint32_t)slot_of(spreads[k], pilot, b->slots);
            if (b->taken[slots[k] / 64] >> slots[k] % 64 & 1) break;
        }
        if (k == size && slots_with(b, group, pilot, slots)) return pilot;
    }
    return PILOTS;
}

static int was_placed_lately(const uint32_t *recent, uint32_t group) {
    for (int i = 0; i < RECENT; i++)
        if (recent[i] == group + 1) return 1;
    return 0;
}

/* Gives a group the cheapest pilot. Returns the number of groups driven out, now on the stack; -1: no
 * pilot works. */
static int64_t place(bucket *b, uint32_t group, int64_t stacked, const uint32_t *recent) {
    uint32_t slots[LARGEST_GROUP], best[LARGEST_GROUP];
    uint64_t least = UINT64_MAX, pilot = 0;
    const uint32_t size = size_of(b, group);
    if ((pilot = free_pilot(b, group, slots)) < PILOTS) {
        take_slots(b, group, slots);
        b->pilots[group] = (uint8_t)pilot;
        return 0;
    }
    for (uint64_t i = 0; i < PILOTS; i++) {
        const uint64_t p = (b->turn + i) % PILOTS;
        if (!slots_with(b, group, p, slots)) continue;
        uint64_t cost = cost_of(b, slots, size, least);
        if (cost >= least) continue;
        for (uint32_t k = 0; cost && k < size; k++)
            /* no going round in circles */
            if (b->owner[slots[k]] && was_placed_lately(recent, b->owner[slots[k]] - 1)) cost = least;
        if (cost >= least) continue;
        least = cost, pilot = p;
        memcpy(best, slots, size * sizeof *slots);
    }
    if (least == UINT64_MAX) return -1;
    int64_t driven = 0;
    for (uint32_t i = 0; i < size; i++) {
        const uint32_t owner = b->owner[best[i]];
        if (!owner || owner == group + 1) continue;
        b->stack[stacked + driven++] = owner - 1;
        free_slots(b, owner - 1);
    }
    take_slots(b, group, best);
    b->pilots[group] = (uint8_t)pilot;
    return driven;
}

/* Places all groups; 0: this seed will not do. */
static int place_all(bucket *b) {
    uint32_t recent[RECENT] = {0};
    int64_t budget = 32 * (int64_t)b->groups + 4096;
    b->turn = 0;
    for (uint64_t n = 0; n < b->groups; n++) {
        int64_t stacked = 1;
        b->stack[0] = b->order[n];
        if (!size_of(b, b->stack[0])) return 1; /* and all that follow are empty */
        while (stacked) {
            const uint32_t group = b->stack[--stacked];
            const int64_t driven = place(b, group, stacked, recent);
            if (driven < 0 || stacked + driven > (int64_t)b->groups) return 0;
            if (driven) {
                if ((budget -= driven) < 0) return 0;
                recent[b->turn % RECENT] = group + 1;
                b->turn++;
            }
            stacked += driven;
        }
    }
    return 1;
}

/* Groups the ids of a bucket by pilot, and the groups by size; 0: a group is too large. */
static int group_ids(bucket *b, const record *records, int64_t n, uint64_t seed) {
    uint32_t sizes[LARGEST_GROUP + 2] = {0};
    memset(b->start, 0, (b->groups + 2) * sizeof *b->start);
    for (int64_t i = 0; i < n; i++)
        b->start[reduce(spread(mix_id((uint64_t)records[i].id), seed), b->groups) + 2]++;
    for (uint64_t g = 0; g < b->groups; g++) {
        if (b->start[g + 2] > LARGEST_GROUP) return 0;
        sizes[LARGEST_GROUP - b->start[g + 2] + 1]++;
        b->start[g + 2] += b->start[g + 1];
    }
    for (int64_t i = 0; i < n; i++) {
        const uint64_t g = spread(mix_id((uint64_t)records[i].id), seed);
        b->spreads[b->start[reduce(g, b->groups) + 1]++] = g;
    }
    for (int size = 1; size <= LARGEST_GROUP; size++) sizes[size] += sizes[size - 1];
    for (uint64_t g = 0; g < b->groups; g++)
        b->order[sizes[LARGEST_GROUP - size_of(b, (uint32_t)g)]++] = (uint32_t)g;
    return 1;
}

int build_bucket(const record *records, int64_t n, uint64_t slots, uint64_t *seed, uint8_t *pilots) {
    bucket b = {.slots = slots, .groups = pilots_before(slots) + 1, .pilots = pilots};
    const uint64_t words = slots / 64 + 1;
    uint8_t *memory = malloc(((size_t)n + words) * 8 + (b.groups * 3 + slots + 8) * sizeof(uint32_t));
    if (!memory) return -1;
    b.spreads = (uint64_t *)(void *)memory;
    b.taken = b.spreads + n;
    b.start = (uint32_t *)(void *)(b.taken + words);
    b.order = b.start + b.groups + 2;
    b.stack = b.order + b.groups;
    b.owner = b.stack + b.groups + 1;
    int found = 0;
    for (*seed = 0; *seed < SEEDS && !found; *seed += !found) {
        memset(b.owner, 0, slots * sizeof *b.owner);
        memset(b.taken, 0, words * sizeof *b.taken);
        memset(pilots, 0, b.groups);
        found = group_ids(&b, records, n, *seed) && place_all(&b);
    }
    free(memory);
    return found;
}
