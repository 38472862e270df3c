/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The GPU that kvlm computes on. Everything is launched on one stream in the order of the calls,
 * and a failure names the call that the driver refused.
 */

#include "tools/kvlm/device.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"
#include "kernels/ops.h"
#include "tools/kvlm/refuse.h"

int device_failed(struct device *d, int error) {
        return refuse(error, "%s", d->gpu.why);
}

static int check(struct device *d, cu_result error, const char *what) {
        int r = gpu_check(&d->gpu, error, what);

        return r < 0 ? device_failed(d, r) : 0;
}

/* ---- life ---- */

/*
 * What the bits of products of equal shape depend on: the library, the kind of GPU, and the type of
 * the products.
 */
static void describe(struct device *d) {
        static const char *const products[] = {"f32", "tf32", "bf16"};

        snprintf(d->arithmetic, sizeof d->arithmetic, "kvlm cuda 1, cublas %d, sm_%u x %u, %s",
                 d->blas.version, d->gpu.capability, d->gpu.multiprocessors,
                 products[d->options.products]);
}

static int open_all(struct device *d) {
        int r = gpu_open(&d->gpu, d->options.ordinal);

        d->opened = r == 0;
        if (r == 0)
                r = gpu_has_kernels(&d->gpu);
        if (r == 0)
                r = gpu_check(&d->gpu,
                              d->gpu.cuda->cuStreamCreateWithPriority(&d->stream,
                                                                      CU_STREAM_NON_BLOCKING, 0),
                              "cuStreamCreateWithPriority");
        if (r == 0)
                r = gpu_blas_open(&d->blas, &d->gpu, d->stream);
        return r < 0 ? device_failed(d, r) : 0;
}

int device_new(const struct device_options *options, struct device **ret) {
        struct device *d = calloc(1, sizeof *d);
        int r;

        if (!d)
                return refuse(-ENOMEM, "out of memory");
        d->options = *options;
        r = open_all(d);
        if (r < 0) {
                device_free(d);
                return r;
        }
        describe(d);
        *ret = d;
        return 0;
}

struct device *device_free(struct device *d) {
        if (!d)
                return NULL;
        device_finish(d);
        gpu_blas_close(&d->blas);
        if (d->stream)
                d->gpu.cuda->cuStreamDestroy(d->stream);
        if (d->opened)
                gpu_close(&d->gpu);
        free(d);
        return NULL;
}

uint32_t device_number(const struct device *d) {
        return d->options.products == PRODUCTS_BF16 ? KVD_NUMBER_BF16 : KVD_NUMBER_F32;
}

int device_wait(struct device *d) {
        return check(d, d->gpu.cuda->cuStreamSynchronize(d->stream), "cuStreamSynchronize");
}

void device_finish(struct device *d) {
        if (d->stream)
                d->gpu.cuda->cuStreamSynchronize(d->stream);
}

/* ---- memory ---- */

static int too_large(struct device *d, uint64_t bytes, const char *what) {
        size_t free = 0, total = 0;

        d->gpu.cuda->cuMemGetInfo(&free, &total);
        return refuse(-ENOMEM, "%s: %ju MiB are needed on the GPU, and %zu of its %zu MiB are free",
                      what, (uintmax_t)DIV_UP(bytes, 1 << 20), free >> 20, total >> 20);
}

int device_take(struct device *d, uint64_t bytes, const char *what, cu_address *ret) {
        cu_result error = d->gpu.cuda->cuMemAlloc(ret, bytes);

        if (error == CU_OUT_OF_MEMORY)
                return too_large(d, bytes, what);
        if (error)
                return check(d, error, "cuMemAlloc");
        return device_clear(d, *ret, bytes);
}

void device_give(struct device *d, cu_address at) {
        if (at)
                d->gpu.cuda->cuMemFree(at);
}

int device_clear(struct device *d, cu_address to, uint64_t bytes) {
        return check(d, d->gpu.cuda->cuMemsetD8Async(to, 0, bytes, d->stream), "cuMemsetD8Async");
}

int device_copy(struct device *d, cu_address to, cu_address from, uint64_t bytes) {
        return check(d, d->gpu.cuda->cuMemcpyDtoDAsync(to, from, bytes, d->stream),
                     "cuMemcpyDtoDAsync");
}

int device_read(struct device *d, void *to, cu_address from, uint64_t bytes) {
        int r = check(d, d->gpu.cuda->cuMemcpyDtoHAsync(to, from, bytes, d->stream),
                      "cuMemcpyDtoHAsync");

        return r < 0 ? r : device_wait(d);
}

int device_write(struct device *d, cu_address to, const void *from, uint64_t bytes) {
        int r = check(d, d->gpu.cuda->cuMemcpyHtoDAsync(to, from, bytes, d->stream),
                      "cuMemcpyHtoDAsync");

        return r < 0 ? r : device_wait(d);
}

int device_compare(struct device *d, cu_address a, cu_address b, uint64_t bytes, uint64_t *ret) {
        _cleanup_(freep) uint8_t *both = malloc(2 * bytes);
        int r = both ? device_read(d, both, a, bytes) : refuse(-ENOMEM, "out of memory");

        if (r == 0)
                r = device_read(d, both + bytes, b, bytes);
        *ret = 0;
        for (uint64_t i = 0; r == 0 && i < bytes; i++)
                *ret += both[i] != both[bytes + i];
        return r;
}
