/* What the library exports, and what every kernel shares.
 *
 * One symbol a kernel and variant: offload_<kernel>_<variant>. A kernel takes ranges and starts no
 * threads; offload/native/ splits. Element types are numbers so that one symbol takes them all. */
#ifndef OFFLOAD_KERNELS_H
#define OFFLOAD_KERNELS_H

#include <stdint.h>

enum { OFFLOAD_F32 = 0, OFFLOAD_BF16 = 1, OFFLOAD_F16 = 2, OFFLOAD_NONE = 3 };

/* Positions at which a sum of squares is cut, whatever the range asked for. */
#define OFFLOAD_SUM_BLOCK 65536

/* Adam's scalars: computed in double by the caller, rounded once to fp32. */
struct offload_adam_scalars {
    float scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2;
    float neg_step_size, sqrt_bias_correction2, eps;
    int32_t add_decay; /* 1: g += weight_decay * p (Adam); 0: p *= decay (AdamW, or no decay: 1.0) */
};

/* Of what this file and uring.h declare; counted up when a symbol, a structure or an order of sums changes. A library of
 * another number is refused (offload/native/library.py). */
#define OFFLOAD_ABI 3

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
