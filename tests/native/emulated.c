/* Calls kernels of a library that was built for another CPU than the tests', in an emulator. A call comes on stdin with
 * its memory, which goes back on stdout; emulated.py is the other end. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"
#include "pool.h"

struct call { /* emulated.py: CALL */
    char function[40];
    int64_t first, n, bytes, at[8]; /* at: where in the memory position 0 of each tensor is, or would be */
    int32_t types[8];
    char scalars[64];
};

/* What a caller may have chosen: rounding towards zero, denormals flushed, one NaN for all. */
static const uint64_t hostile = 3 << 22 | 1 << 24 | 1 << 25;

int main(int argc, char **argv) {
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : 0;
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    uint64_t (*fp_control)(void) = (uint64_t (*)(void))dlsym(library, "offload_fp_control");
    struct call call;
    while (fread(&call, sizeof call, 1, stdin) == 1) {
        char *memory = aligned_alloc(64, (size_t)(call.bytes + 63) / 64 * 64);
        offload_kernel *kernel = (offload_kernel *)dlsym(library, call.function);
        if (!kernel || !memory || fread(memory, (size_t)call.bytes, 1, stdin) != 1) return 2;
        void *tensors[8];
        for (int i = 0; i < 8; i++)
            tensors[i] = call.types[i] == OFFLOAD_NONE ? 0 : (void *)((uintptr_t)memory + (uintptr_t)call.at[i]);
        __asm__ volatile("msr fpcr, %0" : : "r"(hostile) : "memory");
        kernel(tensors, call.types, call.first, call.n, call.scalars);
        if (fp_control() != hostile) return 3;
        if (fwrite(memory, (size_t)call.bytes, 1, stdout) != 1 || fflush(stdout)) return 4;
        free(memory);
    }
    return 0;
}
