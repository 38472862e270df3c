/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_GPU_H
#define KVD_KERNELS_CUDA_GPU_H

/*
 * One GPU, ready to run our kernels: its primary context and the images that nvcc made from
 * kernels/cuda/ *.cu (kernels.def). All launches go through this file, with one argument: a struct
 * that the kernel takes by value and that C and CUDA share (see the method's header). Launches are
 * asynchronous; results are there once the stream has completed.
 *
 *      kernels/cuda/METHOD.h   argument structs, and gpu_OPERATION(gpu, stream, arguments): the interface for callers
 *      kernels/cuda/METHOD.c   checks arguments, chooses grids, calls gpu_launch
 *      kernels/cuda/METHOD.cu  the kernels, in terms of device.cuh
 *
 * Results: 0 or negative errno, the reason in gpu->why. A build without nvcc has no kernels:
 * gpu_launch then returns -ENOSYS.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/cuda.h"

enum gpu_image {
#define GPU_IMAGE(image) GPU_IMAGE_##image,
#define GPU_KERNEL(image, name)
#include "kernels/cuda/kernels.def"
#undef GPU_IMAGE
#undef GPU_KERNEL
        GPU_N_IMAGES
};

enum gpu_kernel {
#define GPU_IMAGE(image)
#define GPU_KERNEL(image, name) GPU_KERNEL_##name,
#include "kernels/cuda/kernels.def"
#undef GPU_IMAGE
#undef GPU_KERNEL
        GPU_N_KERNELS
};

struct gpu {
        const struct kvd_cuda *cuda;
        cu_device ordinal;
        /* the primary context, retained; current on the thread that called gpu_open */
        cu_context context;
        uint32_t multiprocessors;
        uint32_t capability;                /* 90: 9.0 */
        size_t l2_bytes, shared_bytes;      /* shared_bytes: maximum of one thread block */
        cu_library images[GPU_N_IMAGES];    /* owned; loaded at first use */
        cu_function kernels[GPU_N_KERNELS]; /* looked up at first use */
        size_t shared[GPU_N_KERNELS]; /* bytes of dynamic shared memory that each may use so far */
        char why[200];
};

/*
 * Opens a device for launching from the calling thread. The context stays current there until
 * gpu_close; other threads call gpu_enter. A struct gpu may be used by one thread at a time.
 * -ENODEV if there is no driver or no such device.
 */
int gpu_open(struct gpu *gpu, cu_device ordinal);
void gpu_close(struct gpu *gpu);
int gpu_enter(struct gpu *gpu);
void gpu_leave(struct gpu *gpu);

/*
 * Whether the driver accepts the kernels of this program: 0, or -ENOSYS or -ENOEXEC with the reason
 * in why.
 */
int gpu_has_kernels(struct gpu *gpu);

/* The thread blocks of a launch. */
struct gpu_grid {
        uint32_t x, y, z; /* number of blocks */
        uint32_t threads; /* threads per block, a multiple of 32 */
        size_t shared;    /* bytes of dynamic shared memory */
};

int gpu_launch(struct gpu *gpu, enum gpu_kernel kernel, struct gpu_grid grid, cu_stream stream,
               const void *arguments);

/*
 * Number of thread blocks of that kernel that run at once on the whole device: the size of a
 * persistent grid. 0 if it cannot run.
 */
uint32_t gpu_resident_blocks(struct gpu *gpu, enum gpu_kernel kernel, uint32_t threads,
                             size_t shared);

/* Stores a driver error in why and returns it as a negative errno; 0 for success. */
int gpu_check(struct gpu *gpu, cu_result error, const char *what);

/*
 * Blocks of a pool, as passed to every kernel that reads or writes blocks: block i is at base +
 * ids[i] * block_bytes, or not resident if ids[i] is GPU_NO_BLOCK. ids is in device memory.
 */
#define GPU_NO_BLOCK 0xffffffffu

struct gpu_blocks {
        cu_address base;
        uint64_t block_bytes;
        cu_address ids; /* const uint32_t * */
};

/* What a block holds. */
enum gpu_order { GPU_ORDER_HND = 1, GPU_ORDER_NHD = 2 }; /* the numbers of enum kvd_order */

struct gpu_block_shape { /* number: enum kvd_number */
        uint32_t layers, heads, tokens, dim;
        uint32_t order, number;
};

#endif
