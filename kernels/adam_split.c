/* adam.c with a split master (split.h): reads param, low, exp_avg, exp_avg_sq and grad, writes low, the
 * two moments and the new param to out: 24 bytes an element with a bf16 grad.
 *
 * out may be param or a bf16 grad, and so it is stored as they are, not streamed: a line just read is
 * in the cache. No address has to be aligned. */
#include "adam.h"
#include "split.h"

INLINE void adam_group(const uint16_t *param, uint16_t *low, float *exp_avg, float *exp_avg_sq, const void *grad,
                       int grad_type, uint16_t *out, const broadcast *c, int add_decay) {
    for (int k = 0; k < GROUP; k += PAIR) {
        whole x = load_split(param + k, low + k, exp_avg_sq + k);
        vpair m = pair_load(exp_avg + k, OFFLOAD_F32), g = pair_load(at(grad, grad_type, k), grad_type);
        adam_update(&x.master.a, &m.a, &x.exp_avg_sq.a, g.a, c, add_decay);
        adam_update(&x.master.b, &m.b, &x.exp_avg_sq.b, g.b, c, add_decay);
        pair_store(exp_avg + k, OFFLOAD_F32, m);
        store_split(out + k, low + k, exp_avg_sq + k, x);
    }
}

INLINE void adam_range(const uint16_t *param, uint16_t *low, float *exp_avg, float *exp_avg_sq, const void *grad,
                       int grad_type, uint16_t *out, int64_t n, const adam_scalars *s, int add_decay) {
    const broadcast c = broadcast_of(s);
    const int64_t ahead = offload_ahead;
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        prefetch_group(param + i, OFFLOAD_BF16, ahead);
        prefetch_group(low + i, OFFLOAD_BF16, ahead);
        prefetch_group(exp_avg + i, OFFLOAD_F32, ahead);
        prefetch_group(exp_avg_sq + i, OFFLOAD_F32, ahead);
        prefetch_group(at(grad, grad_type, i), grad_type, ahead);
        adam_group(param + i, low + i, exp_avg + i, exp_avg_sq + i, at(grad, grad_type, i), grad_type, out + i, &c,
                   add_decay);
    }
    if (i < n) {
        /* Through a padded copy, so that a tail runs the very same operations. */
        uint16_t p[GROUP] = {0}, l[GROUP] = {0};
        float m[GROUP] = {0}, v[GROUP] = {0}, g[GROUP] = {0};
        size_t rest = (size_t)(n - i);
        memcpy(p, param + i, rest * 2);
        memcpy(l, low + i, rest * 2);
        memcpy(m, exp_avg + i, rest * 4);
        memcpy(v, exp_avg_sq + i, rest * 4);
        memcpy(g, at(grad, grad_type, i), rest * (size_t)type_bytes(grad_type));
        adam_group(p, l, m, v, g, grad_type, p, &c, add_decay);
        memcpy(low + i, l, rest * 2);
        memcpy(exp_avg + i, m, rest * 4);
        memcpy(exp_avg_sq + i, v, rest * 4);
        memcpy(out + i, p, rest * 2);
    }
}

typedef void range_function(const uint16_t *, uint16_t *, float *, float *, const void *, uint16_t *, int64_t,
                            const adam_scalars *);

#define RANGE(grad_type, add_decay)                                                                            \
    static OFFLOAD_CODE void range_##grad_type##_##add_decay(const uint16_t *p, uint16_t *l, float *m, float *v, \
                                                const void *g, uint16_t *o, int64_t n, const adam_scalars *s) {     \
        adam_range(p, l, m, v, g, OFFLOAD_##grad_type, o, n, s, add_decay);                                     \
    }
RANGE(F32, 0) RANGE(F32, 1) RANGE(BF16, 0) RANGE(BF16, 1)
static range_function *const table[2][2] = {{range_F32_0, range_F32_1}, {range_BF16_0, range_BF16_1}};

KERNEL(adam_split) {
    const adam_scalars *s = scalars;
    table[types[4]][s->add_decay](TENSOR(0), TENSOR(1), TENSOR(2), TENSOR(3), TENSOR(4), TENSOR(5), n, s);
}
