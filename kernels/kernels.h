/* What the library exports, and what every kernel shares.
 *
 * One symbol a kernel and variant: offload_<kernel>_<variant>. All have the same parameters, so that one binding calls
 * them all; which tensors and scalars a kernel takes, its row in offload/native/table.py says. A kernel takes a range and
 * starts no threads; offload/native/ splits. Element types are numbers so that one symbol takes them all. */
#ifndef OFFLOAD_KERNELS_H
#define OFFLOAD_KERNELS_H

#include <stdint.h>

enum {
    OFFLOAD_F32 = 0,
    OFFLOAD_BF16 = 1,
    OFFLOAD_F16 = 2,
    OFFLOAD_NONE = 3, /* of a tensor that was not given */
    OFFLOAD_I16 = 4,
    OFFLOAD_F64 = 5,
    OFFLOAD_U8 = 6
};

/* The parameters of every kernel, which is defined by KERNEL (vec.h).
 *
 *   tensors   where the element at position 0 of each tensor is, or would be; NULL: not given
 *   types     of each tensor's elements
 *   first, n  the range: positions first .. first+n. A tensor with an element for each block of positions has one for
 *             each block that the range touches; a range starts at a block's edge, or where the tensors do
 *   scalars   the row's structure, or NULL */
#define OFFLOAD_UNUSED __attribute__((unused))
#define OFFLOAD_PARAMETERS                                                                           \
    void *const *tensors, OFFLOAD_UNUSED const int32_t *types, int64_t first, int64_t n, \
        OFFLOAD_UNUSED const void *scalars

/* Positions at which a sum of squares is cut, whatever the range asked for. */
#define OFFLOAD_SUM_BLOCK 65536

/* Adam's scalars: computed in double by the caller, rounded once to fp32 (offload/native/table.py: AdamScalars). */
struct offload_adam_scalars {
    float scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2;
    float neg_step_size, sqrt_bias_correction2, eps;
    int32_t add_decay; /* 1: g += weight_decay * p (Adam); 0: p *= decay (AdamW, or no decay: 1.0) */
};

/* Of a step with moments of one or two bytes: so many positions share the bits that round, and a scale. */
#define OFFLOAD_DITHER_BLOCK 64

struct offload_dithered_scalars {
    struct offload_adam_scalars adam;
    int64_t step; /* of the parameters, from 1 */
};

/* Of what this file, pool.h and uring.h declare; counted up when a kernel, a structure or an order of sums changes. A library of
 * another number is refused (offload/native/library.py). */
#define OFFLOAD_ABI 6

/* Elements that adam.c, adam_split.c and limit.c prefetch ahead, see offload_prefetch: one distance, so
 * that the limit is that of this traffic. It changes no bit. */
extern int64_t offload_ahead;

#define OFFLOAD_EXPORT __attribute__((visibility("default")))

/* A variant's code lies in a section of its own, so that a test can read from the finished library
 * that no instruction strays into another's. */
#define OFFLOAD_TEXT2(variant) "offload_" #variant
#define OFFLOAD_TEXT(variant) OFFLOAD_TEXT2(variant)
#if defined(__ELF__)
#define OFFLOAD_CODE __attribute__((section(OFFLOAD_TEXT(OFFLOAD_VARIANT)), noinline))
#else
#define OFFLOAD_CODE __attribute__((noinline))
#endif

#define OFFLOAD_JOIN2(kernel, variant) offload_##kernel##_##variant
#define OFFLOAD_JOIN(kernel, variant) OFFLOAD_JOIN2(kernel, variant)
#define OFFLOAD_KERNEL(kernel) OFFLOAD_JOIN(kernel, OFFLOAD_VARIANT)

#endif
