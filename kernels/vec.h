/* The vectors the kernels are written in, once for each instruction set.
 *
 *   vf     VW floats             vpair  two of them: 2*VW neighbouring elements
 *   v16    2*VW 16-bit elements  vd     DW doubles
 *
 * A pair is the unit because 16-bit elements of a pair fill one register. GROUP elements are one
 * 64-byte line of 16-bit elements and two of fp32. Every operation is exact to IEEE 754, so all
 * instruction sets give the same bits. */
#ifndef OFFLOAD_VEC_H
#define OFFLOAD_VEC_H

#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define GROUP 32

#if defined(OFFLOAD_ISA_AVX512) || defined(OFFLOAD_ISA_AVX2)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#elif defined(OFFLOAD_ISA_NEON)
#include <arm_neon.h>
#endif

/* ---- rounding to nearest even, denormals kept, exceptions masked; the caller's state comes back */

#if defined(__x86_64__)
typedef unsigned fp_state;
INLINE fp_state fp_enter(void) {
    fp_state saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return saved;
}
INLINE void fp_leave(fp_state saved) { _mm_setcsr(saved); }
INLINE void stream_fence(void) { _mm_sfence(); }
#elif defined(__aarch64__)
typedef uint64_t fp_state;
INLINE fp_state fp_enter(void) {
    fp_state saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return saved;
}
INLINE void fp_leave(fp_state saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory"); }
INLINE void stream_fence(void) {}
#else
typedef int fp_state;
INLINE fp_state fp_enter(void) { return 0; }
INLINE void fp_leave(fp_state saved) { (void)saved; }
INLINE void stream_fence(void) {}
#endif

INLINE void prefetch(const void *address) { __builtin_prefetch(address, 0, 3); }

/* ---- one section an instruction set */

#if defined(OFFLOAD_ISA_AVX512)

#define VW 16
#define DW 8
typedef __m512 vf;
typedef __m512d vd;
typedef __m512i v16;
typedef struct { vf a, b; } vpair;

INLINE vf vf_load(const float *x) { return _mm512_loadu_ps(x); }
INLINE void vf_store(float *x, vf v) { _mm512_storeu_ps(x, v); }
INLINE vf vf_set(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }

INLINE v16 v16_load(const void *x) { return _mm512_loadu_si512(x); }
INLINE void v16_store(void *x, v16 v) { _mm512_storeu_si512(x, v); }
INLINE void v16_stream(void *x, v16 v) { _mm512_stream_si512((__m512i *)x, v); }

/* 16 bits as the lower half of 32, the upper one zero. */
INLINE vpair load_u16(const void *x) {
    return (vpair){_mm512_castsi512_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x))),
                   _mm512_castsi512_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x + 1)))};
}
INLINE vpair load_f16(const void *x) {
    return (vpair){_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)),
                   _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x + 1))};
}
/* Every NaN made the one that is rounded to itself. */
INLINE vf one_nan(vf x) {
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(x, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}
/* The upper halves of 32 bits, side by side. */
INLINE v16 pack_upper(vpair x) {
    static const uint16_t upper[32] __attribute__((aligned(64))) = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(_mm512_castps_si512(x.a), _mm512_load_si512(upper), _mm512_castps_si512(x.b));
}
INLINE v16 to_f16(vpair x) {
    __m256i low = _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i high = _mm512_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* 16-bit lanes: as the upper halves of fp32; from and to bytes; a - b, or 0; the larger, and the largest, of lanes
 * below 0x8000. */
INLINE vpair v16_upper(v16 x) {
    return (vpair){_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16)),
                   _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)), 16))};
}
INLINE v16 v16_load_bytes(const void *x) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)x)); }
INLINE void v16_store_bytes(void *x, v16 v) { _mm256_storeu_si256((__m256i *)x, _mm512_cvtepi16_epi8(v)); }
/* Lower halves: of 32 bits, side by side; and 16 bits with a sign as 32. */
INLINE v16 pack_lower(vpair x) {
    static const uint16_t lower[32] __attribute__((aligned(64))) = {
        0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
        32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    return _mm512_permutex2var_epi16(_mm512_castps_si512(x.a), _mm512_load_si512(lower), _mm512_castps_si512(x.b));
}
INLINE vpair load_i16(const void *x) {
    return (vpair){_mm512_castsi512_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)x))),
                   _mm512_castsi512_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)x + 1)))};
}
INLINE v16 v16_subs(v16 a, v16 b) { return _mm512_subs_epu16(a, b); }
INLINE v16 v16_max(v16 a, v16 b) { return _mm512_max_epu16(a, b); }
INLINE unsigned v16_largest(v16 x) {
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    __m128i last = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return 0xffff ^ ((unsigned)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(last, _mm_set1_epi16(-1)))) & 0xffff);
}
INLINE int any_nan(vpair x) { return _mm512_cmp_ps_mask(x.a, x.a, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(x.b, x.b, _CMP_UNORD_Q); }

INLINE vd vd_zero(void) { return _mm512_setzero_pd(); }
INLINE vd vd_add(vd a, vd b) { return _mm512_add_pd(a, b); }
INLINE vd vd_mul(vd a, vd b) { return _mm512_mul_pd(a, b); }
INLINE void vd_store(double *x, vd v) { _mm512_storeu_pd(x, v); }
INLINE void widen(vd *out, vpair x) {
    out[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(x.a));
    out[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.a, 1));
    out[2] = _mm512_cvtps_pd(_mm512_castps512_ps256(x.b));
    out[3] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.b, 1));
}

#elif defined(OFFLOAD_ISA_AVX2)

#define VW 8
#define DW 4
typedef __m256 vf;
typedef __m256d vd;
typedef __m256i v16;
typedef struct { vf a, b; } vpair;

INLINE vf vf_load(const float *x) { return _mm256_loadu_ps(x); }
INLINE void vf_store(float *x, vf v) { _mm256_storeu_ps(x, v); }
INLINE vf vf_set(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }

INLINE v16 v16_load(const void *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE void v16_store(void *x, v16 v) { _mm256_storeu_si256((__m256i *)x, v); }
INLINE void v16_stream(void *x, v16 v) { _mm256_stream_si256((__m256i *)x, v); }

INLINE vpair load_u16(const void *x) {
    return (vpair){_mm256_castsi256_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x))),
                   _mm256_castsi256_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x + 1)))};
}
INLINE vpair load_f16(const void *x) {
    return (vpair){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x + 1))};
}
INLINE vf one_nan(vf x) {
    return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
INLINE v16 pack_upper(vpair x) {
    __m256i a = _mm256_srli_epi32(_mm256_castps_si256(x.a), 16), b = _mm256_srli_epi32(_mm256_castps_si256(x.b), 16);
    /* The pack works within 128-bit lanes; the permutation puts their quarters in order. */
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}
INLINE v16 to_f16(vpair x) {
    __m128i low = _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT);
    __m128i high = _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

INLINE vpair v16_upper(v16 x) {
    __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x));
    __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1));
    return (vpair){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
INLINE v16 v16_load_bytes(const void *x) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)x)); }
INLINE v16 pack_lower(vpair x) {
    __m256i a = _mm256_slli_epi32(_mm256_castps_si256(x.a), 16), b = _mm256_slli_epi32(_mm256_castps_si256(x.b), 16);
    return pack_upper((vpair){_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)});
}
INLINE vpair load_i16(const void *x) {
    return (vpair){_mm256_castsi256_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)x))),
                   _mm256_castsi256_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)x + 1)))};
}
INLINE void v16_store_bytes(void *x, v16 v) {
    _mm_storeu_si128((__m128i *)x, _mm_packus_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
INLINE v16 v16_subs(v16 a, v16 b) { return _mm256_subs_epu16(a, b); }
INLINE v16 v16_max(v16 a, v16 b) { return _mm256_max_epu16(a, b); }
INLINE unsigned v16_largest(v16 x) {
    __m128i last = _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return 0xffff ^ ((unsigned)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(last, _mm_set1_epi16(-1)))) & 0xffff);
}
INLINE int any_nan(vpair x) {
    __m256 a = _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), b = _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(a, b));
}

INLINE vd vd_zero(void) { return _mm256_setzero_pd(); }
INLINE vd vd_add(vd a, vd b) { return _mm256_add_pd(a, b); }
INLINE vd vd_mul(vd a, vd b) { return _mm256_mul_pd(a, b); }
INLINE void vd_store(double *x, vd v) { _mm256_storeu_pd(x, v); }
INLINE void widen(vd *out, vpair x) {
    out[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(x.a));
    out[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1));
    out[2] = _mm256_cvtps_pd(_mm256_castps256_ps128(x.b));
    out[3] = _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1));
}

#elif defined(__x86_64__)

#define VW 4
#define DW 2
typedef __m128 vf;
typedef __m128d vd;
typedef __m128i v16;
typedef struct { vf a, b; } vpair;

INLINE vf vf_load(const float *x) { return _mm_loadu_ps(x); }
INLINE void vf_store(float *x, vf v) { _mm_storeu_ps(x, v); }
INLINE vf vf_set(float x) { return _mm_set1_ps(x); }
INLINE vf vf_add(vf a, vf b) { return _mm_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm_div_ps(a, b); }
INLINE vf vf_sqrt(vf a) { return _mm_sqrt_ps(a); }

INLINE v16 v16_load(const void *x) { return _mm_loadu_si128((const __m128i *)x); }
INLINE void v16_store(void *x, v16 v) { _mm_storeu_si128((__m128i *)x, v); }
INLINE void v16_stream(void *x, v16 v) { _mm_stream_si128((__m128i *)x, v); }

INLINE __m128i pick(__m128i mask, __m128i yes, __m128i no) {
    return _mm_or_si128(_mm_and_si128(mask, yes), _mm_andnot_si128(mask, no));
}
INLINE vpair load_u16(const void *from) {
    __m128i zero = _mm_setzero_si128(), x = v16_load(from);
    return (vpair){_mm_castsi128_ps(_mm_unpacklo_epi16(x, zero)), _mm_castsi128_ps(_mm_unpackhi_epi16(x, zero))};
}
/* No F16C: the fields move to their fp32 places, and a product with 2^112 (exact, and right for
 * denormals too) corrects the exponent's bias; Inf and NaN get theirs by hand. */
INLINE vf widen_f16(__m128i x) {
    __m128i sign = _mm_slli_epi32(_mm_and_si128(x, _mm_set1_epi32(0x8000)), 16);
    __m128i fields = _mm_slli_epi32(_mm_and_si128(x, _mm_set1_epi32(0x7fff)), 13);
    __m128i value = _mm_castps_si128(_mm_mul_ps(_mm_castsi128_ps(fields), _mm_castsi128_ps(_mm_set1_epi32(239 << 23))));
    __m128i special = _mm_cmpgt_epi32(fields, _mm_set1_epi32((0x7c00 << 13) - 1));
    value = _mm_or_si128(value, _mm_and_si128(special, _mm_set1_epi32(0x7f800000)));
    return _mm_castsi128_ps(_mm_or_si128(value, sign));
}
INLINE vpair load_f16(const void *from) {
    __m128i zero = _mm_setzero_si128(), x = v16_load(from);
    return (vpair){widen_f16(_mm_unpacklo_epi16(x, zero)), widen_f16(_mm_unpackhi_epi16(x, zero))};
}
INLINE vf one_nan(vf x) {
    __m128i nan = _mm_castps_si128(_mm_cmpunord_ps(x, x));
    return _mm_castsi128_ps(pick(nan, _mm_set1_epi32(0x7fc00000), _mm_castps_si128(x)));
}
INLINE v16 pack_upper(vpair x) {
    /* Sign-extended, so that the signed pack saturates nothing. */
    return _mm_packs_epi32(_mm_srai_epi32(_mm_castps_si128(x.a), 16), _mm_srai_epi32(_mm_castps_si128(x.b), 16));
}
INLINE __m128i narrow_f16(vf x) {
    __m128i bits = _mm_castps_si128(x);
    __m128i absolute = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
    /* Normal results: rebias and round to nearest even; a carry past the largest gives Inf. */
    __m128i odd = _mm_and_si128(_mm_srli_epi32(absolute, 13), _mm_set1_epi32(1));
    __m128i rebias = _mm_set1_epi32(0xfff - (112 << 23));
    __m128i normal = _mm_srli_epi32(_mm_add_epi32(_mm_add_epi32(absolute, odd), rebias), 13);
    /* Denormal results: next to 0.5 an fp32 ulp is 2^-24, the fp16 denormal, so the sum rounds. */
    __m128i half = _mm_set1_epi32(126 << 23);
    __m128i sum = _mm_castps_si128(_mm_add_ps(_mm_castsi128_ps(absolute), _mm_castsi128_ps(half)));
    __m128i denormal = _mm_sub_epi32(sum, half);
    __m128i is_normal = _mm_cmpgt_epi32(absolute, _mm_set1_epi32((113 << 23) - 1));
    __m128i is_large = _mm_cmpgt_epi32(absolute, _mm_set1_epi32((143 << 23) - 1));
    __m128i is_nan = _mm_cmpgt_epi32(absolute, _mm_set1_epi32(0x7f800000));
    __m128i special = _mm_or_si128(_mm_set1_epi32(0x7c00), _mm_and_si128(is_nan, _mm_set1_epi32(0x200)));
    __m128i result = pick(is_large, special, pick(is_normal, normal, denormal));
    __m128i sign = _mm_slli_epi32(_mm_srli_epi32(bits, 31), 31);
    return _mm_or_si128(_mm_srai_epi32(sign, 16), result);
}
INLINE v16 to_f16(vpair x) { return _mm_packs_epi32(narrow_f16(x.a), narrow_f16(x.b)); }

INLINE vpair v16_upper(v16 x) {
    __m128i zero = _mm_setzero_si128();
    return (vpair){_mm_castsi128_ps(_mm_unpacklo_epi16(zero, x)), _mm_castsi128_ps(_mm_unpackhi_epi16(zero, x))};
}
INLINE v16 v16_load_bytes(const void *x) {
    return _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)x), _mm_setzero_si128());
}
INLINE void v16_store_bytes(void *x, v16 v) { _mm_storel_epi64((__m128i *)x, _mm_packus_epi16(v, v)); }
INLINE v16 pack_lower(vpair x) {
    __m128i a = _mm_slli_epi32(_mm_castps_si128(x.a), 16), b = _mm_slli_epi32(_mm_castps_si128(x.b), 16);
    return pack_upper((vpair){_mm_castsi128_ps(a), _mm_castsi128_ps(b)});
}
INLINE vpair load_i16(const void *from) {
    __m128i x = v16_load(from);
    return (vpair){_mm_castsi128_ps(_mm_srai_epi32(_mm_unpacklo_epi16(x, x), 16)),
                   _mm_castsi128_ps(_mm_srai_epi32(_mm_unpackhi_epi16(x, x), 16))};
}
INLINE v16 v16_subs(v16 a, v16 b) { return _mm_subs_epu16(a, b); }
INLINE v16 v16_max(v16 a, v16 b) { return _mm_max_epi16(a, b); }
INLINE unsigned v16_largest(v16 x) {
    x = _mm_max_epi16(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epi16(x, _mm_shuffle_epi32(x, 0xb1));
    x = _mm_max_epi16(x, _mm_shufflelo_epi16(x, 0xb1));
    return (unsigned)_mm_cvtsi128_si32(x) & 0xffff;
}
INLINE int any_nan(vpair x) { return _mm_movemask_ps(_mm_or_ps(_mm_cmpunord_ps(x.a, x.a), _mm_cmpunord_ps(x.b, x.b))); }

INLINE vd vd_zero(void) { return _mm_setzero_pd(); }
INLINE vd vd_add(vd a, vd b) { return _mm_add_pd(a, b); }
INLINE vd vd_mul(vd a, vd b) { return _mm_mul_pd(a, b); }
INLINE void vd_store(double *x, vd v) { _mm_storeu_pd(x, v); }
INLINE void widen(vd *out, vpair x) {
    out[0] = _mm_cvtps_pd(x.a);
    out[1] = _mm_cvtps_pd(_mm_movehl_ps(x.a, x.a));
    out[2] = _mm_cvtps_pd(x.b);
    out[3] = _mm_cvtps_pd(_mm_movehl_ps(x.b, x.b));
}

#elif defined(OFFLOAD_ISA_NEON)

#define VW 4
#define DW 2
typedef float32x4_t vf;
typedef float64x2_t vd;
typedef uint16x8_t v16;
typedef struct { vf a, b; } vpair;

INLINE vf vf_load(const float *x) { return vld1q_f32(x); }
INLINE void vf_store(float *x, vf v) { vst1q_f32(x, v); }
INLINE vf vf_set(float x) { return vdupq_n_f32(x); }
INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf vf_sqrt(vf a) { return vsqrtq_f32(a); }

INLINE v16 v16_load(const void *x) { return vld1q_u16((const uint16_t *)x); }
INLINE void v16_store(void *x, v16 v) { vst1q_u16((uint16_t *)x, v); }
#if __has_builtin(__builtin_nontemporal_store)
INLINE void v16_stream(void *x, v16 v) { __builtin_nontemporal_store(v, (v16 *)x); }
#else
/* gcc has no such store for this architecture; the CPUs see a stream of whole lines anyway. */
INLINE void v16_stream(void *x, v16 v) { v16_store(x, v); }
#endif

INLINE vpair load_u16(const void *from) {
    v16 x = v16_load(from);
    return (vpair){vreinterpretq_f32_u32(vmovl_u16(vget_low_u16(x))),
                   vreinterpretq_f32_u32(vmovl_u16(vget_high_u16(x)))};
}
INLINE vpair load_f16(const void *from) {
    v16 x = v16_load(from);
    return (vpair){vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(x))),
                   vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(x)))};
}
INLINE vf one_nan(vf x) { return vbslq_f32(vceqq_f32(x, x), x, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000))); }
INLINE v16 pack_upper(vpair x) {
    return vcombine_u16(vshrn_n_u32(vreinterpretq_u32_f32(x.a), 16), vshrn_n_u32(vreinterpretq_u32_f32(x.b), 16));
}
INLINE v16 to_f16(vpair x) {
    return vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(x.a)), vreinterpret_u16_f16(vcvt_f16_f32(x.b)));
}

INLINE vpair v16_upper(v16 x) {
    return (vpair){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
                   vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(x), 16))};
}
INLINE v16 v16_load_bytes(const void *x) { return vmovl_u8(vld1_u8((const uint8_t *)x)); }
INLINE void v16_store_bytes(void *x, v16 v) { vst1_u8((uint8_t *)x, vmovn_u16(v)); }
INLINE v16 pack_lower(vpair x) {
    return vcombine_u16(vmovn_u32(vreinterpretq_u32_f32(x.a)), vmovn_u32(vreinterpretq_u32_f32(x.b)));
}
INLINE vpair load_i16(const void *from) {
    int16x8_t x = vreinterpretq_s16_u16(v16_load(from));
    return (vpair){vreinterpretq_f32_s32(vmovl_s16(vget_low_s16(x))),
                   vreinterpretq_f32_s32(vmovl_s16(vget_high_s16(x)))};
}
INLINE v16 v16_subs(v16 a, v16 b) { return vqsubq_u16(a, b); }
INLINE v16 v16_max(v16 a, v16 b) { return vmaxq_u16(a, b); }
INLINE unsigned v16_largest(v16 x) { return vmaxvq_u16(x); }
INLINE int any_nan(vpair x) {
    return vminvq_u32(vandq_u32(vceqq_f32(x.a, x.a), vceqq_f32(x.b, x.b))) == 0;
}

INLINE vd vd_zero(void) { return vdupq_n_f64(0); }
INLINE vd vd_add(vd a, vd b) { return vaddq_f64(a, b); }
INLINE vd vd_mul(vd a, vd b) { return vmulq_f64(a, b); }
INLINE void vd_store(double *x, vd v) { vst1q_f64(x, v); }
INLINE void widen(vd *out, vpair x) {
    out[0] = vcvt_f64_f32(vget_low_f32(x.a));
    out[1] = vcvt_high_f64_f32(x.a);
    out[2] = vcvt_f64_f32(vget_low_f32(x.b));
    out[3] = vcvt_high_f64_f32(x.b);
}

#else /* any other architecture: one element at a time */

#define VW 1
#define DW 1
typedef float vf;
typedef double vd;
typedef struct { uint16_t a, b; } v16;
typedef struct { vf a, b; } vpair;

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

INLINE vf vf_load(const float *x) { return *x; }
INLINE void vf_store(float *x, vf v) { *x = v; }
INLINE vf vf_set(float x) { return x; }
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_div(vf a, vf b) { return a / b; }
INLINE vf vf_sqrt(vf a) { return __builtin_sqrtf(a); }

INLINE v16 v16_load(const void *x) { v16 v; memcpy(&v, x, 4); return v; }
INLINE void v16_store(void *x, v16 v) { memcpy(x, &v, 4); }
INLINE void v16_stream(void *x, v16 v) { v16_store(x, v); }

INLINE vpair load_u16(const void *from) {
    v16 x = v16_load(from);
    return (vpair){float_of(x.a), float_of(x.b)};
}
INLINE vf one_nan(vf x) { return x == x ? x : float_of(0x7fc00000); }
INLINE v16 pack_upper(vpair x) { return (v16){(uint16_t)(bits_of(x.a) >> 16), (uint16_t)(bits_of(x.b) >> 16)}; }
/* See the x86-64 baseline above for these two. */
INLINE float widen_f16(uint16_t x) {
    uint32_t fields = (uint32_t)(x & 0x7fff) << 13;
    uint32_t value = bits_of(float_of(fields) * 0x1p112f);
    if (fields >= 0x7c00u << 13) value |= 0x7f800000;
    return float_of(value | (uint32_t)(x & 0x8000) << 16);
}
INLINE vpair load_f16(const void *from) {
    v16 x = v16_load(from);
    return (vpair){widen_f16(x.a), widen_f16(x.b)};
}
INLINE uint16_t narrow_f16(float x) {
    uint32_t absolute = bits_of(x) & 0x7fffffff, result;
    if (absolute >= 143u << 23) result = absolute > 0x7f800000 ? 0x7e00 : 0x7c00;
    else if (absolute < 113u << 23) result = bits_of(float_of(absolute) + 0.5f) - (126u << 23);
    else result = (absolute + 0xfff - (112u << 23) + (absolute >> 13 & 1)) >> 13;
    return (uint16_t)(result | (bits_of(x) >> 16 & 0x8000));
}
INLINE v16 to_f16(vpair x) { return (v16){narrow_f16(x.a), narrow_f16(x.b)}; }

INLINE vpair v16_upper(v16 x) { return (vpair){float_of((uint32_t)x.a << 16), float_of((uint32_t)x.b << 16)}; }
INLINE v16 v16_load_bytes(const void *x) { return (v16){((const uint8_t *)x)[0], ((const uint8_t *)x)[1]}; }
INLINE void v16_store_bytes(void *x, v16 v) {
    ((uint8_t *)x)[0] = (uint8_t)v.a;
    ((uint8_t *)x)[1] = (uint8_t)v.b;
}
INLINE v16 pack_lower(vpair x) { return (v16){(uint16_t)bits_of(x.a), (uint16_t)bits_of(x.b)}; }
INLINE vpair load_i16(const void *from) {
    v16 x = v16_load(from);
    return (vpair){float_of((uint32_t)(int16_t)x.a), float_of((uint32_t)(int16_t)x.b)};
}
INLINE uint16_t subs(uint16_t a, uint16_t b) { return a > b ? (uint16_t)(a - b) : 0; }
INLINE v16 v16_subs(v16 a, v16 b) { return (v16){subs(a.a, b.a), subs(a.b, b.b)}; }
INLINE v16 v16_max(v16 a, v16 b) { return (v16){a.a > b.a ? a.a : b.a, a.b > b.b ? a.b : b.b}; }
INLINE unsigned v16_largest(v16 x) { return x.a > x.b ? x.a : x.b; }
INLINE int any_nan(vpair x) { return x.a != x.a || x.b != x.b; }

INLINE vd vd_zero(void) { return 0; }
INLINE vd vd_add(vd a, vd b) { return a + b; }
INLINE vd vd_mul(vd a, vd b) { return a * b; }
INLINE void vd_store(double *x, vd v) { *x = v; }
INLINE void widen(vd *out, vpair x) { out[0] = x.a; out[1] = x.b; }

#endif

/* ---- for all: the bits of a vf, for the compiler's own integer operators */

typedef uint32_t vi __attribute__((vector_size(4 * VW)));
INLINE vi vi_of(vf x) { vi bits; memcpy(&bits, &x, sizeof bits); return bits; }
INLINE vf vf_of(vi bits) { vf x; memcpy(&x, &bits, sizeof x); return x; }

/* Likewise of a v16. */
typedef uint16_t vh __attribute__((vector_size(4 * VW)));
INLINE vh vh_of(v16 x) { vh lanes; memcpy(&lanes, &x, sizeof lanes); return lanes; }
INLINE v16 v16_of(vh lanes) { v16 x; memcpy(&x, &lanes, sizeof x); return x; }

INLINE vpair load_bf16(const void *x) {
    vpair low = load_u16(x);
    return (vpair){vf_of(vi_of(low.a) << 16), vf_of(vi_of(low.b) << 16)};
}
/* The last bit of the upper half, which decides a tie. */
INLINE vi odd_of(vi bits) { return bits >> 16 & 1; }
/* To nearest even: the bf16 is the upper half of the result. Needs one_nan before. */
INLINE vf round_bf16(vf x) { return vf_of(vi_of(x) + 0x7fff + odd_of(vi_of(x))); }
INLINE v16 to_bf16(vpair x) { return pack_upper((vpair){round_bf16(one_nan(x.a)), round_bf16(one_nan(x.b))}); }

/* ---- for all: a pair of any element type. `type` is a constant wherever these are called. */

#define PAIR (2 * VW)
#define PAIR_DOUBLES (PAIR / DW)

INLINE int64_t type_bytes(int type) {
    return type == OFFLOAD_F64 ? 8 : type == OFFLOAD_F32 ? 4 : type == OFFLOAD_U8 ? 1 : 2;
}

INLINE vpair pair_load(const void *x, int type) {
    const float *f = (const float *)x;
    if (type == OFFLOAD_F32) return (vpair){vf_load(f), vf_load(f + VW)};
    return type == OFFLOAD_BF16 ? load_bf16(x) : load_f16(x);
}
INLINE v16 pair_narrow(vpair x, int type) { return type == OFFLOAD_BF16 ? to_bf16(x) : to_f16(x); }
INLINE void pair_store(void *x, int type, vpair v) {
    if (type == OFFLOAD_F32) {
        vf_store((float *)x, v.a);
        vf_store((float *)x + VW, v.b);
    } else {
        v16_store(x, pair_narrow(v, type));
    }
}
INLINE const void *at(const void *x, int type, int64_t i) { return (const char *)x + i * type_bytes(type); }
INLINE void *at_out(void *x, int type, int64_t i) { return (char *)x + i * type_bytes(type); }

INLINE void pair_stream(void *x, int type, vpair v) {
    if (type == OFFLOAD_F32) {
        v16 bits;
        memcpy(&bits, &v.a, sizeof bits);
        v16_stream(x, bits);
        memcpy(&bits, &v.b, sizeof bits);
        v16_stream((float *)x + VW, bits);
    } else {
        v16_stream(x, pair_narrow(v, type));
    }
}

/* One prefetch a line of a group that lies `ahead` elements further on. */
INLINE void prefetch_group(const void *x, int type, int64_t ahead) {
    const char *line = (const char *)x + ahead * type_bytes(type);
    prefetch(line);
    if (type == OFFLOAD_F32) prefetch(line + 64);
}

/* ---- a kernel's symbol: KERNEL(name) { body }, with the parameters of kernels.h */

#define KERNEL(name)                                                                 \
    static OFFLOAD_CODE void name##_body(OFFLOAD_PARAMETERS);                        \
    OFFLOAD_EXPORT OFFLOAD_CODE void OFFLOAD_KERNEL(name)(OFFLOAD_PARAMETERS) {      \
        fp_state saved = fp_enter();                                                 \
        name##_body(tensors, types, first, n, scalars);                              \
        fp_leave(saved);                                                             \
    }                                                                                \
    static OFFLOAD_CODE void name##_body(OFFLOAD_PARAMETERS)

/* In a body: where tensor k has the element at position `first`. As an integer: position 0 may lie before the memory. */
#define TENSOR(k) tensor_at(tensors[k], types[k], first)
INLINE void *tensor_at(void *tensor, int type, int64_t i) {
    return type == OFFLOAD_NONE ? 0 : (void *)((uintptr_t)tensor + (uintptr_t)(i * type_bytes(type)));
}

#endif
