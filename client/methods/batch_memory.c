/* SPDX-License-Identifier: Apache-2.0 */

/* Memory of a batch on the GPU. It grows by halves, since contexts grow token by token. */

#include <errno.h>

#include "client/methods/batch.h"

int batch_failed(const struct gpu *gpu, int error) {
        return client_fail(error, "%s", gpu->why);
}

void twin_free(struct gpu *gpu, struct twin *t) {
        if (t->host)
                gpu->cuda->cuMemFreeHost(t->host);
        if (t->device)
                gpu->cuda->cuMemFree(t->device);
        *t = (struct twin){.alone = t->alone};
}

/* Kernels in the stream may be using the old memory. What it holds is lost. */
int twin_grow(struct gpu *gpu, struct twin *t, size_t bytes, cu_stream stream) {
        int r;

        if (bytes <= t->bytes)
                return 0;
        r = gpu_check(gpu, gpu->cuda->cuStreamSynchronize(stream), "cuStreamSynchronize");
        if (r < 0)
                return batch_failed(gpu, r);
        twin_free(gpu, t);
        bytes += bytes / 2;
        r = gpu_check(gpu, gpu->cuda->cuMemAlloc(&t->device, bytes), "cuMemAlloc");
        if (r == 0 && !t->alone)
                r = gpu_check(gpu,
                              gpu->cuda->cuMemHostAlloc((void **)&t->host, bytes, CU_HOST_PORTABLE),
                              "cuMemHostAlloc");
        if (r < 0) {
                twin_free(gpu, t);
                return batch_failed(gpu, r);
        }
        t->bytes = bytes;
        return 0;
}

int twin_send(struct gpu *gpu, const struct twin *t, size_t bytes, cu_stream stream) {
        int r = gpu_check(gpu, gpu->cuda->cuMemcpyHtoDAsync(t->device, t->host, bytes, stream),
                          "cuMemcpyHtoDAsync");

        return r < 0 ? batch_failed(gpu, r) : 0;
}
