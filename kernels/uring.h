/* A ring of io_uring for one drive or several; offload/io/io_uring.py binds it.
 *
 * Every function returns 0 or more, or -errno, and never aborts. -ENOSYS: built or run without io_uring. -EBADF:
 * the ring is closed. -ECHILD: this is a forked child, which has no part in its parent's ring and may only close it.
 * Any thread may submit and register at any time; one at a time waits. */
#ifndef OFFLOAD_URING_H
#define OFFLOAD_URING_H

#include <stdint.h>

enum { OFFLOAD_RING_READ = 0, OFFLOAD_RING_WRITE = 1, OFFLOAD_RING_FDATASYNC = 2, OFFLOAD_RING_NOP = 3 };

struct offload_ring;

/* No padding: io_uring.py packs the fields one after the other. */
struct offload_ring_request {
    uint32_t op;
    int32_t fd;
    int32_t buffer_index; /* place in the list given to offload_ring_register_buffers, or -1 */
    uint32_t length;      /* bytes; the kernel cuts at 2^31 - 4096 */
    uint64_t address;     /* of the memory; inside that buffer if there is one */
    uint64_t offset;      /* in the file, bytes */
    uint64_t user_data;   /* comes back with the completion */
};

struct offload_ring_completion {
    uint64_t user_data;
    int64_t result; /* bytes, or -errno */
};

/* Room for at least `entries` requests in one batch, and twice as many under way, up to the kernel's limits. `without`:
 * features of this kernel (IORING_FEAT_*) to do without, as on an older one. */
int offload_ring_open(unsigned entries, unsigned without, struct offload_ring **ring);

/* Frees descriptor, mappings and what is registered. -EBUSY while a thread waits or anything is under way: a transfer
 * would go on into memory that its owner believes to be free. May be called again. */
int offload_ring_close(struct offload_ring *ring);

/* Frees the rest of a closed ring: apart from close, so that a late call from another thread finds it closed. */
int offload_ring_free(struct offload_ring *ring);

/* How many requests one batch may hold. */
int offload_ring_entries(struct offload_ring *ring);

/* Pins the buffers, each at most 1 GiB, in place of those registered before. An error, such as -ENOMEM over
 * RLIMIT_MEMLOCK, leaves none registered. -EOPNOTSUPP before Linux 5.13 (IORING_FEAT_RSRC_TAGS): there it would wait for
 * the thread that waits. */
int offload_ring_register_buffers(struct offload_ring *ring, const uint64_t *addresses, const uint64_t *lengths, int n);

/* How many of the n were taken, from the first on; each of those gets one completion. Fewer when the ring is full:
 * submit the others after a completion. 0 only while something is under way. */
int offload_ring_submit(struct offload_ring *ring, const struct offload_ring_request *requests, int n);

/* Sleeps until there is a completion, then takes up to `max`. -EINTR when a signal came first: the caller may want
 * to handle it before waiting again. -EBUSY: another thread waits. */
int offload_ring_wait(struct offload_ring *ring, struct offload_ring_completion *completions, int max);

#endif
