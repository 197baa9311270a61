/* split_ids(inputs, jobs, tables, ends, distinct, at, blocks, staging): the different ids that lookups
 *   ask of tables, owner after owner, of each table after table, at last those without an owner; and places
 *   for their rows. jobs: int64 [jobs, 3], where the ids of a lookup lie in inputs, how many, and the number
 *   of its table, which ascends; tables: int64 [tables, 8], buckets (0: ids are row numbers), bucket_ids (as
 *   in a row map), row_bytes, base, the address from which rows are numbered (below 0: from 0 on, in the
 *   order of owners), and of hot rows (quant/rows/hot.py), which are asked of nobody, address of the marks,
 *   row numbers that there are marks of (0: none are hot), the number of the first one, and how many there
 *   are; ends: int64 [tables, owners], the row number or bucket after the last of each; distinct: int64
 *   [ids]; at: int64 [ids], the number of the row of each, lookup after lookup; blocks: int64 [3, tables,
 *   owners + 1], different ids, the byte in staging of the first one's row, and its number; staging: room for
 *   the rows
 *   -> how many different ids there are, without hot ones
 * The rows of one owner lie one after another, but for gaps where base wants them. Before them is room for a
 * byte for each, rounded up to 8, and behind them for 8 bytes. It releases the interpreter's lock. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "_ids.h"
#include "_native_index.h"

typedef struct { int64_t ids_at, n, table; } asking;
typedef struct { int64_t buckets, bucket_ids, row_bytes, base, marks, marked, first_hot, hot; } asked_table;

typedef struct {
    const asked_table *table;
    const int64_t *ends;
    int64_t owners;
    int64_t *ids, *owner_of, *counts; /* of the different ids, in the order in which they come first */
    uint64_t key, mask;
    uint32_t *slots;                  /* [mask + 1]: places in `ids`, from 1 on; 0: none */
    int64_t different;
} splitting;

enum { FEW_OWNERS = 16 };

/* The owner of an id; `owners`: none. */
static int64_t owner_of(const splitting *s, int64_t id) {
    uint64_t unit = (uint64_t)id;
    if (s->table->buckets) {
        const row_map buckets = {.buckets = s->table->buckets, .bucket_ids = s->table->bucket_ids};
        unit = bucket_of(&buckets, (uint64_t)id, mix_id((uint64_t)id));
    }
    int64_t low = 0, high = s->owners;
    if (high <= FEW_OWNERS) { /* without a branch that is as often wrong as right */
        for (int64_t k = 0; k < high; k++) low += unit >= (uint64_t)s->ends[k];
        return low;
    }
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (unit < (uint64_t)s->ends[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Nobody outside knows it, so that no ids can be chosen that meet in a table. */
static uint64_t secret(void) {
    static uint64_t found; /* the interpreter's lock is held */
    if (found) return found;
    /* by number: the wheel is for C libraries without a function for it */
    if (syscall(SYS_getrandom, &found, sizeof found, 0) != (long)sizeof found) found = (uintptr_t)&found | 1;
    return found;
}

/* The number of a hot row; -1: it is none. */
static int64_t hot_number(const asked_table *t, int64_t row) {
    if ((uint64_t)row >= (uint64_t)t->marked) return -1;
    const uint64_t *const word = (const uint64_t *)(intptr_t)t->marks + 2 * (row >> 6);
    const uint64_t bit = (uint64_t)1 << (row & 63);
    const uint64_t slot = word[1] + (uint64_t)__builtin_popcountll(word[0] & (bit - 1));
    return word[0] & bit && slot < (uint64_t)t->hot ? t->first_hot + (int64_t)slot : -1; /* whatever a file holds */
}

/* Adds a lookup's ids; at: the place of each in the order in which they come first, from `first` on; of hot
 * rows ~ their number. */
static void add_ids(splitting *s, const uint8_t *ids, int64_t n, int64_t first, int64_t *at) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = load_i64(ids + 8 * i);
        if (s->table->marked) {
            const int64_t number = hot_number(s->table, id);
            if (number >= 0) {
                at[i] = ~number;
                continue;
            }
        }
        uint64_t slot = mix_id((uint64_t)id ^ s->key) >> 32 & s->mask;
        while (s->slots[slot] && s->ids[s->slots[slot] - 1] != id) slot = (slot + 1) & s->mask;
        if (!s->slots[slot]) {
            const int64_t owner = owner_of(s, id);
            s->ids[s->different] = id, s->owner_of[s->different] = owner;
            s->counts[owner]++;
            s->slots[slot] = (uint32_t)++s->different;
        }
        at[i] = first + s->slots[slot] - 1;
    }
}

/* int64 [tables, owners + 1] each */
typedef struct { int64_t *counts, *bytes, *numbers, tables, groups; } block_table;

/* Places the rows of each owner; returns the bytes that they take. address: of the staging. */
static int64_t place_blocks(const block_table *b, const asked_table *tables, int64_t address) {
    int64_t at = 0;
    for (int64_t owner = 0; owner < b->groups; owner++) {
        int64_t ids = 0;
        for (int64_t t = 0; t < b->tables; t++) ids += b->counts[t * b->groups + owner];
        at += (ids + 7) / 8 * 8;
        for (int64_t t = 0; t < b->tables; t++) {
            const int64_t k = t * b->groups + owner, row_bytes = tables[t].row_bytes, base = tables[t].base;
            if (base >= 0 && b->counts[k])
                at += row_bytes - 1 - (address + at - base + row_bytes - 1) % row_bytes;
            b->bytes[k] = at;
            if (base >= 0) b->numbers[k] = (address + at - base) / row_bytes;
            else b->numbers[k] = owner ? b->numbers[k - 1] + b->counts[k - 1] : 0;
            at += b->counts[k] * row_bytes;
        }
        at += ids ? 8 : 0;
    }
    return at;
}

/* Orders the different ids, `ids` table after table, and turns places among them into numbers of rows.
 * owner_of: is overwritten; room: int64 [2, owners + 1]. */
static void order_by_owner(const block_table *b, const int64_t *ids, int64_t *owner_of, int64_t *room,
                           int64_t *distinct, int64_t *at, int64_t asked) {
    int64_t *const next = room, *const shift = room + b->groups, start = 0;
    for (int64_t owner = 0; owner < b->groups; owner++) {
        next[owner] = start;
        for (int64_t t = 0; t < b->tables; t++) start += b->counts[t * b->groups + owner];
    }
    for (int64_t t = 0; t < b->tables; t++) {
        int64_t different = 0;
        for (int64_t owner = 0; owner < b->groups; owner++) {
            shift[owner] = b->numbers[t * b->groups + owner] - next[owner];
            different += b->counts[t * b->groups + owner];
        }
        for (; different--; ids++, owner_of++) {
            const int64_t owner = *owner_of, place = next[owner]++;
            distinct[place] = *ids, *owner_of = place + shift[owner];
        }
    }
    const int64_t *const numbers = owner_of - start;
    for (int64_t i = 0; i < asked; i++) at[i] = at[i] < 0 ? ~at[i] : numbers[at[i]];
}

/* Whether jobs lie in the inputs, name tables in ascending order, and have `ids` ids together. */
static int are_sound(const asking *jobs, int64_t count, int64_t tables, int64_t ids, int64_t bytes) {
    int64_t table = 0, left = ids;
    for (int64_t k = 0; k < count; k++) {
        const asking *j = &jobs[k];
        if (j->table < table || j->table >= tables || j->n < 0 || j->n > left || j->ids_at < 0
            || j->ids_at > bytes || 8 * j->n > bytes - j->ids_at)
            return 0;
        table = j->table, left -= j->n;
    }
    return !left;
}

/* Whether the tables are ones; address: of the staging; most: gets the most ids that lookups ask of one. */
static int are_tables(const asked_table *tables, int64_t of_tables, int64_t address, const asking *jobs,
                      int64_t count, int64_t *most) {
    for (int64_t t = 0; t < of_tables; t++)
        if (tables[t].buckets < 0 || tables[t].buckets & (tables[t].buckets - 1) || tables[t].bucket_ids < 0
            || tables[t].row_bytes < 1 || tables[t].row_bytes > INT32_MAX || tables[t].base > address
            || tables[t].marked < 0
            || (tables[t].marked
                && (!tables[t].marks || tables[t].buckets || tables[t].first_hot < 0 || tables[t].hot < 0)))
            return 0;
    for (int64_t k = 0, of = 0; k < count; k++) {
        of = (k && jobs[k].table == jobs[k - 1].table ? of : 0) + jobs[k].n;
        *most = of > *most ? of : *most;
    }
    return 1;
}

PyObject *py_split_ids(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments all;
    if (!take_arguments("split_ids", "bbbbwwww", args, n, &all)) return NULL;
    const Py_buffer *inputs = all.b, *b = all.b + 1;
    const int64_t address = (int64_t)(intptr_t)b[6].buf;
    const asking *jobs = b[0].buf;
    const asked_table *tables = b[1].buf;
    const int64_t count = b[0].len / (int64_t)sizeof *jobs, of_tables = b[1].len / (int64_t)sizeof *tables,
                  ids = b[3].len / 8, owners = of_tables ? b[2].len / 8 / of_tables : 0, groups = owners + 1;
    int64_t most = 0, total = 0, taken = 0;
    if (!of_tables || owners <= 0 || b[2].len != 8 * of_tables * owners || b[4].len != b[3].len
        || b[5].len != 3 * 8 * of_tables * groups || ids >= UINT32_MAX / 4
        || !are_sound(jobs, count, of_tables, ids, inputs->len)
        || !are_tables(tables, of_tables, address, jobs, count, &most))
        return unsound(&all, "split_ids");
    uint64_t slots = 64;
    while (slots < 2 * (uint64_t)most) slots *= 2;
    int64_t *const memory = malloc(slots * sizeof(uint32_t) + (2 * (size_t)(ids + groups)) * sizeof(int64_t));
    if (!memory) {
        release(&all);
        return PyErr_NoMemory();
    }
    const uint64_t key = secret();
    Py_BEGIN_ALLOW_THREADS
    int64_t *const own = memory + slots / 2, *const owner_of = own + ids, *const room = owner_of + ids;
    int64_t *at = b[4].buf;
    block_table blocks = {.counts = b[5].buf, .tables = of_tables, .groups = groups};
    blocks.bytes = blocks.counts + of_tables * groups, blocks.numbers = blocks.bytes + of_tables * groups;
    const asking *job = jobs, *end = jobs + count;
    for (int64_t t = 0; t < of_tables; t++) {
        int64_t n_ids = 0;
        for (const asking *j = job; j < end && j->table == t; j++) n_ids += j->n;
        uint64_t size = 64;
        while (size < 2 * (uint64_t)n_ids) size *= 2;
        splitting s = {.table = &tables[t], .ends = (const int64_t *)b[2].buf + t * owners, .owners = owners,
                       .ids = own + total, .owner_of = owner_of + total, .counts = blocks.counts + t * groups,
                       .key = key, .mask = size - 1, .slots = (uint32_t *)memory};
        __builtin_memset(s.counts, 0, (size_t)groups * sizeof *s.counts);
        __builtin_memset(s.slots, 0, size * sizeof *s.slots);
        for (; job < end && job->table == t; job++) {
            add_ids(&s, (const uint8_t *)inputs->buf + job->ids_at, job->n, total, at);
            at += job->n;
        }
        total += s.different;
    }
    taken = place_blocks(&blocks, tables, address);
    order_by_owner(&blocks, own, owner_of, room, b[3].buf, b[4].buf, ids);
    Py_END_ALLOW_THREADS
    free(memory);
    if (taken > b[6].len) return unsound(&all, "split_ids");
    release(&all);
    return PyLong_FromLongLong(total);
}
