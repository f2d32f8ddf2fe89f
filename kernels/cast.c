/* Casts between fp32 and bf16 or fp16, to nearest even as torch's; fp32 to fp32 and like to like is a
 * copy of bytes. Ordinary stores: what is cast is mostly read again soon. */
#include "vec.h"

#define AHEAD 512

INLINE void cast_range(const void *src, int src_type, void *dst, int dst_type, int64_t n) {
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        prefetch_group(at(src, src_type, i), src_type, AHEAD);
        for (int64_t k = i; k < i + GROUP; k += PAIR)
            pair_store(at_out(dst, dst_type, k), dst_type, pair_load(at(src, src_type, k), src_type));
    }
    if (i < n) {
        float from[GROUP] = {0}, to[GROUP];
        memcpy(from, at(src, src_type, i), (size_t)((n - i) * type_bytes(src_type)));
        for (int64_t k = 0; k < GROUP; k += PAIR)
            pair_store(at_out(to, dst_type, k), dst_type, pair_load(at(from, src_type, k), src_type));
        memcpy(at_out(dst, dst_type, i), to, (size_t)((n - i) * type_bytes(dst_type)));
    }
}

typedef void range_function(const void *, void *, int64_t);
static OFFLOAD_CODE void f32_bf16(const void *s, void *d, int64_t n) { cast_range(s, OFFLOAD_F32, d, OFFLOAD_BF16, n); }
static OFFLOAD_CODE void f32_f16(const void *s, void *d, int64_t n) { cast_range(s, OFFLOAD_F32, d, OFFLOAD_F16, n); }
static OFFLOAD_CODE void bf16_f32(const void *s, void *d, int64_t n) { cast_range(s, OFFLOAD_BF16, d, OFFLOAD_F32, n); }
static OFFLOAD_CODE void f16_f32(const void *s, void *d, int64_t n) { cast_range(s, OFFLOAD_F16, d, OFFLOAD_F32, n); }
static OFFLOAD_CODE void copy_32(const void *s, void *d, int64_t n) { memcpy(d, s, (size_t)n * 4); }
static OFFLOAD_CODE void copy_16(const void *s, void *d, int64_t n) { memcpy(d, s, (size_t)n * 2); }
/* [source][destination]; bf16 <-> fp16 is not offered. */
static range_function *const table[3][3] = {
    {copy_32, f32_bf16, f32_f16}, {bf16_f32, copy_16, 0}, {f16_f32, 0, copy_16}};

KERNEL(cast) { table[types[0]][types[1]](TENSOR(0), TENSOR(1), n); }
