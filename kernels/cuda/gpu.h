/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_GPU_H
#define KVD_KERNELS_CUDA_GPU_H

/*
 * One GPU, ready to run our kernels: its primary context and the images that nvcc made of
 * kernels/cuda/ *.cu (kernels.def). Everything is launched here, with one argument: a struct that
 * the kernel takes by value and that C and CUDA share (the header of its method). Launches do not
 * wait; results are there when the stream has passed.
 *
 *      kernels/cuda/METHOD.h   argument structs, and gpu_OPERATION(gpu, stream, arguments): what callers use
 *      kernels/cuda/METHOD.c   checks arguments, chooses grids, calls gpu_launch
 *      kernels/cuda/METHOD.cu  the kernels, in terms of device.cuh
 *
 * Results: 0 or negative errno, the reason in gpu->why. A build without nvcc has no kernels:
 * gpu_launch returns -ENOSYS and says so.
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
        /* primary, retained; current on the thread that called gpu_open */
        cu_context context;
        uint32_t multiprocessors;
        uint32_t capability;            /* 90: 9.0 */
        size_t l2_bytes, shared_bytes;  /* shared memory that one block may have */
        cu_library images[GPU_N_IMAGES];     /* owned; loaded at first use */
        cu_function kernels[GPU_N_KERNELS];  /* looked up at first use */
        size_t shared[GPU_N_KERNELS];        /* dynamic shared memory that each is allowed by now */
        char why[200];
};

/*
 * Opens a device for launching from the calling thread (the context stays current there until
 * gpu_close; other threads call gpu_enter). A struct gpu belongs to one thread at a time. -ENODEV:
 * no driver, no such device.
 */
int gpu_open(struct gpu *gpu, cu_device ordinal);
void gpu_close(struct gpu *gpu);
int gpu_enter(struct gpu *gpu);
void gpu_leave(struct gpu *gpu);

/*
 * Does this driver take the kernels of this program? 0, or -ENOSYS, -ENOEXEC with the reason in
 * why.
 */
int gpu_has_kernels(struct gpu *gpu);

/* Blocks of threads that one launch makes. */
struct gpu_grid {
        uint32_t x, y, z;    /* blocks */
        uint32_t threads;    /* of a block, a multiple of 32 */
        size_t shared;       /* bytes of dynamic shared memory */
};

int gpu_launch(struct gpu *gpu, enum gpu_kernel kernel, struct gpu_grid grid, cu_stream stream,
               const void *arguments);

/*
 * Blocks of that kernel that run at once on the whole device: the size of a persistent grid. 0: it
 * cannot run.
 */
uint32_t gpu_resident_blocks(struct gpu *gpu, enum gpu_kernel kernel, uint32_t threads,
                             size_t shared);

/* Notes a driver's error in why and returns its errno; 0 stays 0. */
int gpu_check(struct gpu *gpu, cu_result error, const char *what);

/*
 * Blocks of a pool, as every kernel that reads or writes blocks takes them: block i is at base +
 * ids[i] * block_bytes; GPU_NO_BLOCK is not resident. ids lies in device memory.
 */
#define GPU_NO_BLOCK 0xffffffffu

struct gpu_blocks {
        cu_address base;
        uint64_t block_bytes;
        cu_address ids;      /* const uint32_t * */
};

#endif
