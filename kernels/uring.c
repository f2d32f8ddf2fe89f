/* io_uring through its three system calls; uring.h is the contract.
 *
 * The rings are memory shared with the kernel. Of the submission ring we write the tail and the kernel the head, of
 * the completion ring the other way round; who writes an index releases what lies before it, who reads the other's
 * acquires. Without SQPOLL the kernel looks at the submission ring only inside io_uring_enter. */
#define _GNU_SOURCE
#include "uring.h"

#include "kernels.h"

#include <errno.h>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif
#endif

/* Headers from 5.7 on know every operation used here. */
#if defined(IORING_FEAT_FAST_POLL) && defined(__NR_io_uring_setup)

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

/* Newer than the oldest header; a kernel without them says EINVAL. */
#ifndef IORING_SETUP_SUBMIT_ALL
#define IORING_SETUP_SUBMIT_ALL (1U << 7)
#endif

#ifndef IORING_FEAT_RSRC_TAGS
#define IORING_FEAT_RSRC_TAGS (1U << 10)
#endif

/* READ and WRITE came with RW_CUR_POS (5.6); with NODROP a full completion ring loses nothing. */
#define NEEDED (IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS)

enum { IDLE, WAITED_ON, CLOSED };

struct offload_ring {
    int fd;
    pid_t pid;
    int state;             /* IDLE, WAITED_ON, CLOSED: changed by compare-and-swap */
    unsigned under_way;    /* taken, and not handed out by wait yet */
    pthread_mutex_t mutex; /* for all below but the completion ring, which is the waiting thread's */
    unsigned features, entries, most_under_way;
    unsigned *sq_head, *sq_tail, sq_mask;
    unsigned *cq_head, *cq_tail, cq_mask;
    struct io_uring_cqe *cqes;
    struct io_uring_sqe *sqes;
    void *rings;
    size_t rings_bytes, sqes_bytes;
    int has_buffers;
};

static int result(long returned) { return returned < 0 ? -errno : (int)returned; }

static int ring_setup(unsigned entries, struct io_uring_params *p) {
    return result(syscall(__NR_io_uring_setup, entries, p));
}

static int ring_enter(int fd, unsigned submit, unsigned complete, unsigned flags) {
    return result(syscall(__NR_io_uring_enter, fd, submit, complete, flags, (void *)0, (size_t)0));
}

static int ring_register(int fd, unsigned what, const void *argument, unsigned n) {
    return result(syscall(__NR_io_uring_register, fd, what, argument, n));
}

static int unusable(struct offload_ring *ring) {
    if (ring->pid != getpid()) return -ECHILD;
    return __atomic_load_n(&ring->state, __ATOMIC_SEQ_CST) == CLOSED ? -EBADF : 0;
}

static int become(struct offload_ring *ring, int from, int to) {
    return __atomic_compare_exchange_n(&ring->state, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void unmap(struct offload_ring *ring) {
    if (ring->rings != MAP_FAILED) munmap(ring->rings, ring->rings_bytes);
    if (ring->sqes != MAP_FAILED) munmap(ring->sqes, ring->sqes_bytes);
}

static int map(struct offload_ring *ring, const struct io_uring_params *p) {
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    size_t sq_bytes = p->sq_off.array + p->sq_entries * sizeof(unsigned);
    size_t cq_bytes = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    ring->rings_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->sqes_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    ring->sqes = MAP_FAILED;
    ring->rings = mmap(0, ring->rings_bytes, protection, flags, ring->fd, IORING_OFF_SQ_RING);
    if (ring->rings != MAP_FAILED)
        ring->sqes = mmap(0, ring->sqes_bytes, protection, flags, ring->fd, IORING_OFF_SQES);
    if (ring->sqes == MAP_FAILED) {
        int error = -errno;
        unmap(ring);
        return error;
    }
    /* A child that wrote here would write into its parent's ring. */
    madvise(ring->rings, ring->rings_bytes, MADV_DONTFORK);
    madvise(ring->sqes, ring->sqes_bytes, MADV_DONTFORK);

    char *base = ring->rings;
    ring->sq_head = (unsigned *)(base + p->sq_off.head);
    ring->sq_tail = (unsigned *)(base + p->sq_off.tail);
    ring->sq_mask = *(unsigned *)(base + p->sq_off.ring_mask);
    ring->cq_head = (unsigned *)(base + p->cq_off.head);
    ring->cq_tail = (unsigned *)(base + p->cq_off.tail);
    ring->cq_mask = *(unsigned *)(base + p->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(base + p->cq_off.cqes);
    unsigned *array = (unsigned *)(base + p->sq_off.array);
    for (unsigned i = 0; i < p->sq_entries; i++) array[i] = i; /* once: entry i is always at place i */
    return 0;
}

OFFLOAD_EXPORT int offload_ring_open(unsigned entries, unsigned without, struct offload_ring **out) {
    /* No COOP_TASKRUN: a completion is finished by the thread that submitted it, and with that flag one that computes
     * keeps it back until its next system call or clock tick. No SINGLE_ISSUER: any thread may submit. */
    static const unsigned preferred[] = {IORING_SETUP_CLAMP | IORING_SETUP_SUBMIT_ALL, IORING_SETUP_CLAMP};
    struct io_uring_params p;
    *out = 0;
    int fd = -EINVAL;
    for (unsigned i = 0; fd == -EINVAL && i < sizeof preferred / sizeof *preferred; i++) {
        memset(&p, 0, sizeof p);
        p.flags = preferred[i];
        fd = ring_setup(entries, &p);
    }
    if (fd < 0) return fd;
    unsigned features = p.features & ~without;
    struct offload_ring *ring = (features & NEEDED) == NEEDED ? calloc(1, sizeof *ring) : 0;
    if (!ring) {
        close(fd);
        return (features & NEEDED) == NEEDED ? -ENOMEM : -ENOSYS;
    }
    ring->features = features;
    ring->fd = fd;
    ring->pid = getpid();
    ring->entries = p.sq_entries;
    ring->most_under_way = p.cq_entries; /* so that the completion ring never overflows */
    pthread_mutex_init(&ring->mutex, 0);
    int error = map(ring, &p);
    if (error) {
        close(fd);
        free(ring);
        return error;
    }
    *out = ring;
    return 0;
}

OFFLOAD_EXPORT int offload_ring_close(struct offload_ring *ring) {
    int pid = getpid();
    if (ring->pid != pid) {
        /* The child's copy of the descriptor would keep the ring, and the files and locks in it, alive. The mappings
         * are not here, and the mutex may be held by a thread that is not. */
        if (ring->fd >= 0) close(ring->fd);
        ring->fd = -1;
        return 0;
    }
    int error = 0;
    pthread_mutex_lock(&ring->mutex);
    if (unusable(ring)) {
        /* closed before */
    } else if (__atomic_load_n(&ring->under_way, __ATOMIC_SEQ_CST) || !become(ring, IDLE, CLOSED)) {
        error = -EBUSY;
    } else {
        /* The kernel tears a ring down some time after the last close. Pinned memory is given back before. */
        if (ring->has_buffers) ring_register(ring->fd, IORING_UNREGISTER_BUFFERS, 0, 0);
        unmap(ring);
        close(ring->fd);
        ring->fd = -1;
    }
    pthread_mutex_unlock(&ring->mutex);
    return error;
}

OFFLOAD_EXPORT int offload_ring_free(struct offload_ring *ring) {
    free(ring);
    return 0;
}

OFFLOAD_EXPORT int offload_ring_entries(struct offload_ring *ring) { return (int)ring->entries; }

OFFLOAD_EXPORT int offload_ring_register_buffers(struct offload_ring *ring, const uint64_t *addresses,
                                                 const uint64_t *lengths, int n) {
    int error = unusable(ring);
    if (error) return error;
    if (n < 0) return -EINVAL;
    /* Before 5.13 the kernel first waits until nobody is in the ring, which the waiting thread does not leave. */
    if (!(ring->features & IORING_FEAT_RSRC_TAGS)) return -EOPNOTSUPP;
    struct iovec *vectors = calloc((size_t)n + 1, sizeof *vectors);
    if (!vectors) return -ENOMEM;
    for (int i = 0; i < n; i++) {
        vectors[i].iov_base = (void *)(uintptr_t)addresses[i];
        vectors[i].iov_len = (size_t)lengths[i];
    }
    pthread_mutex_lock(&ring->mutex);
    error = unusable(ring);
    if (!error && ring->has_buffers) {
        error = ring_register(ring->fd, IORING_UNREGISTER_BUFFERS, 0, 0);
        ring->has_buffers = error < 0;
    }
    if (error >= 0 && n) {
        error = ring_register(ring->fd, IORING_REGISTER_BUFFERS, vectors, (unsigned)n);
        ring->has_buffers = error >= 0;
    }
    pthread_mutex_unlock(&ring->mutex);
    free(vectors);
    return error < 0 ? error : 0;
}

/* 0, or -EINVAL for an unknown operation. */
static int fill(struct io_uring_sqe *sqe, const struct offload_ring_request *r) {
    memset(sqe, 0, sizeof *sqe);
    int fixed = r->buffer_index >= 0;
    switch (r->op) {
    case OFFLOAD_RING_READ: sqe->opcode = fixed ? IORING_OP_READ_FIXED : IORING_OP_READ; break;
    case OFFLOAD_RING_WRITE: sqe->opcode = fixed ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE; break;
    case OFFLOAD_RING_FDATASYNC: sqe->opcode = IORING_OP_FSYNC; break;
    case OFFLOAD_RING_NOP: sqe->opcode = IORING_OP_NOP; break;
    default: return -EINVAL;
    }
    sqe->user_data = r->user_data;
    if (r->op == OFFLOAD_RING_NOP) return 0;
    sqe->fd = r->fd;
    if (r->op == OFFLOAD_RING_FDATASYNC) {
        sqe->fsync_flags = IORING_FSYNC_DATASYNC;
        return 0;
    }
    sqe->addr = r->address;
    sqe->len = r->length;
    sqe->off = r->offset;
    if (fixed) sqe->buf_index = (uint16_t)r->buffer_index;
    return 0;
}

/* Enters the kernel until it has taken the `filled` entries in the ring, or says that it cannot now. How many it took,
 * or -errno if none. The mutex is held. */
static int enter_filled(struct offload_ring *ring, unsigned filled) {
    unsigned taken = 0;
    int error = 0;
    while (taken < filled) {
        int count = ring_enter(ring->fd, filled - taken, 0, 0);
        if (count == -EINTR) continue;
        if (count <= 0) {
            error = count ? count : -EAGAIN;
            break;
        }
        taken += (unsigned)count;
    }
    return taken ? (int)taken : error;
}

OFFLOAD_EXPORT int offload_ring_submit(struct offload_ring *ring, const struct offload_ring_request *requests, int n) {
    int taken = unusable(ring);
    if (taken) return taken;
    pthread_mutex_lock(&ring->mutex);
    taken = unusable(ring);
    if (taken) {
        pthread_mutex_unlock(&ring->mutex);
        return taken;
    }
    /* Nothing is left in the ring between two calls: it is empty, and head is tail. */
    unsigned tail = *ring->sq_tail, under_way = __atomic_load_n(&ring->under_way, __ATOMIC_ACQUIRE);
    unsigned room = ring->most_under_way - under_way, filled = 0;
    if (room > ring->entries) room = ring->entries;
    while (filled < room && (int)filled < n && !taken) {
        taken = fill(&ring->sqes[(tail + filled) & ring->sq_mask], &requests[filled]);
        filled += !taken;
    }
    if (filled) {
        /* Counted before the kernel sees them: a completion may be handed out before this call is back. */
        __atomic_add_fetch(&ring->under_way, filled, __ATOMIC_ACQ_REL);
        __atomic_store_n(ring->sq_tail, tail + filled, __ATOMIC_RELEASE);
        taken = enter_filled(ring, filled);
        unsigned left = filled - (taken > 0 ? (unsigned)taken : 0);
        if (left) {
            /* Not taken: taken back, which only works because the kernel looks at the ring in enter alone. */
            __atomic_store_n(ring->sq_tail, tail + filled - left, __ATOMIC_RELEASE);
            under_way = __atomic_sub_fetch(&ring->under_way, left, __ATOMIC_ACQ_REL);
            if ((taken == -EAGAIN || taken == -EBUSY) && under_way) taken = 0;
        }
    }
    pthread_mutex_unlock(&ring->mutex);
    return taken;
}

OFFLOAD_EXPORT int offload_ring_wait(struct offload_ring *ring, struct offload_ring_completion *out, int max) {
    int error = unusable(ring);
    if (error) return error;
    if (max <= 0) return -EINVAL;
    if (!become(ring, IDLE, WAITED_ON)) {
        error = unusable(ring);
        return error ? error : -EBUSY;
    }
    unsigned head = *ring->cq_head, count = 0;
    while (!count && error >= 0) {
        unsigned ready = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) - head;
        for (; count < ready && (int)count < max; count++) {
            const struct io_uring_cqe *cqe = &ring->cqes[(head + count) & ring->cq_mask];
            out[count].user_data = cqe->user_data;
            out[count].result = cqe->res;
        }
        if (!count) error = ring_enter(ring->fd, 0, 1, IORING_ENTER_GETEVENTS);
    }
    if (count) {
        __atomic_store_n(ring->cq_head, head + count, __ATOMIC_RELEASE);
        __atomic_sub_fetch(&ring->under_way, count, __ATOMIC_ACQ_REL);
    }
    become(ring, WAITED_ON, IDLE);
    return count ? (int)count : error;
}

#else /* no io_uring where this was compiled */

OFFLOAD_EXPORT int offload_ring_open(unsigned entries, unsigned without, struct offload_ring **ring) {
    (void)entries;
    (void)without;
    *ring = 0;
    return -ENOSYS;
}
OFFLOAD_EXPORT int offload_ring_close(struct offload_ring *ring) { return (void)ring, -ENOSYS; }
OFFLOAD_EXPORT int offload_ring_free(struct offload_ring *ring) { return (void)ring, -ENOSYS; }
OFFLOAD_EXPORT int offload_ring_entries(struct offload_ring *ring) { return (void)ring, -ENOSYS; }
OFFLOAD_EXPORT int offload_ring_register_buffers(struct offload_ring *ring, const uint64_t *addresses,
                                                 const uint64_t *lengths, int n) {
    return (void)ring, (void)addresses, (void)lengths, (void)n, -ENOSYS;
}
OFFLOAD_EXPORT int offload_ring_submit(struct offload_ring *ring, const struct offload_ring_request *requests, int n) {
    return (void)ring, (void)requests, (void)n, -ENOSYS;
}
OFFLOAD_EXPORT int offload_ring_wait(struct offload_ring *ring, struct offload_ring_completion *completions, int max) {
    return (void)ring, (void)completions, (void)max, -ENOSYS;
}

#endif
