/* acc += x, acc in fp32, x in fp32, bf16 or fp16. */
#include "vec.h"

#define AHEAD 512

INLINE void add_group(float *acc, const void *x, int type) {
    for (int k = 0; k < GROUP; k += PAIR) {
        vpair a = pair_load(acc + k, OFFLOAD_F32), b = pair_load(at(x, type, k), type);
        pair_store(acc + k, OFFLOAD_F32, (vpair){vf_add(a.a, b.a), vf_add(a.b, b.b)});
    }
}

INLINE void add_range(float *acc, const void *x, int type, int64_t n) {
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        prefetch_group(acc + i, OFFLOAD_F32, AHEAD);
        prefetch_group(at(x, type, i), type, AHEAD);
        add_group(acc + i, at(x, type, i), type);
    }
    if (i < n) {
        float a[GROUP] = {0}, b[GROUP] = {0};
        memcpy(a, acc + i, (size_t)(n - i) * 4);
        memcpy(b, at(x, type, i), (size_t)((n - i) * type_bytes(type)));
        add_group(a, b, type);
        memcpy(acc + i, a, (size_t)(n - i) * 4);
    }
}

typedef void range_function(float *, const void *, int64_t);
static OFFLOAD_CODE void range_f32(float *acc, const void *x, int64_t n) { add_range(acc, x, OFFLOAD_F32, n); }
static OFFLOAD_CODE void range_bf16(float *acc, const void *x, int64_t n) { add_range(acc, x, OFFLOAD_BF16, n); }
static OFFLOAD_CODE void range_f16(float *acc, const void *x, int64_t n) { add_range(acc, x, OFFLOAD_F16, n); }
static range_function *const table[3] = {range_f32, range_bf16, range_f16};

KERNEL(accumulate) { table[types[1]](TENSOR(0), TENSOR(1), n); }
