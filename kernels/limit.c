/* The traffic of adam.c without its arithmetic: the same bytes in the same order, with the same kinds
 * of stores and the same prefetch. What the benchmark measures a kernel against. */
#include "vec.h"

INLINE void limit_range(float *master, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_type, void *out,
                        int64_t n) {
    const int64_t ahead = offload_ahead;
    for (int64_t i = 0; i + GROUP <= n; i += GROUP) {
        prefetch_group(master + i, OFFLOAD_F32, ahead);
        prefetch_group(exp_avg + i, OFFLOAD_F32, ahead);
        prefetch_group(exp_avg_sq + i, OFFLOAD_F32, ahead);
        prefetch_group(at(grad, grad_type, i), grad_type, ahead);
        for (int64_t k = i; k < i + GROUP; k += PAIR) {
            vpair p = pair_load(master + k, OFFLOAD_F32);
            vpair m = pair_load(exp_avg + k, OFFLOAD_F32);
            vpair v = pair_load(exp_avg_sq + k, OFFLOAD_F32);
            /* The streams change places: a store of what was just loaded could be left out. */
            pair_store(exp_avg + k, OFFLOAD_F32, p);
            pair_store(exp_avg_sq + k, OFFLOAD_F32, m);
            if (grad_type == OFFLOAD_F32) {
                vpair g = pair_load(at(grad, grad_type, k), grad_type);
                v = (vpair){vf_of(vi_of(v.a) ^ vi_of(g.a)), vf_of(vi_of(v.b) ^ vi_of(g.b))};
            } else {
                v16_stream(at_out(out, grad_type, k), v16_load(at(grad, grad_type, k)));
            }
            pair_store(master + k, OFFLOAD_F32, v);
        }
    }
    if (grad_type != OFFLOAD_F32) stream_fence();
}

/* grad_type F32: no output (28 bytes an element); BF16: 16-bit output, which has to start a 64-byte
 * line (28 bytes an element). Elements past the last whole group are left alone. */
KERNEL(limit) {
    if (types[3] == OFFLOAD_F32) limit_range(TENSOR(0), TENSOR(1), TENSOR(2), TENSOR(3), OFFLOAD_F32, TENSOR(4), n);
    else limit_range(TENSOR(0), TENSOR(1), TENSOR(2), TENSOR(3), OFFLOAD_BF16, TENSOR(4), n);
}
