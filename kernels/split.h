/* A split master: an fp32 kept as its bf16 copy (rounded to nearest even) and its lower half.
 *
 * The copy is the upper half plus a carry, and carry = (low + 0x7fff + odd) >> 16, where odd is the
 * upper half's last bit. Only at an exact tie (low 0x8000) does the carry depend on odd, and there
 * the copy, always even, does not tell it. So odd travels in the sign bit of exp_avg_sq, which has
 * no sign of its own. It always does, tie or not: that needs no comparison, and whoever forgets to
 * clear it finds out at once instead of once in 65536 elements.
 *
 * A NaN is made the one that its copy is (low 0), so that low does not depend on how an instruction
 * set carries a NaN's payload along. */
#ifndef OFFLOAD_SPLIT_H
#define OFFLOAD_SPLIT_H

#include "vec.h"

typedef struct { vpair master, exp_avg_sq; } whole;

INLINE vf join_master(vf param, vf low, vf exp_avg_sq) {
    vi bits = vi_of(low), odd = vi_of(exp_avg_sq) >> 31;
    return vf_of((vi_of(param) | bits) - ((bits + 0x7fff + odd) & 0x10000));
}
INLINE vf without_sign(vf x) { return vf_of(vi_of(x) & 0x7fffffff); }

INLINE whole load_split(const void *param, const void *low, const float *exp_avg_sq) {
    vpair p = load_bf16(param), l = load_u16(low), v = pair_load(exp_avg_sq, OFFLOAD_F32);
    return (whole){{join_master(p.a, l.a, v.a), join_master(p.b, l.b, v.b)}, {without_sign(v.a), without_sign(v.b)}};
}

INLINE vf with_odd(vf exp_avg_sq, vf master) {
    return vf_of((vi_of(exp_avg_sq) & 0x7fffffff) | odd_of(vi_of(master)) << 31);
}

INLINE void store_split(void *param, void *low, float *exp_avg_sq, whole x) {
    vf a = one_nan(x.master.a), b = one_nan(x.master.b);
    v16_store(param, pack_upper((vpair){round_bf16(a), round_bf16(b)}));
    v16_store(low, pack_upper((vpair){vf_of(vi_of(a) << 16), vf_of(vi_of(b) << 16)}));
    pair_store(exp_avg_sq, OFFLOAD_F32, (vpair){with_odd(x.exp_avg_sq.a, a), with_odd(x.exp_avg_sq.b, b)});
}

#endif
