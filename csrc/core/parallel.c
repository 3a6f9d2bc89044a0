/* A small thread pool. Not OpenMP: torch has its own OpenMP runtime, two runtimes oversubscribe the CPU, and libgomp
 * hangs in a forked child. Workers sleep between jobs, the caller works too, and a forked child starts its own pool. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* sched_getaffinity */
#endif
#include "internal.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_THREADS 256

typedef struct {
    void (*task)(void *context, int64_t i, int32_t worker);
    void *context;
    int64_t n;
    int32_t workers; /* pool threads that may join, not counting the caller; 0: the job is over */
} job;

static struct {
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t start, done;
    job current;
    uint64_t generation;      /* of the current job */
    int32_t started, running; /* pool threads in all; those at work on the current job */
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .start = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t job_mutex = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static atomic_llong next_task;
static atomic_int configured_threads; /* 0: not yet known; -1: the environment variable is invalid */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/* Threads do not survive a fork, and the parent may have held a lock: the child begins afresh. */
static void reset_in_child(void)
{
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_mutex_init(&job_mutex, NULL);
    pthread_cond_init(&pool.start, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.started = pool.running = 0;
    pool.generation = 0;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, reset_in_child); }

static void run_tasks(const job *j, int32_t worker)
{
    for (int64_t i; (i = atomic_fetch_add(&next_task, 1)) < j->n;) j->task(j->context, i, worker);
}

static void *worker_main(void *argument)
{
    int32_t worker = (int32_t)(intptr_t)argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        while (pool.generation == seen) pthread_cond_wait(&pool.start, &pool.mutex);
        seen = pool.generation;
        if (worker > pool.current.workers) continue;
        job j = pool.current;
        pool.running++;
        pthread_mutex_unlock(&pool.mutex);
        run_tasks(&j, worker);
        pthread_mutex_lock(&pool.mutex);
        if (--pool.running == 0) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

/** Starts pool threads until there are `wanted`; returns how many there are. pool.mutex is held. */
static int32_t start_workers(int32_t wanted)
{
    while (pool.started < wanted) {
        pthread_t thread;
        pthread_attr_t attributes;
        if (pthread_attr_init(&attributes)) break;
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &attributes, worker_main, (void *)(intptr_t)(pool.started + 1));
        pthread_attr_destroy(&attributes);
        if (failed) break;
        pool.started++;
    }
    return pool.started < wanted ? pool.started : wanted;
}

void tq_parallel(int64_t n, int32_t threads, void (*task)(void *context, int64_t i, int32_t worker), void *context)
{
    threads = tq_effective_threads(threads);
    if (n < threads) threads = (int32_t)n;
    pthread_once(&fork_once, watch_forks); /* before a lock is held */
    /* If another job is running, doing this one alone is faster than waiting, and cannot deadlock in nested calls. */
    if (threads <= 1 || pthread_mutex_trylock(&job_mutex)) {
        for (int64_t i = 0; i < n; i++) task(context, i, 0);
        return;
    }
    pthread_mutex_lock(&pool.mutex);
    job j = {task, context, n, start_workers(threads - 1)};
    atomic_store(&next_task, 0);
    pool.current = j;
    pool.generation++;
    pthread_cond_broadcast(&pool.start);
    pthread_mutex_unlock(&pool.mutex);
    run_tasks(&j, 0);
    pthread_mutex_lock(&pool.mutex);
    /* No task is left. Do not wait for threads that have not woken yet on a busy machine. */
    pool.current.workers = 0;
    while (pool.running) pthread_cond_wait(&pool.done, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
    pthread_mutex_unlock(&job_mutex);
}

/** Returns the default number of threads, or -1 if TURBOQUANT_NUM_THREADS is no number of threads. */
static int32_t default_threads(void)
{
    const char *text = getenv("TURBOQUANT_NUM_THREADS");
    char *end = NULL;
    cpu_set_t cpus;
    long n = text && *text ? strtol(text, &end, 10) : 0;
    if (end) return *end || n < 1 || n > MAX_THREADS ? -1 : (int32_t)n;
    n = sched_getaffinity(0, sizeof cpus, &cpus) ? sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&cpus);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (int32_t)n;
}

int32_t tq_num_threads(void)
{
    int n = atomic_load(&configured_threads);
    if (!n) atomic_store(&configured_threads, n = default_threads());
    return n < 0 ? 0 : n;
}

tq_status tq_set_num_threads(int32_t n, tq_error *error)
{
    if (n < 1 || n > MAX_THREADS) return tq_refuse(error, "n", n, "in 1..256");
    atomic_store(&configured_threads, n);
    return TQ_OK;
}

int32_t tq_effective_threads(int32_t requested)
{
    int32_t most = tq_num_threads();
    if (most < 1) return 1; /* the call will fail */
    return requested > 0 && requested < most ? requested : most;
}

int32_t tq_threads_for(int32_t requested, int64_t work, int64_t least)
{
    int32_t threads = requested <= 0 ? tq_num_threads() : requested < MAX_THREADS ? requested : MAX_THREADS;
    int64_t useful = work / least > 1 ? work / least : 1;
    return threads < 1 ? 1 : useful < threads ? (int32_t)useful : threads;
}
