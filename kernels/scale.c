/* x *= factor, fp32. */
#include "vec.h"

#define AHEAD 512

INLINE void scale_group(float *x, vf factor) {
    for (int k = 0; k < GROUP; k += VW) vf_store(x + k, vf_mul(vf_load(x + k), factor));
}

static OFFLOAD_CODE void scale_range(float *x, int64_t n, float factor) {
    vf f = vf_set(factor);
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        prefetch_group(x + i, OFFLOAD_F32, AHEAD);
        scale_group(x + i, f);
    }
    if (i < n) {
        float rest[GROUP] = {0};
        memcpy(rest, x + i, (size_t)(n - i) * 4);
        scale_group(rest, f);
        memcpy(x + i, rest, (size_t)(n - i) * 4);
    }
}

OFFLOAD_EXPORT OFFLOAD_CODE void OFFLOAD_KERNEL(scale)(float *x, int64_t n, float factor) {
    fp_state saved = fp_enter();
    scale_range(x, n, factor);
    fp_leave(saved);
}
