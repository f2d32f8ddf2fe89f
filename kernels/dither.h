/* Moments of one or two bytes, rounded up or down by random bits (offload/optim/reference.py says it in NumPy).
 *
 * What is left of an fp32 without its lower 16 bits is a 16-bit lane, and all is done in these: a bf16 is a lane, and a
 * code of one byte is a lane without its scale and its lowest bits:
 *
 *   lane   s eeeeeeee fffffff     bits of an fp32 plus random ones below what stays, cut off
 *   code   s eeee fff             E4M3: lane / 16 - 8 * scale, or 0; 0 is 0
 *            eeeee fff            E5M3, of what has no sign: likewise, and 0 is the least value
 *
 * A block's scale is the least with which its largest lane has a code. */
#ifndef OFFLOAD_DITHER_H
#define OFFLOAD_DITHER_H

#include "vec.h"

#define BLOCK OFFLOAD_DITHER_BLOCK
#define PAIRS (BLOCK / PAIR)

/* The finaliser of splitmix64, of a block's number and the step. */
INLINE uint32_t dither_key(int64_t block, int64_t step) {
    uint64_t z = ((uint64_t)block + 1) * 0x9e3779b97f4a7c15u + (uint64_t)step * 0xd1b54a32d192ed03u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32);
}

#define GOLDEN(i) (i) * 0x9e3779b9u
#define GOLDEN4(i) GOLDEN(i), GOLDEN(i + 1), GOLDEN(i + 2), GOLDEN(i + 3)
#define GOLDEN16(i) GOLDEN4(i), GOLDEN4(i + 4), GOLDEN4(i + 8), GOLDEN4(i + 12)
static const uint32_t golden[BLOCK] __attribute__((aligned(64))) = {GOLDEN16(0u), GOLDEN16(16u), GOLDEN16(32u),
                                                                    GOLDEN16(48u)};

typedef struct { vi a, b; } random_pair;
/* The random bits of lanes k.., of which the upper ones are cut off. */
INLINE random_pair dither(uint32_t key, int k, int bits) {
    vi a, b;
    memcpy(&a, golden + k, sizeof a);
    memcpy(&b, golden + k + VW, sizeof b);
    return (random_pair){(a + key) >> (32 - bits), (b + key) >> (32 - bits)};
}
/* Needs one_nan before: the sum with another NaN might wrap. */
INLINE v16 rounded(vpair x, random_pair random) {
    return pack_upper((vpair){vf_of(vi_of(x.a) + random.a), vf_of(vi_of(x.b) + random.b)});
}

INLINE vpair decode_signed(const uint8_t *codes, unsigned scale) {
    vh code = vh_of(v16_load_bytes(codes)), magnitude = code & 0x7f;
    vh lane = (magnitude << 4) + (uint16_t)(scale << 7);
    return v16_upper(v16_of((lane & (vh)(magnitude != 0)) | (code & 0x80) << 8));
}
INLINE vpair decode_unsigned(const uint8_t *codes, unsigned scale) {
    return v16_upper(v16_of((vh_of(v16_load_bytes(codes)) << 4) + (uint16_t)(scale << 7)));
}

/* Encodes the lanes of a block; returns its scale. */
INLINE uint8_t encode(uint8_t *codes, const v16 *lanes, int is_signed) {
    v16 largest = v16_of(vh_of(lanes[0]) & 0x7fff);
#pragma GCC unroll 8
    for (int j = 1; j < PAIRS; j++) largest = v16_max(largest, v16_of(vh_of(lanes[j]) & 0x7fff));
    int exponent = (int)(v16_largest(largest) >> 7) - (is_signed ? 15 : 31);
    unsigned scale = exponent > 0 ? (unsigned)exponent : 0;
    v16 least = v16_of((vh){0} + (uint16_t)(scale << 7));
#pragma GCC unroll 8
    for (int j = 0; j < PAIRS; j++) {
        vh lane = vh_of(lanes[j]), code = vh_of(v16_subs(v16_of(lane & 0x7fff), least)) >> 4;
        v16_store_bytes(codes + j * PAIR, v16_of(is_signed ? code | (lane >> 8 & 0x80) : code));
    }
    return (uint8_t)scale;
}

#endif
