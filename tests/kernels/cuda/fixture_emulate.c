/* SPDX-License-Identifier: Apache-2.0 */
/* No driver, no GPU: gpu.h on this processor */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/fakecuda/emulate.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/fixture.h"

#define ALIGNMENT 256u

static const char *const names[] = {
#define GPU_IMAGE(image)
#define GPU_KERNEL(image, name) "kvd_" #name,
#include "kernels/cuda/kernels.def"
#undef GPU_IMAGE
#undef GPU_KERNEL
};

/* ---- gpu.h -------------------------------------------------------------------------------------------------------- */

int gpu_open(struct gpu *gpu, cu_device ordinal) {
        *gpu = (struct gpu){.multiprocessors = 4, .capability = 90, .l2_bytes = 1 << 20,
                            .shared_bytes = EMULATE_MOST_SHARED};
        return ordinal == 0 ? 0 : -ENODEV;
}

void gpu_close(struct gpu *gpu) {
        memset(gpu, 0, sizeof *gpu);
}

int gpu_has_kernels(struct gpu *gpu) {
        return 0;
}

int gpu_launch(struct gpu *gpu, enum gpu_kernel kernel, struct gpu_grid grid, cu_stream stream, const void *arguments) {
        const struct fake_kernel *k = fake_kernel_find(names[kernel]);
        struct fake_launch launch = {{grid.x, grid.y, grid.z}, {grid.threads, 1, 1}, grid.shared};

        if (!k || grid.threads > k->threads || grid.threads % 32 || !grid.x || !grid.y || !grid.z) {
                snprintf(gpu->why, sizeof gpu->why, "%s: no such kernel, or no such grid", names[kernel]);
                return -EINVAL;
        }
        k->run(&launch, arguments);
        return 0;
}

uint32_t gpu_resident_blocks(struct gpu *gpu, enum gpu_kernel kernel, uint32_t threads, size_t shared) {
        return shared > gpu->shared_bytes ? 0 : gpu->multiprocessors * 2;
}

int gpu_check(struct gpu *gpu, cu_result error, const char *what) {
        if (error)
                snprintf(gpu->why, sizeof gpu->why, "%s: error %d", what, error);
        return error ? -EIO : 0;
}

/* ---- the fixture ------------------------------------------------------------------------------------------------- */

struct gpu *device(void) {
        static struct gpu gpu;

        if (!gpu.multiprocessors)
                gpu_open(&gpu, 0);
        return &gpu;
}

const char *device_kind(void) {
        return "emulation";
}

/* Ends at the guard page but for what the alignment takes. */
cu_address device_room(size_t bytes) {
        uint8_t *at = buffer(ALIGN_UP(bytes, ALIGNMENT));

        memset(at, 0xa5, bytes);
        return (cu_address)(uintptr_t)at;
}

cu_address device_of(const void *from, size_t bytes) {
        cu_address at = device_room(bytes);

        device_put(at, from, bytes);
        return at;
}

void device_put(cu_address to, const void *from, size_t bytes) {
        memcpy((void *)(uintptr_t)to, from, bytes);
}

void device_get(void *to, cu_address from, size_t bytes) {
        memcpy(to, (const void *)(uintptr_t)from, bytes);
}

void device_wait(void) {
}

void device_done(void) {
        buffers_free();
}

void device_order(uint64_t seed) {
        emulate_seed(seed);
}

int device_suite(Suite *suite) {
        SRunner *runner = srunner_create(suite);
        int failed;

        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed > 0;
}
