/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/cuda/mirror.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kernels/buffers.h"

#define RUBBISH 0xa5

static struct mirror {
        uint8_t *host, *last; /* last: contents of both sides when last compared; owned */
        size_t bytes;
        cu_address copy; /* owned, for the life of the process */
} mirrors[4096];
static size_t n_mirrors;
static struct gpu *gpu;
static const struct kvd_cuda *real;
static struct kvd_cuda calls;
static bool launched;    /* since the last pull */
static cu_result broken; /* an error in a function that cannot report it */

/* Both sides begin with the same garbage. */
static void make_copy(struct mirror *m) {
        broken = broken ? broken : real->cuMemAlloc(&m->copy, m->bytes);
        broken = broken ? broken : real->cuMemsetD8Async(m->copy, RUBBISH, m->bytes, NULL);
}

void mirror_add(void *at, size_t bytes) {
        struct mirror *m = &mirrors[n_mirrors++];

        if (n_mirrors == ARRAY_SIZE(mirrors))
                abort();
        *m = (struct mirror){.host = at, .bytes = bytes, .last = malloc(bytes)};
        if (!m->last)
                abort();
        memset(m->last, RUBBISH, bytes);
        if (real)
                make_copy(m);
}

cu_address mirror_of(const void *at) {
        for (size_t i = 0; i < n_mirrors; i++)
                if ((const uint8_t *)at >= mirrors[i].host &&
                    (const uint8_t *)at <= mirrors[i].host + mirrors[i].bytes)
                        return mirrors[i].copy +
                               (cu_address)((const uint8_t *)at - mirrors[i].host);
        return 0;
}

void *mirror_host(cu_address at) {
        for (size_t i = 0; i < n_mirrors; i++)
                if (at >= mirrors[i].copy && at < mirrors[i].copy + mirrors[i].bytes)
                        return mirrors[i].host + (at - mirrors[i].copy);
        return NULL;
}

/*
 * Copies the buffers that the test has written to the device. The others keep what a kernel may
 * have written.
 */
static cu_result push(void) {
        cu_result r = broken;

        launched = true;
        for (size_t i = 0; i < n_mirrors && !r; i++) {
                struct mirror *m = &mirrors[i];

                if (!buffer_is_taken(i) || memcmp(m->host, m->last, m->bytes) == 0)
                        continue;
                memcpy(m->last, m->host, m->bytes);
                r = real->cuMemcpyHtoDAsync(m->copy, m->last, m->bytes, NULL);
        }
        return r ? r : real->cuCtxSynchronize();
}

static cu_result launch(cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, cu_stream stream,
                        void **parameters, void **extra) {
        cu_result r = push();

        return r ? r :
                   real->cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream,
                                        parameters, extra);
}

static cu_result copy(cu_address to, cu_address from, size_t bytes, cu_stream stream) {
        cu_result r = push();

        return r ? r : real->cuMemcpyDtoDAsync(to, from, bytes, stream);
}

static cu_result fill(cu_address to, unsigned char value, size_t n, cu_stream stream) {
        cu_result r = push();

        return r ? r : real->cuMemsetD8Async(to, value, n, stream);
}

int mirror_begin(struct gpu *which) {
        gpu = which;
        real = gpu->cuda;
        calls = *real;
        calls.cuLaunchKernel = launch;
        calls.cuMemcpyDtoDAsync = copy;
        calls.cuMemsetD8Async = fill;
        gpu->cuda = &calls;
        for (size_t i = 0; i < n_mirrors; i++)
                make_copy(&mirrors[i]);
        return gpu_check(gpu, broken, "memory for the buffers");
}

int mirror_pull(void) {
        cu_result r = broken ? broken : real->cuCtxSynchronize();

        for (size_t i = 0; i < n_mirrors && !r && launched; i++) {
                struct mirror *m = &mirrors[i];

                if (!buffer_is_taken(i) || memcmp(m->host, m->last, m->bytes) != 0)
                        /*
                         * not of this case, or the test has written to it since, which no kernel
                         * has seen
                         */
                        continue;
                r = real->cuMemcpyDtoHAsync(m->last, m->copy, m->bytes, NULL);
                r = r ? r : real->cuCtxSynchronize();
                memcpy(m->host, m->last, m->bytes);
        }
        launched = false;
        return gpu_check(gpu, r, "waiting for what was launched");
}
