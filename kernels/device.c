/* The device's kernels on the CPU, one block of a launch after the other: so tests see their bits without a GPU. */
#include "vec.h"

#include "device_kernels.h"

_Static_assert(sizeof(device_scalars) == sizeof(struct offload_adam_scalars), "device_kernels.h has another structure");
_Static_assert(sizeof(device_dithered_scalars) == sizeof(struct offload_dithered_scalars),
               "device_kernels.h has another structure");
_Static_assert((int)DEVICE_NONE == (int)OFFLOAD_NONE && (int)DEVICE_F16 == (int)OFFLOAD_F16 &&
                   (int)DEVICE_U8 == (int)OFFLOAD_U8 && (int)DEVICE_SUM_BLOCK == OFFLOAD_SUM_BLOCK &&
                   (int)DEVICE_DITHER_BLOCK == (int)OFFLOAD_DITHER_BLOCK,
               "device_kernels.h has other numbers");

#define ARGUMENT(type, i) (*(type *)arguments[i])

/* Args: arguments: the addresses of the kernel's arguments, as a driver takes them; is_backwards: the last thread of a
 * block runs first. Returns 1 if there is no such kernel. */
OFFLOAD_EXPORT int32_t offload_device_launch(const char *kernel, int64_t blocks, int32_t is_backwards,
                                             void **arguments) {
    fp_state saved = fp_enter();
    int32_t error = 0;
    if (strcmp(kernel, "offload_device_adam") == 0)
        for (int64_t block = 0; block < blocks; block++)
            offload_device_adam(block, is_backwards, ARGUMENT(device_call, 0), ARGUMENT(device_scalars, 1));
    else if (strcmp(kernel, "offload_device_adam_dithered") == 0)
        for (int64_t block = 0; block < blocks; block++)
            offload_device_adam_dithered(block, is_backwards, ARGUMENT(device_call, 0),
                                         ARGUMENT(device_dithered_scalars, 1));
    else if (strcmp(kernel, "offload_device_sum_squares") == 0)
        for (int64_t block = 0; block < blocks; block++)
            offload_device_sum_squares(block, is_backwards, ARGUMENT(device_call, 0));
    else error = 1;
    fp_leave(saved);
    return error;
}
