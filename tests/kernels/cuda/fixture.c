/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/cuda/fixture.h"

#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/emulate.h"
#include "tests/kernels/cuda/mirror.h"

static struct gpu device;

/* ---- the driver that this processor needs ---------------------------------------------------- */

static cu_result load(cu_library *ret, const void *image, void *jit, void **jit_values,
                      unsigned n_jit, void *options, void **values, unsigned n) {
        *ret = (void *)image;
        return CU_OK;
}

static cu_result get_kernel(cu_kernel *ret, cu_library library, const char *name) {
        *ret = (void *)fake_kernel_find(name);
        return *ret ? CU_OK : CU_NOT_FOUND;
}

static cu_result get_function(cu_function *ret, cu_kernel kernel) {
        *ret = kernel;
        return CU_OK;
}

static cu_result set_attribute(cu_function function, int attribute, int value) {
        return value <= EMULATE_MOST_SHARED ? CU_OK : CU_INVALID_VALUE;
}

static cu_result occupancy(int *ret, cu_function function, int threads, size_t shared) {
        *ret = 2;
        return CU_OK;
}

static cu_result launch(cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, cu_stream stream,
                        void **parameters, void **extra) {
        const struct fake_kernel *kernel = function;
        struct fake_launch l = {{gx, gy, gz}, {bx, by, bz}, shared};
        void *argument = malloc(kernel->argument_bytes); /* exactly as large as the argument */

        memcpy(argument, parameters[0], kernel->argument_bytes);
        kernel->run(&l, argument);
        free(argument);
        return CU_OK;
}

static cu_result copy(cu_address to, cu_address from, size_t bytes, cu_stream stream) {
        memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
        return CU_OK;
}

static cu_result fill(cu_address to, unsigned char value, size_t n, cu_stream stream) {
        memset((void *)(uintptr_t)to, value, n);
        return CU_OK;
}

static cu_result words(cu_result error, const char **ret) {
        *ret = "the emulated driver";
        return CU_OK;
}

static const struct kvd_cuda emulated = {
        .cuGetErrorName = words,
        .cuGetErrorString = words,
        .cuLibraryLoadData = load,
        .cuLibraryGetKernel = get_kernel,
        .cuKernelGetFunction = get_function,
        .cuFuncSetAttribute = set_attribute,
        .cuOccupancyMaxActiveBlocksPerMultiprocessor = occupancy,
        .cuLaunchKernel = launch,
        .cuMemcpyDtoDAsync = copy,
        .cuMemsetD8Async = fill,
};

/* ---- the device ------------------------------------------------------------------------------ */

bool fixture_is_real(void) {
        const char *real = getenv("KVD_TEST_GPU");

        return real && strcmp(real, "1") == 0;
}

struct gpu *fixture_gpu(void) {
        if (device.cuda)
                return &device;
        if (fixture_is_real()) {
                fixture_ok(gpu_open(&device, getenv("KVD_GPU") ? atoi(getenv("KVD_GPU")) : 0));
                fixture_ok(mirror_begin(&device));
        } else {
                device = (struct gpu){.cuda = &emulated,
                                      .multiprocessors = 3,
                                      .capability = 90,
                                      .l2_bytes = 50 << 20,
                                      .shared_bytes = EMULATE_MOST_SHARED};
        }
        return &device;
}

void fixture_wait(void) {
        if (fixture_is_real())
                fixture_ok(mirror_pull());
}

cu_address address_of(const void *at) {
        cu_address copy = (cu_address)(uintptr_t)at;

        if (fixture_is_real() && at && fixture_gpu() && (copy = mirror_of(at)) == 0)
                ck_abort_msg("memory for kernels comes from buffer()");
        return copy;
}

void *host_of(cu_address at) {
        return fixture_is_real() ? mirror_host(at) : (void *)(uintptr_t)at;
}

void fixture_seed(uint64_t n) {
        emulate_seed(n);
}

void fixture_ok_at(int r, const char *what) {
        if (r < 0)
                ck_abort_msg("%s: %s: %s", what, strerror(-r), device.why);
}

void fixture_begin(void) {
        if (fixture_is_real())
                buffers_prepare = mirror_add;
}
