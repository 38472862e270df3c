/* SPDX-License-Identifier: Apache-2.0 */

/* Memory of a batch on the GPU. It grows by halves, since contexts grow token by token. */

#include <errno.h>

#include "client/methods/batch.h"

int batch_checked(const struct gpu *gpu, int error) {
        return error < 0 ? client_fail(error, "%s", gpu->why) : 0;
}

int batch_driver(struct gpu *gpu, cu_result error, const char *what) {
        return batch_checked(gpu, gpu_check(gpu, error, what));
}

void twin_free(struct gpu *gpu, struct twin *t) {
        if (t->host)
                gpu->cuda->cuMemFreeHost(t->host);
        if (t->device)
                gpu->cuda->cuMemFree(t->device);
        *t = (struct twin){.kind = t->kind};
}

/* Kernels in the stream may be using the old memory. What it holds is lost. */
int twin_grow(struct gpu *gpu, struct twin *t, size_t bytes, cu_stream stream) {
        int r;

        if (bytes <= t->bytes)
                return 0;
        r = batch_driver(gpu, gpu->cuda->cuStreamSynchronize(stream), "cuStreamSynchronize");
        if (r < 0)
                return r;
        twin_free(gpu, t);
        bytes += bytes / 2;
        if (t->kind != TWIN_HOST)
                r = batch_driver(gpu, gpu->cuda->cuMemAlloc(&t->device, bytes), "cuMemAlloc");
        if (r == 0 && t->kind != TWIN_DEVICE)
                r = batch_driver(gpu,
                                 gpu->cuda->cuMemHostAlloc((void **)&t->host, bytes,
                                                           CU_HOST_PORTABLE),
                                 "cuMemHostAlloc");
        if (r < 0)
                twin_free(gpu, t);
        else
                t->bytes = bytes;
        return r;
}

int twin_send(struct gpu *gpu, const struct twin *t, size_t bytes, cu_stream stream) {
        return batch_driver(gpu, gpu->cuda->cuMemcpyHtoDAsync(t->device, t->host, bytes, stream),
                            "cuMemcpyHtoDAsync");
}
