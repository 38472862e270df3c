/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A GPU's context and our images in it. An image is loaded when one of its kernels is first
 * launched.
 */

#include "kernels/cuda/gpu.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/images.h"

/* The images of this program; those of other programs are NULL (images.h). */
#define GPU_IMAGE(image) extern const uint8_t gpu_image_##image[] __attribute__((weak));
#define GPU_KERNEL(image, name)
#include "kernels/cuda/kernels.def"
#undef GPU_IMAGE
#undef GPU_KERNEL

static const struct {
        const char *name;
        const uint8_t *data;
} images[GPU_N_IMAGES] = {
#define GPU_IMAGE(image) {#image, gpu_image_##image},
#define GPU_KERNEL(image, name)
#include "kernels/cuda/kernels.def"
#undef GPU_IMAGE
#undef GPU_KERNEL
};

static const struct {
        const char *name;
        enum gpu_image image;
} kernels[GPU_N_KERNELS] = {
#define GPU_IMAGE(image)
#define GPU_KERNEL(image, name) {"kvd_" #name, GPU_IMAGE_##image},
#include "kernels/cuda/kernels.def"
#undef GPU_IMAGE
#undef GPU_KERNEL
};

static _printf_(3, 4) int because(struct gpu *gpu, int error, const char *format, ...) {
        va_list args;

        va_start(args, format);
        vsnprintf(gpu->why, sizeof gpu->why, format, args);
        va_end(args);
        return error;
}

int gpu_check(struct gpu *gpu, cu_result error, const char *what) {
        char words[160];

        if (error == CU_OK)
                return 0;
        return because(gpu, kvd_cuda_errno(error), "%s: %s", what,
                       kvd_cuda_why(gpu->cuda, error, words, sizeof words));
}

/* ---- device ---------------------------------------------------------------------------------- */

static int attribute(struct gpu *gpu, int which) {
        int value = 0;

        return gpu->cuda->cuDeviceGetAttribute(&value, which, gpu->ordinal) == CU_OK ? value : 0;
}

static int find_device(struct gpu *gpu, cu_device ordinal) {
        int r = gpu_check(gpu, gpu->cuda->cuInit(0), "cuInit");

        if (r == 0)
                r = gpu_check(gpu, gpu->cuda->cuDeviceGet(&gpu->ordinal, ordinal), "cuDeviceGet");
        if (r < 0)
                return r == -EINVAL ? -ENODEV : r;
        gpu->multiprocessors = (uint32_t)attribute(gpu, CU_ATTR_MULTIPROCESSORS);
        gpu->capability = (uint32_t)(10 * attribute(gpu, CU_ATTR_CAPABILITY_MAJOR) +
                                     attribute(gpu, CU_ATTR_CAPABILITY_MINOR));
        gpu->l2_bytes = (size_t)attribute(gpu, CU_ATTR_L2_BYTES);
        gpu->shared_bytes = (size_t)attribute(gpu, CU_ATTR_SHARED_PER_BLOCK_OPTIN);
        return 0;
}

int gpu_open(struct gpu *gpu, cu_device ordinal) {
        const char *why = NULL;
        cu_context context;
        int r;

        *gpu = (struct gpu){.cuda = kvd_cuda_load(&why)};
        if (!gpu->cuda)
                return because(gpu, -ENODEV, "%s", why);
        r = find_device(gpu, ordinal);
        if (r < 0)
                return r;
        r = gpu_check(gpu, gpu->cuda->cuDevicePrimaryCtxRetain(&context, gpu->ordinal),
                      "cuDevicePrimaryCtxRetain");
        if (r < 0)
                return r;
        gpu->context = context;
        r = gpu_enter(gpu);
        if (r < 0) {
                gpu->cuda->cuDevicePrimaryCtxRelease(gpu->ordinal);
                gpu->context = NULL;
        }
        return r;
}

int gpu_enter(struct gpu *gpu) {
        return gpu_check(gpu, gpu->cuda->cuCtxPushCurrent(gpu->context), "cuCtxPushCurrent");
}

void gpu_leave(struct gpu *gpu) {
        cu_context context = NULL;

        if (gpu->cuda->cuCtxGetCurrent(&context) == CU_OK && context == gpu->context)
                gpu->cuda->cuCtxPopCurrent(&context);
}

/* Errors of the driver are ignored: there is nothing left to do about them. */
void gpu_close(struct gpu *gpu) {
        if (!gpu->context)
                return;
        for (size_t i = 0; i < GPU_N_IMAGES; i++)
                if (gpu->images[i])
                        gpu->cuda->cuLibraryUnload(gpu->images[i]);
        gpu_leave(gpu);
        gpu->cuda->cuDevicePrimaryCtxRelease(gpu->ordinal);
        *gpu = (struct gpu){0};
}

/* ---- kernels --------------------------------------------------------------------------------- */

static int load_image(struct gpu *gpu, enum gpu_image image) {
        cu_library library;
        char what[64];
        cu_result error;

        if (gpu->images[image])
                return 0;
        if (!images[image].data)
                return because(gpu, -ENOSYS, "this program has no kernels of %s",
                               images[image].name);
        error = gpu->cuda->cuLibraryLoadData(&library, images[image].data, NULL, NULL, 0, NULL,
                                             NULL, 0);
        if (error == CU_OK) {
                gpu->images[image] = library;
                return 0;
        }
        if (memcmp(images[image].data, GPU_NOT_BUILT, sizeof GPU_NOT_BUILT - 1) == 0 &&
            error != CU_OUT_OF_MEMORY)
                return because(gpu, -ENOSYS, "this build has no CUDA kernels: nvcc was not found");
        snprintf(what, sizeof what, "kernels of %s for capability %u.%u", images[image].name,
                 gpu->capability / 10, gpu->capability % 10);
        return gpu_check(gpu, error, what);
}

static int find_kernel(struct gpu *gpu, enum gpu_kernel kernel) {
        cu_kernel found;
        cu_function function;
        int r;

        if (gpu->kernels[kernel])
                return 0;
        r = load_image(gpu, kernels[kernel].image);
        if (r < 0)
                return r;
        r = gpu_check(gpu,
                      gpu->cuda->cuLibraryGetKernel(&found, gpu->images[kernels[kernel].image],
                                                    kernels[kernel].name),
                      kernels[kernel].name);
        if (r < 0)
                return r;
        r = gpu_check(gpu, gpu->cuda->cuKernelGetFunction(&function, found), kernels[kernel].name);
        if (r < 0)
                return r;
        gpu->kernels[kernel] = function;
        return 0;
}

/* Raises a function's limit of dynamic shared memory when a launch first needs more. */
static int prepare(struct gpu *gpu, enum gpu_kernel kernel, size_t shared) {
        const char *name = kernels[kernel].name;
        int r = find_kernel(gpu, kernel);

        if (r < 0 || shared <= gpu->shared[kernel])
                return r;
        if (shared > gpu->shared_bytes)
                return because(gpu, -EINVAL,
                               "%s: %zu bytes of shared memory, and a block may have %zu", name,
                               shared, gpu->shared_bytes);
        r = gpu_check(gpu,
                      gpu->cuda->cuFuncSetAttribute(gpu->kernels[kernel],
                                                    CU_FUNC_DYNAMIC_SHARED_BYTES, (int)shared),
                      name);
        if (r == -EINVAL)
                return because(
                        gpu, r,
                        "%s: %zu bytes of shared memory in addition to its static memory, and a block may have %zu",
                        name, shared, gpu->shared_bytes);
        if (r == 0)
                gpu->shared[kernel] = shared;
        return r;
}

int gpu_has_kernels(struct gpu *gpu) {
        for (enum gpu_image image = 0; image < GPU_N_IMAGES; image++) {
                int r = images[image].data ? load_image(gpu, image) : 0;

                if (r < 0)
                        return r;
        }
        return 0;
}

int gpu_launch(struct gpu *gpu, enum gpu_kernel kernel, struct gpu_grid grid, cu_stream stream,
               const void *arguments) {
        void *parameters[] = {(void *)arguments};
        int r = prepare(gpu, kernel, grid.shared);

        if (r < 0)
                return r;
        return gpu_check(gpu,
                         gpu->cuda->cuLaunchKernel(gpu->kernels[kernel], grid.x, grid.y, grid.z,
                                                   grid.threads, 1, 1, (unsigned)grid.shared,
                                                   stream, parameters, NULL),
                         kernels[kernel].name);
}

uint32_t gpu_resident_blocks(struct gpu *gpu, enum gpu_kernel kernel, uint32_t threads,
                             size_t shared) {
        int blocks = 0;

        if (prepare(gpu, kernel, shared) < 0)
                return 0;
        if (gpu_check(gpu,
                      gpu->cuda->cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks,
                                                                             gpu->kernels[kernel],
                                                                             (int)threads, shared),
                      kernels[kernel].name) < 0)
                return 0;
        return (uint32_t)blocks * gpu->multiprocessors;
}
