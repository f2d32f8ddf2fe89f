/* Which variants this library holds and which of them this CPU and operating system can run.
 *
 * CPUID is asked here, not in Python, because running a variant on a CPU without it kills the
 * process: XCR0 must also say that the system saves the wide registers. */
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

OFFLOAD_EXPORT int offload_abi(void) { return OFFLOAD_ABI; }

int64_t offload_ahead;

/* Intel's cores gain from 128 elements on; for AMD's Zen anything from 160 on was slower than no prefetch. */
static int64_t usual_ahead(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid(0, &a, &b, &c, &d) && b == 0x756e6547) return 192; /* "Genu" */
#endif
    return 96;
}

/* Sets offload_ahead; below 0: as this CPU wants it. Returns it. Not while a kernel runs. */
OFFLOAD_EXPORT int64_t offload_prefetch(int64_t elements) {
    offload_ahead = elements < 0 ? usual_ahead() : elements;
    return offload_ahead;
}

#if defined(OFFLOAD_HAVE_AVX2) || defined(OFFLOAD_HAVE_AVX512)

static int has(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

/* 0: neither; 1: AVX2 and F16C; 2: AVX-512 F, DQ, BW and VL as well. */
static int x86_level(void) {
    unsigned a, b, c, d, xcr0, xcr0_high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!has(c, 1u << 27 | 1u << 28 | 1u << 29)) return 0; /* OSXSAVE, AVX, F16C */
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
    if (!has(xcr0, 0x6)) return 0; /* xmm and ymm state */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, 1u << 5)) return 0; /* AVX2 */
    if (!has(b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31)) return 1;
    return has(xcr0, 0xe6) ? 2 : 1; /* opmask and zmm state */
}
#endif

/* The i-th variant this machine can run, best first; NULL past the last. */
OFFLOAD_EXPORT const char *offload_variant(int i) {
    const char *names[4];
    int count = 0;
#if defined(OFFLOAD_HAVE_AVX512)
    if (x86_level() >= 2) names[count++] = "avx512";
#endif
#if defined(OFFLOAD_HAVE_AVX2)
    if (x86_level() >= 1) names[count++] = "avx2";
#endif
#if defined(OFFLOAD_HAVE_NEON)
    names[count++] = "neon";
#endif
#if defined(OFFLOAD_HAVE_BASELINE)
    names[count++] = "baseline";
#endif
    return i >= 0 && i < count ? names[i] : 0;
}

/* The calling thread's floating-point control register: tests see that kernels give it back. */
OFFLOAD_EXPORT uint64_t offload_fp_control(void) {
#if defined(__x86_64__)
    unsigned value;
    __asm__ volatile("stmxcsr %0" : "=m"(value));
    return value;
#elif defined(__aarch64__)
    uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
#else
    return 0;
#endif
}
