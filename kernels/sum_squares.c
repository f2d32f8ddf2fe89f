/* fp64 sum of squares in blocks cut at fixed positions, so that neither chunk, partition nor thread
 * changes a bit; and the finite check, since a block's sum is finite exactly when all its elements
 * are (an fp32 squared is exact in fp64 and cannot overflow it).
 *
 * A block's part is cut into groups of 1024 elements. In each, lane j of 32 adds elements j, j+32, ...
 * in turn. Then the groups' lanes fold: 1024, 512, ... 1. So a device adds a few wide rows, not many
 * narrow ones. Groups that a part lacks would add +0.0, which changes nothing. */
#include "vec.h"

#define AHEAD 1024
#define SUM_GROUP 1024
#define SUM_GROUPS (OFFLOAD_SUM_BLOCK / SUM_GROUP)

INLINE void add_group(vd *lanes, const void *x, int type) {
    for (int k = 0; k < GROUP; k += PAIR) {
        vd wide[PAIR_DOUBLES];
        widen(wide, pair_load(at(x, type, k), type));
        for (int j = 0; j < PAIR_DOUBLES; j++) {
            vd *lane = &lanes[k / DW + j];
            *lane = vd_add(*lane, vd_mul(wide[j], wide[j]));
        }
    }
}

INLINE void sum_group(const void *x, int type, int64_t n, double *sums) {
    vd lanes[GROUP / DW];
    int64_t i = 0;
    for (int j = 0; j < GROUP / DW; j++) lanes[j] = vd_zero();
    for (; i + GROUP <= n; i += GROUP) {
        prefetch_group(at(x, type, i), type, AHEAD);
        add_group(lanes, at(x, type, i), type);
    }
    if (i < n) {
        /* A padding zero adds +0.0 to a lane, which changes nothing. */
        float rest[GROUP] = {0};
        memcpy(rest, at(x, type, i), (size_t)((n - i) * type_bytes(type)));
        add_group(lanes, rest, type);
    }
    for (int j = 0; j < GROUP / DW; j++) vd_store(sums + j * DW, lanes[j]);
}

typedef void group_function(const void *, int64_t, double *);
static OFFLOAD_CODE void group_f32(const void *x, int64_t n, double *sums) { sum_group(x, OFFLOAD_F32, n, sums); }
static OFFLOAD_CODE void group_bf16(const void *x, int64_t n, double *sums) { sum_group(x, OFFLOAD_BF16, n, sums); }
static OFFLOAD_CODE void group_f16(const void *x, int64_t n, double *sums) { sum_group(x, OFFLOAD_F16, n, sums); }
static group_function *const table[3] = {group_f32, group_bf16, group_f16};

INLINE void fold(double *restrict low, const double *restrict high, int64_t n) {
    for (int64_t j = 0; j < n; j++) low[j] += high[j];
}

static OFFLOAD_CODE double sum_part(const void *x, int type, int64_t n) {
    double sums[SUM_GROUPS * GROUP];
    int64_t groups = (n + SUM_GROUP - 1) / SUM_GROUP, all = 1;
    for (int64_t k = 0; k < groups; k++) {
        int64_t start = k * SUM_GROUP, count = n - start < SUM_GROUP ? n - start : SUM_GROUP;
        table[type](at(x, type, start), count, sums + k * GROUP);
    }
    while (all < groups) all *= 2;
    for (int64_t j = groups * GROUP; j < all * GROUP; j++) sums[j] = 0;
    for (int64_t width = all * GROUP / 2; width > 0; width /= 2) fold(sums, sums + width, width);
    return sums[0];
}

/* out: one fp64 for each block touched. */
KERNEL(sum_squares) {
    const char *x = TENSOR(0);
    double *out = (double *)tensors[1] + first / OFFLOAD_SUM_BLOCK;
    for (int64_t i = 0; i < n; out++) {
        int64_t count = OFFLOAD_SUM_BLOCK - (first + i) % OFFLOAD_SUM_BLOCK;
        if (count > n - i) count = n - i;
        *out = sum_part(at(x, types[0], i), types[0], count);
        i += count;
    }
}
