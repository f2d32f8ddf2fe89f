/* A whole master into its split form (split.h) and back: when training starts, and when somebody
 * asks for a master. Elementwise, so that outputs may take the place of inputs of their size. */
#include "split.h"

#define AHEAD 512

INLINE void split_group(const float *master, uint16_t *low, float *exp_avg_sq, uint16_t *param) {
    for (int k = 0; k < GROUP; k += PAIR) {
        whole x = {pair_load(master + k, OFFLOAD_F32), pair_load(exp_avg_sq + k, OFFLOAD_F32)};
        store_split(param + k, low + k, exp_avg_sq + k, x);
    }
}

KERNEL(split) {
    const float *master = TENSOR(0);
    uint16_t *low = TENSOR(1);
    float *exp_avg_sq = TENSOR(2);
    uint16_t *param = TENSOR(3);
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        prefetch_group(master + i, OFFLOAD_F32, AHEAD);
        prefetch_group(exp_avg_sq + i, OFFLOAD_F32, AHEAD);
        split_group(master + i, low + i, exp_avg_sq + i, param + i);
    }
    if (i < n) {
        float p[GROUP] = {0}, v[GROUP] = {0};
        uint16_t l[GROUP], o[GROUP];
        size_t rest = (size_t)(n - i);
        memcpy(p, master + i, rest * 4);
        memcpy(v, exp_avg_sq + i, rest * 4);
        split_group(p, l, v, o);
        memcpy(low + i, l, rest * 2);
        memcpy(exp_avg_sq + i, v, rest * 4);
        memcpy(param + i, o, rest * 2);
    }
}

INLINE void join_group(const uint16_t *param, const uint16_t *low, const float *exp_avg_sq, float *master,
                       float *exp_avg_sq_out) {
    for (int k = 0; k < GROUP; k += PAIR) {
        whole x = load_split(param + k, low + k, exp_avg_sq + k);
        pair_store(master + k, OFFLOAD_F32, x.master);
        pair_store(exp_avg_sq_out + k, OFFLOAD_F32, x.exp_avg_sq);
    }
}

KERNEL(join) {
    const uint16_t *param = TENSOR(0), *low = TENSOR(1);
    const float *exp_avg_sq = TENSOR(2);
    float *master = TENSOR(3), *exp_avg_sq_out = TENSOR(4);
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        prefetch_group(param + i, OFFLOAD_BF16, AHEAD);
        prefetch_group(low + i, OFFLOAD_BF16, AHEAD);
        prefetch_group(exp_avg_sq + i, OFFLOAD_F32, AHEAD);
        join_group(param + i, low + i, exp_avg_sq + i, master + i, exp_avg_sq_out + i);
    }
    if (i < n) {
        uint16_t o[GROUP] = {0}, l[GROUP] = {0};
        float p[GROUP], v[GROUP] = {0};
        size_t rest = (size_t)(n - i);
        memcpy(o, param + i, rest * 2);
        memcpy(l, low + i, rest * 2);
        memcpy(v, exp_avg_sq + i, rest * 4);
        join_group(o, l, v, p, v);
        memcpy(master + i, p, rest * 4);
        memcpy(exp_avg_sq_out + i, v, rest * 4);
    }
}
