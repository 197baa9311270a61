/* Threads that wait for a disk, without Python.
 *
 * in_threads(owner, device, parts, wait_ms, place, checked, regions, rows, out, state, depth, patience_ms, all_ms)
 *   Has threads of this process read the rows that are LEFT, in so many parts at once, as `bring` does, or with a depth
 *   of 0 as `fetch`. Waits no longer than wait_ms, or with -1 for all; rows of parts that did not end are LATE then.
 *   owner: what keeps file, bits and regions; a thread that a disk holds up keeps it, and so does a part that it reads
 *   when nobody waits any more. device: the number of the disk, since one that hangs takes no thread from another. A
 *   signal's handler may raise meanwhile.
 * ask(owner, device, place, rows, most): asks the disk for the blocks of the first rows, `most` of them, by a thread,
 *   and waits for none.
 */
#include "_blocks.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 32 }; /* of a disk: fast ones need as many */
enum { SIGNALS_MS = 200 }; /* between two looks whether a signal came */

/* Some rows that one thread reads. after: of the queue, or of those that nobody waits for. caller: who does; NULL:
 * nobody. is_over: it was read. An `ask` has no states, and most.depth is how many blocks. Rows and what is read lie
 * behind it. */
typedef struct job {
    struct job *after;
    struct caller *caller;
    PyObject *owner;
    reading r;
    limits most;
    int is_over;
} job;

typedef struct caller { pthread_cond_t came; int left; } caller;

typedef struct pool {
    struct pool *next;
    long long device;
    pid_t process;
    pthread_mutex_t lock;
    pthread_cond_t work;
    job *first, *last;
    job *ended; /* whose owners are to be let go, by who has Python's lock */
    int threads, idle, queued;
} pool;

static pool *pools; /* with Python's lock */

static void run(job *j) {
    if (j->r.state) read_left(&j->r, &j->most);
    else ask_rows(&j->r.p, j->r.rows, j->r.n, j->most.depth);
}

static void *work(void *of) {
    pool *p = of;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->first) {
            p->idle++;
            pthread_cond_wait(&p->work, &p->lock);
            p->idle--;
        }
        job *j = p->first;
        if (!(p->first = j->after)) p->last = NULL;
        p->queued--;
        pthread_mutex_unlock(&p->lock);
        run(j);
        pthread_mutex_lock(&p->lock);
        j->is_over = 1;
        if (j->caller) {
            if (!--j->caller->left) pthread_cond_signal(&j->caller->came);
        } else {
            j->after = p->ended;
            p->ended = j;
        }
    }
    return NULL;
}

/* The threads of this process for a disk: a fork has none of its parent's. NULL: an error is set. */
static pool *pool_of(long long device) {
    const pid_t process = getpid();
    for (pool *p = pools; p; p = p->next)
        if (p->device == device && p->process == process) return p;
    pool *made = calloc(1, sizeof *made);
    if (!made) return (pool *)PyErr_NoMemory();
    made->device = device, made->process = process, made->next = pools;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->work, NULL);
    return pools = made;
}

/* Lets go of owners that nobody waits for. With Python's lock. */
static void let_go(pool *p) {
    pthread_mutex_lock(&p->lock);
    job *j = p->ended;
    p->ended = NULL;
    pthread_mutex_unlock(&p->lock);
    while (j) {
        job *after = j->after;
        Py_DECREF(j->owner);
        free(j);
        j = after;
    }
}

/* Queues a job, and starts a thread where more are queued than threads are idle. Holding the pool's lock. 0: there is no
 * thread at all. */
static int queue(pool *p, job *j) {
    j->after = NULL;
    if (p->last) p->last->after = j;
    else p->first = j;
    p->last = j;
    if (p->idle < ++p->queued && p->threads < THREADS) {
        sigset_t all, before;
        pthread_t made;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
        if (!pthread_create(&made, NULL, work, p)) {
            pthread_detach(made);
            p->threads++;
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_cond_signal(&p->work);
    return p->threads > 0;
}

/* Takes a job that no thread began out of the queue. Holding the pool's lock. 0: one has begun it. */
static int withdraw(pool *p, job *j) {
    job *before = NULL;
    for (job *one = p->first; one; before = one, one = one->after) {
        if (one != j) continue;
        if (before) before->after = j->after;
        else p->first = j->after;
        if (p->last == j) p->last = before;
        p->queued--;
        return 1;
    }
    return 0;
}

/* A job for rows, which it copies. has_out: with room for them, and all of them LEFT. */
static job *make_job(PyObject *owner, const reading *r, const int64_t *rows, int64_t n, int has_out) {
    const size_t rows_bytes = 8 * (size_t)n, out_bytes = has_out ? (size_t)(n * r->p.row_bytes) : 0;
    job *j = malloc(sizeof *j + rows_bytes + (has_out ? out_bytes + (size_t)n + buffer_bytes(&r->p) : 0));
    if (!j) return NULL;
    *j = (job){.r = *r};
    int64_t *own = (int64_t *)(j + 1);
    memcpy(own, rows, rows_bytes);
    j->r.rows = own, j->r.n = n;
    j->r.out = (uint8_t *)own + rows_bytes;
    j->r.state = has_out ? j->r.out + out_bytes : NULL;
    j->r.buffer = has_out ? j->r.state + n : NULL;
    if (has_out) memset(j->r.state, LEFT, (size_t)n);
    Py_INCREF(owner);
    j->owner = owner;
    return j;
}

static void add_ms(struct timespec *at, int64_t ms) {
    at->tv_sec += (time_t)(ms / 1000);
    at->tv_nsec += ms % 1000 * 1000000;
    if (at->tv_nsec >= 1000000000) at->tv_sec++, at->tv_nsec -= 1000000000;
}

static int is_before(const struct timespec *a, const struct timespec *b) {
    return a->tv_sec < b->tv_sec || (a->tv_sec == b->tv_sec && a->tv_nsec < b->tv_nsec);
}

/* Waits until `c` has none left, or wait_ms are over. Holding the pool's lock, without Python's. -1: a signal's handler
 * raised. */
static int wait_for_jobs(pool *p, caller *c, int64_t wait_ms, PyThreadState **thread) {
    struct timespec end, look;
    clock_gettime(CLOCK_MONOTONIC, &look);
    end = look;
    add_ms(&end, wait_ms);
    while (c->left) {
        clock_gettime(CLOCK_MONOTONIC, &look);
        if (wait_ms >= 0 && !is_before(&look, &end)) return 0;
        add_ms(&look, SIGNALS_MS);
        const int is_last = wait_ms >= 0 && is_before(&end, &look);
        if (pthread_cond_timedwait(&c->came, &p->lock, is_last ? &end : &look) != ETIMEDOUT || is_last) continue;
        pthread_mutex_unlock(&p->lock);
        PyEval_RestoreThread(*thread);
        const int raised = PyErr_CheckSignals();
        *thread = PyEval_SaveThread();
        pthread_mutex_lock(&p->lock);
        if (raised) return -1;
    }
    return 0;
}

/* Has a pool's threads run jobs; those that go on without the caller become NULL. -1: a signal's handler raised; -2:
 * there is no thread. */
static int run_jobs(pool *p, job **jobs, int parts, int64_t wait_ms) {
    PyThreadState *thread = PyEval_SaveThread();
    caller c = {.left = parts};
    pthread_condattr_t by;
    pthread_condattr_init(&by);
    pthread_condattr_setclock(&by, CLOCK_MONOTONIC);
    pthread_cond_init(&c.came, &by);
    pthread_condattr_destroy(&by);
    pthread_mutex_lock(&p->lock);
    int came = 0;
    for (int i = 0; i < parts; i++) {
        jobs[i]->caller = &c;
        if (!queue(p, jobs[i])) came = -2;
    }
    if (!came) came = wait_for_jobs(p, &c, wait_ms, &thread);
    for (int i = 0; i < parts; i++) {
        job *j = jobs[i];
        if (j->is_over || withdraw(p, j)) continue;
        j->caller = NULL; /* it ends when the disk lets it, with nobody waiting */
        jobs[i] = NULL;
    }
    pthread_mutex_unlock(&p->lock);
    pthread_cond_destroy(&c.came);
    PyEval_RestoreThread(thread);
    return came;
}

/* Copies what jobs read to where it is wanted, and frees them. at: places in `r` of all their rows. */
static void take(const reading *r, job **jobs, const int64_t *at, int64_t count, int parts) {
    for (int i = 0; i < parts; i++) {
        job *j = jobs[i];
        if (!j) continue;
        const int64_t *places = at + count * i / parts;
        for (int64_t k = 0; j->is_over && k < j->r.n; k++) {
            r->state[places[k]] = j->r.state[k];
            memcpy(r->out + places[k] * r->p.row_bytes, j->r.out + k * r->p.row_bytes, (size_t)r->p.row_bytes);
        }
        Py_DECREF(j->owner);
        free(j);
    }
}

static int read_in_threads(PyObject *owner, pool *p, const reading *r, const limits *most, int parts, int64_t wait_ms) {
    job *jobs[THREADS] = {NULL};
    int64_t count = 0, *at = malloc(16 * (size_t)r->n + 1), *rows = at + r->n;
    int came = at ? 0 : -3;
    for (int64_t i = 0; at && i < r->n; i++)
        if (r->state[i] == LEFT) at[count] = i, rows[count++] = r->rows[i];
    if (parts > count) parts = count ? (int)count : 1;
    for (int i = 0; i < parts && !came; i++) {
        const int64_t from = count * i / parts, to = count * (i + 1) / parts;
        if (!(jobs[i] = make_job(owner, r, rows + from, to - from, 1))) came = -3;
        else jobs[i]->most = *most;
    }
    if (!came) {
        for (int64_t k = 0; k < count; k++) r->state[at[k]] = LATE;
        came = run_jobs(p, jobs, parts, wait_ms);
    }
    take(r, jobs, at, count, parts);
    free(at);
    if (came == -2) PyErr_SetString(PyExc_RuntimeError, "in_threads: no thread can be started");
    if (came == -3) PyErr_NoMemory();
    return came ? -1 : 0;
}

PyObject *py_in_threads(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments a;
    reading r;
    if (!take_arguments("in_threads", ".iiibwwbwwiii", args, n, &a) || !read_arguments(&a, "in_threads", &r))
        return NULL;
    const int64_t parts = a.n[1], wait_ms = a.n[2];
    const limits most = {a.n[3], a.n[4], a.n[5]};
    const int is_sound = parts >= 1 && wait_ms >= -1 && most.depth >= 0 && most.patience >= 0 && most.all >= 0;
    if (!is_sound) PyErr_SetString(PyExc_ValueError, "in_threads: a limit is negative, or there is no part");
    pool *p = is_sound ? pool_of(a.n[0]) : NULL;
    if (p) let_go(p);
    const int came = p ? read_in_threads(args[0], p, &r, &most, parts < THREADS ? (int)parts : THREADS, wait_ms) : -1;
    release(&a);
    if (came) return NULL;
    Py_RETURN_NONE;
}

PyObject *py_ask(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments a;
    reading r = {0};
    int64_t bytes;
    if (!take_arguments("ask", ".ibbi", args, n, &a)) return NULL;
    const Py_buffer *b = a.b;
    const int is_table = is_place(b, &r.p) && b[1].len % 8 == 0 && r.p.row_bytes >= 1 && r.p.rows >= 1
                         && !__builtin_mul_overflow(r.p.rows, r.p.row_bytes, &bytes);
    if (!is_table) PyErr_SetString(PyExc_ValueError, "ask: rows do not fit this table");
    pool *p = is_table ? pool_of(a.n[0]) : NULL;
    job *j = p ? make_job(args[0], &r, b[1].buf, b[1].len / 8, 0) : NULL;
    release(&a);
    if (!p) return NULL;
    if (!j) return PyErr_NoMemory();
    j->most.depth = a.n[1];
    let_go(p);
    pthread_mutex_lock(&p->lock);
    queue(p, j);
    pthread_mutex_unlock(&p->lock);
    Py_RETURN_NONE;
}
