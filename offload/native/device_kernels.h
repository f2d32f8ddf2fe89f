/* Adam and the sum of squares for a device: one launch each, with the bits of adam.c, adam_dithered.c and sum_squares.c
 * in kernels/.
 *
 * One text for two compilers. NVRTC compiles it at run time as CUDA C++, without any header. The C compiler compiles it
 * into the kernel library (kernels/device.c), where a loop runs one block after the other: so tests find wrong bits
 * without a GPU.
 *
 * A kernel is a sequence of phases, EACH_THREAD(t, n) { ... }: n threads run the body, in any order, and the next phase
 * begins when all have ended it. So a barrier cannot be forgotten. Neither break nor return may leave a phase. */
#ifndef OFFLOAD_DEVICE_KERNELS_H
#define OFFLOAD_DEVICE_KERNELS_H

/* Element types; as in kernels.h. */
enum { DEVICE_F32 = 0, DEVICE_BF16 = 1, DEVICE_F16 = 2, DEVICE_NONE = 3, DEVICE_U8 = 6 };

enum { DEVICE_ADAM_THREADS = 256, DEVICE_SUM_THREADS = 1024 };

/* What every kernel gets, and what means the same as in kernels.h; then come the scalars, if it has some. */
enum { DEVICE_TENSORS = 8 };
typedef struct {
    void *tensors[DEVICE_TENSORS];
    int types[DEVICE_TENSORS];
    long long first, n;
} device_call;

/* kernels.h: struct offload_adam_scalars */
typedef struct {
    float scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2;
    float neg_step_size, sqrt_bias_correction2, eps;
    int add_decay;
} device_scalars;

/* kernels.h: struct offload_dithered_scalars */
typedef struct {
    device_scalars adam;
    long long step;
} device_dithered_scalars;

#ifdef __CUDACC__
#define INSIDE static __device__ __forceinline__
#define DEVICE_KERNEL(name, threads, ...) extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
#define SHARED __shared__
#define BLOCK ((long long)blockIdx.x)
#define EACH_THREAD(t, threads) for (int t = (int)threadIdx.x, t##_runs = 1; t##_runs; t##_runs = 0, __syncthreads())
#define EXACT_SQRT(x) __fsqrt_rn(x)
#define EXACT_DIV(x, y) __fdiv_rn(x, y)
#else
/* Its first two arguments say which block runs, and whether its last thread comes first. */
#define INSIDE static inline
#define DEVICE_KERNEL(name, threads, ...) static void name(long long block, int is_backwards, __VA_ARGS__)
#define SHARED
#define BLOCK block
#define EACH_THREAD(t, threads) \
    for (int t##_at = 0, t = is_backwards ? (threads) - 1 : 0; t##_at < (threads); t##_at++, t += is_backwards ? -1 : 1)
#define EXACT_SQRT(x) __builtin_sqrtf(x)
#define EXACT_DIV(x, y) ((x) / (y))
#endif

/* ---- 16-bit numbers, in integer arithmetic: a device's headers and a CPU's instructions differ */

typedef union {
    float number;
    unsigned bits;
} device_word;

INSIDE float device_float(unsigned bits) {
    device_word word;
    word.bits = bits;
    return word.number;
}

INSIDE unsigned device_bits(float number) {
    device_word word;
    word.number = number;
    return word.bits;
}

INSIDE float device_from_f16(unsigned x) {
    unsigned sign = (x & 0x8000u) << 16, exponent = x >> 10 & 0x1fu, fraction = x & 0x3ffu;
    if (exponent == 0) /* zero or denormal: fraction * 2^-24, a normal fp32 */
        return device_float(device_bits((float)fraction * 5.9604644775390625e-8f) | sign);
    if (exponent == 31) return device_float(sign | 0x7f800000u | fraction << 13);
    return device_float(sign | (exponent + 112) << 23 | fraction << 13);
}

/* x shifted to the right by 1 to 31 bits, rounded to nearest even. */
INSIDE unsigned device_shift(unsigned x, unsigned count) {
    return (x + (1u << (count - 1)) - 1u + (x >> count & 1u)) >> count;
}

INSIDE unsigned device_to_f16(float number) {
    unsigned bits = device_bits(number), sign = bits >> 16 & 0x8000u, x = bits & 0x7fffffffu;
    if (x > 0x7f800000u) return sign | 0x7e00u;               /* NaN */
    if (x >= 0x47800000u) return sign | 0x7c00u;              /* from 2^16 on: Inf */
    if (x >= 0x38800000u) return sign | device_shift(x - (112u << 23), 13); /* rounds up to Inf, too */
    if (x < 0x33000000u) return sign;                         /* below 2^-25: zero */
    /* A denormal: so many of 2^-24. */
    return sign | device_shift((x & 0x7fffffu) | 0x800000u, 126u - (x >> 23));
}

INSIDE unsigned device_to_bf16(float number) {
    unsigned x = device_bits(number);
    return (x & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : device_shift(x, 16);
}

INSIDE float device_load(const void *from, int type, long long i) {
    if (type == DEVICE_F32) return ((const float *)from)[i];
    if (type == DEVICE_BF16) return device_float((unsigned)((const unsigned short *)from)[i] << 16);
    return device_from_f16(((const unsigned short *)from)[i]);
}

/* ---- kernels */

INSIDE void device_store(void *to, int type, long long i, float x) {
    if (type == DEVICE_F32) ((float *)to)[i] = x;
    if (type == DEVICE_BF16) ((unsigned short *)to)[i] = (unsigned short)device_to_bf16(x);
    if (type == DEVICE_F16) ((unsigned short *)to)[i] = (unsigned short)device_to_f16(x);
}

typedef struct {
    float p, m, v;
} device_element;

/* As adam.h. */
INSIDE device_element device_step(device_element x, float g, device_scalars c) {
    g = g * c.scale;
    if (c.add_decay) g = g + c.weight_decay * x.p;
    else x.p = x.p * c.decay;
    x.m = x.m + c.one_minus_beta1 * (g - x.m);
    x.v = x.v * c.beta2 + (c.one_minus_beta2 * g) * g;
    x.p = x.p + EXACT_DIV(c.neg_step_size * x.m, EXACT_DIV(EXACT_SQRT(x.v), c.sqrt_bias_correction2) + c.eps);
    return x;
}

/* As adam.c. `out` may be the memory of a grad of its size. */
DEVICE_KERNEL(offload_device_adam, DEVICE_ADAM_THREADS, device_call call, device_scalars c) {
    float *master = (float *)call.tensors[0], *exp_avg = (float *)call.tensors[1], *exp_avg_sq = (float *)call.tensors[2];
    EACH_THREAD(t, DEVICE_ADAM_THREADS) {
        long long i = call.first + BLOCK * DEVICE_ADAM_THREADS + t;
        if (i < call.first + call.n) {
            device_element x;
            x.p = master[i], x.m = exp_avg[i], x.v = exp_avg_sq[i];
            x = device_step(x, device_load(call.tensors[3], call.types[3], i), c);
            master[i] = x.p;
            exp_avg[i] = x.m;
            exp_avg_sq[i] = x.v;
            device_store(call.tensors[4], call.types[4], i, x.p);
        }
    }
}

/* ---- moments of one or two bytes, as dither.h has them */

enum { DEVICE_DITHER_BLOCK = 64 };

INSIDE unsigned device_dither(long long position, long long step) {
    unsigned long long z = ((unsigned long long)position / DEVICE_DITHER_BLOCK + 1) * 0x9e3779b97f4a7c15ull +
                           (unsigned long long)step * 0xd1b54a32d192ed03ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (unsigned)((z ^ z >> 31) >> 32) + (unsigned)(position % DEVICE_DITHER_BLOCK) * 0x9e3779b9u;
}

INSIDE unsigned device_one_nan(float x) {
    unsigned bits = device_bits(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

INSIDE float device_moment(device_call call, int which, long long i) {
    unsigned code, scale, magnitude;
    if (call.types[2 + which] == DEVICE_BF16)
        return device_float((unsigned)((const unsigned short *)call.tensors[2 + which])[i] << 16);
    code = ((const unsigned char *)call.tensors[2 + which])[i];
    scale = ((const unsigned char *)call.tensors[4 + which])[i / DEVICE_DITHER_BLOCK];
    magnitude = which == 0 ? code & 0x7fu : code;
    if (which == 1) return device_float((magnitude << 20) + (scale << 23));
    return device_float((magnitude ? (magnitude << 20) + (scale << 23) : 0u) | (code & 0x80u) << 24);
}

/* As adam_dithered.c, with whole masters. A block of the launch takes several blocks of positions. */
DEVICE_KERNEL(offload_device_adam_dithered, DEVICE_ADAM_THREADS, device_call call, device_dithered_scalars c) {
    SHARED unsigned rounded[2][DEVICE_ADAM_THREADS], largest[2][DEVICE_ADAM_THREADS];
    float *master = (float *)call.tensors[0];
    int is_coded = call.types[2] == DEVICE_U8;
    EACH_THREAD(t, DEVICE_ADAM_THREADS) {
        long long i = call.first + BLOCK * DEVICE_ADAM_THREADS + t;
        rounded[0][t] = rounded[1][t] = largest[0][t] = largest[1][t] = 0;
        if (i < call.first + call.n) {
            device_element x;
            unsigned p, random = device_dither(i, c.step);
            x.p = master[i], x.m = device_moment(call, 0, i), x.v = device_moment(call, 1, i);
            x = device_step(x, device_load(call.tensors[6], call.types[6], i), c.adam);
            p = device_one_nan(x.p);
            if (call.types[7] == DEVICE_BF16) p -= (p & 0x1ffffu) == 0x8000u;
            master[i] = device_float(p);
            device_store(call.tensors[7], call.types[7], i, device_float(p));
            rounded[0][t] = device_one_nan(x.m) + (random >> (is_coded ? 12 : 16));
            rounded[1][t] = device_one_nan(x.v) + (random >> (is_coded ? 12 : 16));
            largest[0][t] = (rounded[0][t] & 0x7fffffffu) >> 20;
            largest[1][t] = rounded[1][t] >> 20;
            if (!is_coded) {
                ((unsigned short *)call.tensors[2])[i] = (unsigned short)(rounded[0][t] >> 16);
                ((unsigned short *)call.tensors[3])[i] = (unsigned short)(rounded[1][t] >> 16);
            }
        }
    }
    if (is_coded) {
        for (int width = DEVICE_DITHER_BLOCK / 2; width > 0; width /= 2) {
            EACH_THREAD(t, DEVICE_ADAM_THREADS) {
                if (t % DEVICE_DITHER_BLOCK < width) {
                    for (int which = 0; which < 2; which++)
                        if (largest[which][t] < largest[which][t + width]) largest[which][t] = largest[which][t + width];
                }
            }
        }
        EACH_THREAD(t, DEVICE_ADAM_THREADS) {
            long long i = call.first + BLOCK * DEVICE_ADAM_THREADS + t;
            if (i < call.first + call.n) {
                for (int which = 0; which < 2; which++) {
                    int exponent = (int)(largest[which][t - t % DEVICE_DITHER_BLOCK] >> 3) - (which == 0 ? 15 : 31);
                    int scale = exponent > 0 ? exponent : 0;
                    int code = (int)((rounded[which][t] & 0x7fffffffu) >> 20) - 8 * scale;
                    unsigned sign = which == 0 ? rounded[0][t] >> 24 & 0x80u : 0u;
                    ((unsigned char *)call.tensors[2 + which])[i] = (unsigned char)((code > 0 ? (unsigned)code : 0u) | sign);
                    if (t % DEVICE_DITHER_BLOCK == 0)
                        ((unsigned char *)call.tensors[4 + which])[i / DEVICE_DITHER_BLOCK] = (unsigned char)scale;
                }
            }
        }
    }
}

enum { DEVICE_SUM_BLOCK = 65536, DEVICE_SUM_GROUP = 1024, DEVICE_SUM_LANES = 32 };

/* What lane `lane` of 2048 has of n elements from position `first` on: element lane, lane + 32, ... of its group. */
INSIDE double device_lane(const void *x, int type, long long first, long long n, int lane) {
    int start = lane / DEVICE_SUM_LANES * DEVICE_SUM_GROUP + lane % DEVICE_SUM_LANES;
    double sum = 0;
    for (int i = start; i < start + DEVICE_SUM_GROUP; i += DEVICE_SUM_LANES) {
        if (i < n) {
            double wide = (double)device_load(x, type, first + i);
            sum = sum + wide * wide;
        }
    }
    return sum;
}

/* As sum_squares.c. A block of the launch takes a block of positions. */
DEVICE_KERNEL(offload_device_sum_squares, DEVICE_SUM_THREADS, device_call call) {
    SHARED double sums[DEVICE_SUM_THREADS];
    const void *x = call.tensors[0];
    int type = call.types[0];
    long long at = call.first / DEVICE_SUM_BLOCK + BLOCK;
    long long low = at * DEVICE_SUM_BLOCK, high = low + DEVICE_SUM_BLOCK;
    if (low < call.first) low = call.first;
    if (high > call.first + call.n) high = call.first + call.n;
    EACH_THREAD(t, DEVICE_SUM_THREADS) {
        sums[t] = device_lane(x, type, low, high - low, t) + device_lane(x, type, low, high - low, t + DEVICE_SUM_THREADS);
    }
    for (int width = DEVICE_SUM_THREADS / 2; width > 0; width /= 2) {
        EACH_THREAD(t, DEVICE_SUM_THREADS) {
            if (t < width) sums[t] = sums[t] + sums[t + width];
        }
    }
    EACH_THREAD(t, DEVICE_SUM_THREADS) {
        if (t == 0) ((double *)call.tensors[1])[at] = sums[0];
    }
}

#endif
