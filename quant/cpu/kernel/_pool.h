/* Parked helper threads, so that a call of some 10 µs can be shared. run_parts(parts, threads, function,
 * argument) calls function(argument, part) for each part, on the caller and helpers, and returns when all
 * are done. Thread-safe. Helpers start on first use, block signals, and start anew after a fork. A caller
 * spins for about 20 us before it sleeps: waking takes as long. */
#ifndef POOL_H
#define POOL_H
#include <pthread.h>
#include <signal.h>

enum { MAX_THREADS = 64, LOOKS = 1000 };
typedef void part_function(const void *argument, int part);
typedef struct task {
    part_function *function;
    const void *argument;
    int parts, next, left;
    struct task *after;
} task;

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pool_has_task = PTHREAD_COND_INITIALIZER, pool_task_done = PTHREAD_COND_INITIALIZER;
static task *pool_tasks; /* those with parts that nobody has taken */
static int pool_helpers;

/* With the lock held: takes a part of `t`, runs it without the lock. */
static void run_part(task *t) {
    int part = t->next++;
    if (t->next == t->parts) {
        task **link = &pool_tasks;
        while (*link != t) link = &(*link)->after;
        *link = t->after;
    }
    pthread_mutex_unlock(&pool_lock);
    t->function(t->argument, part);
    pthread_mutex_lock(&pool_lock);
    if (__atomic_sub_fetch(&t->left, 1, __ATOMIC_RELEASE) == 0) pthread_cond_broadcast(&pool_task_done);
}

/* Without the lock: waits a moment for the parts that others have taken. */
static void look_whether_done(const task *t) {
    for (int n = 0; n < LOOKS && __atomic_load_n(&t->left, __ATOMIC_ACQUIRE); n++)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        ;
#endif
}

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool_lock);
    for (;;) {
        while (!pool_tasks) pthread_cond_wait(&pool_has_task, &pool_lock);
        run_part(pool_tasks);
    }
}

/* With the lock held. Fewer helpers than wanted: the caller does their parts. */
static void need_helpers(int wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool_helpers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL)) break;
        pthread_detach(thread);
        pool_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void run_parts(int parts, int threads, part_function *function, const void *argument) {
    if (parts == 1 || threads == 1) {
        for (int part = 0; part < parts; part++) function(argument, part);
        return;
    }
    if (threads > parts) threads = parts;
    task t = {function, argument, parts, 0, parts, NULL};
    pthread_mutex_lock(&pool_lock);
    need_helpers(threads - 1);
    t.after = pool_tasks;
    pool_tasks = &t;
    for (int n = 1; n < threads; n++) pthread_cond_signal(&pool_has_task);
    while (t.next < t.parts) run_part(&t);
    if (t.left) {
        pthread_mutex_unlock(&pool_lock);
        look_whether_done(&t);
        pthread_mutex_lock(&pool_lock);
    }
    while (t.left) pthread_cond_wait(&pool_task_done, &pool_lock);
    pthread_mutex_unlock(&pool_lock);
}

/* A fork holds the lock, so the child finds it free and the tasks whole; it has no helpers. */
static void before_fork(void) { pthread_mutex_lock(&pool_lock); }
static void parent_after_fork(void) { pthread_mutex_unlock(&pool_lock); }
static void child_after_fork(void) {
    pool_tasks = NULL;
    pool_helpers = 0;
    pthread_cond_init(&pool_has_task, NULL);
    pthread_cond_init(&pool_task_done, NULL);
    pthread_mutex_init(&pool_lock, NULL);
}
static void open_pool(void) { pthread_atfork(before_fork, parent_after_fork, child_after_fork); }
#endif
