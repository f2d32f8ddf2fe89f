/* Threads that share the range of a kernel; offload/native/pool.py binds them.
 *
 * They never ask for Python's lock. Threads of Python need it before and after each piece: with fourteen of them a sum
 * over 8 MB took longer than in one, and who launches a device's kernels waited behind them.
 *
 * Any thread may call any function but free at any time. In a forked child a pool has no threads: make another. */
#ifndef OFFLOAD_POOL_H
#define OFFLOAD_POOL_H

#include <stdint.h>

/* A kernel, as kernels.h has it. */
typedef void offload_kernel(void *const *tensors, const int32_t *types, int64_t first, int64_t n, const void *scalars);

/* Of one caller: how many of its calls have not ended. 0 at first; nobody else writes to it. */
struct offload_group {
    int64_t left;
};

struct offload_pool;

/* Starts `workers` threads, or none: -EAGAIN if the system refuses one, -ENOMEM. */
int offload_pool_open(int workers, struct offload_pool **pool);

/* Adds a call of `kernel` on the positions low .. high, unless it is NULL. A thread takes the positions between two
 * multiples of `piece` at once. What the arguments point to has to stay until the call has ended.
 *
 * Then works on what there is, first on what the group waits for, until at most `most` of the group's calls have not
 * ended. The caller sees what the others have written. */
void offload_pool_run(
    struct offload_pool *pool, struct offload_group *group, offload_kernel *kernel, void *const *tensors,
    const int32_t *types, const void *scalars, int64_t low, int64_t high, int64_t piece, int64_t most);

/* Ends the threads when no call is left. May be called again. A call that comes later runs in its caller. */
void offload_pool_close(struct offload_pool *pool);

/* Frees a closed pool, which nobody uses any more. */
void offload_pool_free(struct offload_pool *pool);

#endif
