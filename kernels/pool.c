#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "kernels.h"

/* A call in the queue. It leaves the queue when its last piece is taken, and is freed when all have ended. */
struct queued {
    offload_kernel *kernel;
    void *const *tensors;
    const int32_t *types;
    const void *scalars;
    int64_t at, high, piece; /* the next piece begins at `at` */
    int running;             /* pieces that were taken and have not ended */
    struct offload_group *group;
    struct queued *next;
};

struct offload_pool {
    pthread_mutex_t lock; /* of all below, of the queue, and of all groups */
    pthread_cond_t added, ended;
    struct queued *first, **last;
    pthread_t *threads;
    int workers, is_closed;
};

/* The first queued call of a group, else of any; NULL if the queue is empty. */
static struct queued *find(struct offload_pool *pool, const struct offload_group *group) {
    for (struct queued *one = pool->first; group && one; one = one->next)
        if (one->group == group) return one;
    return pool->first;
}

static void leave_queue(struct offload_pool *pool, struct queued *one) {
    struct queued **link = &pool->first;
    while (*link != one) link = &(*link)->next;
    *link = one->next;
    if (pool->last == &one->next) pool->last = link;
}

/* Takes a piece of a queued call and runs it. The lock is held before and after. */
static void run_piece(struct offload_pool *pool, struct queued *one) {
    int64_t low = one->at, high = (low / one->piece + 1) * one->piece;
    if (high > one->high) high = one->high;
    one->at = high;
    one->running++;
    if (high == one->high) leave_queue(pool, one);
    pthread_mutex_unlock(&pool->lock);
    one->kernel(one->tensors, one->types, low, high - low, one->scalars);
    pthread_mutex_lock(&pool->lock);
    if (--one->running || one->at < one->high) return;
    one->group->left--;
    free(one);
    pthread_cond_broadcast(&pool->ended);
}

static void *work(void *argument) {
    struct offload_pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct queued *one = find(pool, 0);
        if (one) run_piece(pool, one);
        else if (pool->is_closed) break;
        else pthread_cond_wait(&pool->added, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

static int start(struct offload_pool *pool, int workers) {
    pthread_attr_t small;
    sigset_t all, before;
    int error = pthread_attr_init(&small);
    if (error) return -error;
    pthread_attr_setstacksize(&small, 1 << 20); /* a limit of address space may be set, and kernels need little */
    /* Signals are for the threads of the program: one that came here would wake none of them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (!error && pool->workers < workers) {
        error = pthread_create(&pool->threads[pool->workers], &small, work, pool);
        if (error) break;
#if defined(__linux__)
        pthread_setname_np(pool->threads[pool->workers], "offload-kernel");
#endif
        pool->workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    pthread_attr_destroy(&small);
    return -error;
}

OFFLOAD_EXPORT int offload_pool_open(int workers, struct offload_pool **made) {
    struct offload_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return -ENOMEM;
    pool->threads = calloc((size_t)workers, sizeof *pool->threads);
    pool->last = &pool->first;
    pthread_mutex_init(&pool->lock, 0);
    pthread_cond_init(&pool->added, 0);
    pthread_cond_init(&pool->ended, 0);
    int error = pool->threads ? start(pool, workers) : -ENOMEM;
    if (error) {
        offload_pool_close(pool);
        offload_pool_free(pool);
        return error;
    }
    *made = pool;
    return 0;
}

OFFLOAD_EXPORT void offload_pool_run(
    struct offload_pool *pool, struct offload_group *group, offload_kernel *kernel, void *const *tensors,
    const int32_t *types, const void *scalars, int64_t low, int64_t high, int64_t piece, int64_t most) {
    struct queued *added = kernel ? malloc(sizeof *added) : 0;
    if (kernel && !added) kernel(tensors, types, low, high - low, scalars); /* no memory for a queue: without one */
    pthread_mutex_lock(&pool->lock);
    if (added) {
        *added = (struct queued){
            .kernel = kernel, .tensors = tensors, .types = types, .scalars = scalars,
            .at = low, .high = high, .piece = piece, .group = group,
        };
        *pool->last = added;
        pool->last = &added->next;
        group->left++;
        pthread_cond_broadcast(&pool->added);
    }
    while (group->left > most) {
        struct queued *one = find(pool, group);
        if (one) run_piece(pool, one);
        else pthread_cond_wait(&pool->ended, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}

OFFLOAD_EXPORT void offload_pool_close(struct offload_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    int workers = pool->is_closed ? 0 : pool->workers;
    pool->is_closed = 1;
    pthread_cond_broadcast(&pool->added);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < workers; i++) pthread_join(pool->threads[i], 0);
}

OFFLOAD_EXPORT void offload_pool_free(struct offload_pool *pool) {
    pthread_cond_destroy(&pool->ended);
    pthread_cond_destroy(&pool->added);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    free(pool);
}
