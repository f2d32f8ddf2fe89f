/* Adam and AdamW in one pass: reads master, exp_avg, exp_avg_sq and grad, writes the three and, when
 * asked, a copy of master in 16 bits or fp32, which may take the place of a grad of its size. */
#include "adam.h"

INLINE vf adam_vector(float *master, float *exp_avg, float *exp_avg_sq, vf grad, const broadcast *c, int add_decay) {
    vf p = vf_load(master), m = vf_load(exp_avg), v = vf_load(exp_avg_sq);
    adam_update(&p, &m, &v, grad, c, add_decay);
    vf_store(master, p);
    vf_store(exp_avg, m);
    vf_store(exp_avg_sq, v);
    return p;
}

INLINE void adam_group(float *master, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_type, void *out,
                       int out_type, const broadcast *c, int add_decay, int stream) {
    for (int k = 0; k < GROUP; k += PAIR) {
        vpair g = pair_load(at(grad, grad_type, k), grad_type), p;
        p.a = adam_vector(master + k, exp_avg + k, exp_avg_sq + k, g.a, c, add_decay);
        p.b = adam_vector(master + k + VW, exp_avg + k + VW, exp_avg_sq + k + VW, g.b, c, add_decay);
        if (out_type == OFFLOAD_NONE) continue;
        if (stream) pair_stream(at_out(out, out_type, k), out_type, p);
        else pair_store(at_out(out, out_type, k), out_type, p);
    }
}

/* Fewer elements than a group: through a padded copy, so that a tail runs the very same operations. */
INLINE void adam_part(float *master, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_type, void *out,
                      int out_type, int64_t n, const broadcast *c, int add_decay) {
    float p[GROUP] = {0}, m[GROUP] = {0}, v[GROUP] = {0}, g[GROUP] = {0};
    float o[GROUP];
    memcpy(p, master, (size_t)n * 4);
    memcpy(m, exp_avg, (size_t)n * 4);
    memcpy(v, exp_avg_sq, (size_t)n * 4);
    memcpy(g, grad, (size_t)(n * type_bytes(grad_type)));
    adam_group(p, m, v, g, grad_type, o, out_type, c, add_decay, 0);
    memcpy(master, p, (size_t)n * 4);
    memcpy(exp_avg, m, (size_t)n * 4);
    memcpy(exp_avg_sq, v, (size_t)n * 4);
    if (out_type != OFFLOAD_NONE) memcpy(out, o, (size_t)(n * type_bytes(out_type)));
}

INLINE void adam_range(float *master, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_type, void *out,
                       int out_type, int64_t n, const adam_scalars *s, int add_decay) {
    const broadcast c = broadcast_of(s);
    const int64_t ahead = offload_ahead;
    /* Streaming stores want whole lines: the head brings the output to one. An output at an odd
     * address never gets there, and goes through the padded copy to its end. */
    uintptr_t address = (uintptr_t)(out_type == OFFLOAD_NONE ? (void *)master : out);
    int64_t bytes = out_type == OFFLOAD_NONE ? 4 : type_bytes(out_type);
    int alignable = address % (uintptr_t)bytes == 0;
    int64_t i = 0;
    int64_t head = alignable ? (int64_t)(-address % 64) / bytes : n;
    if (head > n) head = n;
    while (i < head) {
        int64_t count = head - i < GROUP ? head - i : GROUP;
        adam_part(master + i, exp_avg + i, exp_avg_sq + i, at(grad, grad_type, i), grad_type,
                  at_out(out, out_type, i), out_type, count, &c, add_decay);
        i += count;
    }
    for (; i + GROUP <= n; i += GROUP) {
        prefetch_group(master + i, OFFLOAD_F32, ahead);
        prefetch_group(exp_avg + i, OFFLOAD_F32, ahead);
        prefetch_group(exp_avg_sq + i, OFFLOAD_F32, ahead);
        prefetch_group(at(grad, grad_type, i), grad_type, ahead);
        adam_group(master + i, exp_avg + i, exp_avg_sq + i, at(grad, grad_type, i), grad_type,
                   at_out(out, out_type, i), out_type, &c, add_decay, 1);
    }
    if (i < n)
        adam_part(master + i, exp_avg + i, exp_avg_sq + i, at(grad, grad_type, i), grad_type,
                  at_out(out, out_type, i), out_type, n - i, &c, add_decay);
    if (out_type != OFFLOAD_NONE) stream_fence();
}

/* One function a combination, so that types and decay cost no branch in the loop. */
typedef void range_function(float *, float *, float *, const void *, void *, int64_t, const adam_scalars *);

#define RANGE(grad_type, out_type, add_decay)                                                             \
    static OFFLOAD_CODE void range_##grad_type##_##out_type##_##add_decay(float *p, float *m, float *v, const void *g, void *o, \
                                                             int64_t n, const adam_scalars *s) {               \
        adam_range(p, m, v, g, OFFLOAD_##grad_type, o, OFFLOAD_##out_type, n, s, add_decay);              \
    }
#define RANGES(grad_type) \
    RANGE(grad_type, F32, 0) RANGE(grad_type, F32, 1) RANGE(grad_type, BF16, 0) RANGE(grad_type, BF16, 1) \
    RANGE(grad_type, F16, 0) RANGE(grad_type, F16, 1) RANGE(grad_type, NONE, 0) RANGE(grad_type, NONE, 1)
RANGES(F32)
RANGES(BF16)
RANGES(F16)

#define ROW(grad_type) \
    {{range_##grad_type##_F32_0, range_##grad_type##_F32_1}, {range_##grad_type##_BF16_0, range_##grad_type##_BF16_1}, \
     {range_##grad_type##_F16_0, range_##grad_type##_F16_1}, {range_##grad_type##_NONE_0, range_##grad_type##_NONE_1}}
static range_function *const table[3][4][2] = {ROW(F32), ROW(BF16), ROW(F16)};

KERNEL(adam) {
    const adam_scalars *s = scalars;
    table[types[3]][types[4]][s->add_decay](TENSOR(0), TENSOR(1), TENSOR(2), TENSOR(3), TENSOR(4), n, s);
}
