/* Adam with moments of one or two bytes (dither.h), in one pass. The master is fp32, or the int16 beside a bf16 param
 * (reference.settle): then 9 or 6 bytes an element are read and written beside the gradient, and the scales.
 *
 * out may be param, or a grad of its size, and is stored as that is, not streamed. Elements that a last block lacks are
 * zeros of a padded copy: they are never the largest of a block in which something is, so they change no scale. */
#include "adam.h"
#include "dither.h"

/* Of a block, or where a range begins. */
typedef struct {
    void *master;
    const uint16_t *param;
    void *exp_avg, *exp_avg_sq;
    uint8_t *exp_avg_scale, *exp_avg_sq_scale;
    const void *grad;
    void *out;
} tensors_at_block;

typedef struct {
    int64_t step;
    broadcast adam;
    int add_decay, out_type;
} call;

/* What a function is compiled for, so that it costs no branch in the loop. The rest is predicted. */
typedef struct { int is_split, is_coded, grad_type; } form;

/* A bf16 copy and a signed number of 16 bits tell a master but for ties of an even upper half, which become the number
 * before them. Needs one_nan before. */
INLINE vf settle(vf x) { return vf_of(vi_of(x) + (vi)((vi_of(x) & 0x1ffff) == 0x8000)); }
INLINE vf join(vf param, vf low) { return vf_of(vi_of(param) + vi_of(low)); }
/* To nearest: the bf16 is the upper half of the result. Of a settled tie, the even one is the upper one. */
INLINE vf round_settled(vf x) { return vf_of(vi_of(x) + 0x8000); }

INLINE void step_block(tensors_at_block at_, int64_t block, const call *c, form f) {
    uint32_t key = dither_key(block, c->step);
    unsigned m_scale = f.is_coded ? *at_.exp_avg_scale : 0, v_scale = f.is_coded ? *at_.exp_avg_sq_scale : 0;
    int is_bf16 = f.is_split || c->out_type == OFFLOAD_BF16;
    v16 m_lanes[PAIRS], v_lanes[PAIRS];
#pragma GCC unroll 8
    for (int j = 0; j < PAIRS; j++) {
        int k = j * PAIR;
        vpair p, m, v, g = pair_load(at(at_.grad, f.grad_type, k), f.grad_type);
        if (f.is_split) {
            vpair param = load_bf16(at_.param + k), low = load_i16((uint16_t *)at_.master + k);
            p = (vpair){join(param.a, low.a), join(param.b, low.b)};
        } else {
            p = pair_load((float *)at_.master + k, OFFLOAD_F32);
        }
        if (f.is_coded) {
            m = decode_signed((uint8_t *)at_.exp_avg + k, m_scale);
            v = decode_unsigned((uint8_t *)at_.exp_avg_sq + k, v_scale);
        } else {
            m = load_bf16((uint16_t *)at_.exp_avg + k);
            v = load_bf16((uint16_t *)at_.exp_avg_sq + k);
        }
        adam_update(&p.a, &m.a, &v.a, g.a, &c->adam, c->add_decay);
        adam_update(&p.b, &m.b, &v.b, g.b, &c->adam, c->add_decay);
        if (__builtin_expect(any_nan(p), 0)) { /* it is where a moment is */
            p = (vpair){one_nan(p.a), one_nan(p.b)};
            m = (vpair){one_nan(m.a), one_nan(m.b)};
            v = (vpair){one_nan(v.a), one_nan(v.b)};
        }
        if (is_bf16) p = (vpair){settle(p.a), settle(p.b)};
        if (f.is_split) {
            v16_store((uint16_t *)at_.master + k, pack_lower(p));
            v16_store((uint16_t *)at_.out + k, pack_upper((vpair){round_settled(p.a), round_settled(p.b)}));
        } else {
            pair_store((float *)at_.master + k, OFFLOAD_F32, p);
            if (is_bf16) v16_store((uint16_t *)at_.out + k, pack_upper((vpair){round_settled(p.a), round_settled(p.b)}));
            else pair_store(at_out(at_.out, c->out_type, k), c->out_type, p);
        }
        random_pair random = dither(key, k, f.is_coded ? 20 : 16);
        m_lanes[j] = rounded(m, random);
        v_lanes[j] = rounded(v, random);
    }
    if (f.is_coded) {
        *at_.exp_avg_scale = encode(at_.exp_avg, m_lanes, 1);
        *at_.exp_avg_sq_scale = encode(at_.exp_avg_sq, v_lanes, 0);
    } else {
        for (int j = 0; j < PAIRS; j++) {
            v16_store((uint16_t *)at_.exp_avg + j * PAIR, m_lanes[j]);
            v16_store((uint16_t *)at_.exp_avg_sq + j * PAIR, v_lanes[j]);
        }
    }
}

INLINE void step_range(tensors_at_block at_, int64_t first, int64_t n, const call *c, form f) {
    int64_t master_bytes = f.is_split ? 2 : 4, moment_bytes = f.is_coded ? 1 : 2, block = first / BLOCK;
    int64_t grad_bytes = type_bytes(f.grad_type), out_bytes = type_bytes(c->out_type);
    for (; n >= BLOCK; n -= BLOCK, block++) {
        step_block(at_, block, c, f);
        at_.master = (char *)at_.master + BLOCK * master_bytes;
        if (f.is_split) at_.param += BLOCK;
        at_.exp_avg = (char *)at_.exp_avg + BLOCK * moment_bytes;
        at_.exp_avg_sq = (char *)at_.exp_avg_sq + BLOCK * moment_bytes;
        if (f.is_coded) at_.exp_avg_scale++, at_.exp_avg_sq_scale++;
        at_.grad = (const char *)at_.grad + BLOCK * grad_bytes;
        at_.out = (char *)at_.out + BLOCK * out_bytes;
    }
    if (n > 0) {
        float p[BLOCK] = {0}, m[BLOCK] = {0}, v[BLOCK] = {0}, g[BLOCK] = {0}, o[BLOCK] = {0};
        size_t rest = (size_t)n;
        tensors_at_block padded = at_;
        memcpy(p, at_.master, rest * (size_t)master_bytes);
        if (f.is_split) memcpy(o, at_.param, rest * 2);
        memcpy(m, at_.exp_avg, rest * (size_t)moment_bytes);
        memcpy(v, at_.exp_avg_sq, rest * (size_t)moment_bytes);
        memcpy(g, at_.grad, rest * (size_t)grad_bytes);
        padded.master = p, padded.param = (uint16_t *)o, padded.exp_avg = m, padded.exp_avg_sq = v;
        padded.grad = g, padded.out = o;
        step_block(padded, block, c, f);
        memcpy(at_.master, p, rest * (size_t)master_bytes);
        memcpy(at_.exp_avg, m, rest * (size_t)moment_bytes);
        memcpy(at_.exp_avg_sq, v, rest * (size_t)moment_bytes);
        memcpy(at_.out, o, rest * (size_t)out_bytes);
    }
}

typedef void range_function(tensors_at_block, int64_t, int64_t, const call *);
#define RANGE(is_split, is_coded, grad)                                                                             \
    static OFFLOAD_CODE void range_##is_split##is_coded##_##grad(tensors_at_block at_, int64_t first, int64_t n,     \
                                                                 const call *c) {                                    \
        step_range(at_, first, n, c, (form){is_split, is_coded, OFFLOAD_##grad});                                    \
    }
RANGE(0, 0, F32) RANGE(0, 0, BF16) RANGE(0, 0, F16) RANGE(0, 1, F32) RANGE(0, 1, BF16) RANGE(0, 1, F16)
RANGE(1, 0, F32) RANGE(1, 0, BF16) RANGE(1, 1, F32) RANGE(1, 1, BF16)
/* By split, coded, and the type of the gradient. */
static range_function *const table[2][2][3] = {
    {{range_00_F32, range_00_BF16, range_00_F16}, {range_01_F32, range_01_BF16, range_01_F16}},
    {{range_10_F32, range_10_BF16, 0}, {range_11_F32, range_11_BF16, 0}}};

KERNEL(adam_dithered) {
    const struct offload_dithered_scalars *s = scalars;
    int is_split = types[0] == OFFLOAD_I16, is_coded = types[2] == OFFLOAD_U8;
    call c = {s->step, broadcast_of(&s->adam), s->adam.add_decay, types[7]};
    tensors_at_block at_ = {TENSOR(0), TENSOR(1), TENSOR(2), TENSOR(3), 0, 0, TENSOR(6), TENSOR(7)};
    if (is_coded) {
        at_.exp_avg_scale = tensor_at(tensors[4], types[4], first / BLOCK);
        at_.exp_avg_sq_scale = tensor_at(tensors[5], types[5], first / BLOCK);
    }
    table[is_split][is_coded][types[6]](at_, first, n, &c);
}
