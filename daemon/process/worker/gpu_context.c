/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One context and one stream of the lowest priority, made when they are first needed. After a
 * failure the context is not used again: the worker ends, and the next one makes a new context.
 */

#include "daemon/process/worker/gpu_context.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define STAGING_LEAST (UINT64_C(64) << 20)
#define ASIDE_MOST (UINT64_C(256) << 20) /* buffers of all paused jobs */

/* Checks the result of a driver call. Any error but out of memory breaks the context. */
static int check(struct worker_device *d, cu_result error, const char *what) {
        char text[128];

        if (error == CU_OK)
                return 0;
        d->broken |= error != CU_OUT_OF_MEMORY;
        return kvd_refuse(&d->why, kvd_cuda_errno(error), "%s: %s", what,
                          kvd_cuda_why(d->device.cuda, error, text, sizeof text));
}

/* ---- life ------------------------------------------------------------------------------------ */

/* The lowest priority: inference goes first. */
static int make_stream(struct worker_device *d) {
        int least = 0, greatest = 0;
        int r = check(d, d->device.cuda->cuCtxGetStreamPriorityRange(&least, &greatest),
                      "cuCtxGetStreamPriorityRange");

        if (r < 0)
                return r;
        return check(d,
                     d->device.cuda->cuStreamCreateWithPriority(&d->stream, CU_STREAM_NON_BLOCKING,
                                                                least),
                     "cuStreamCreateWithPriority");
}

int device_use(struct worker_device *d, const uint8_t uuid[16]) {
        struct cu_uuid wanted;
        int r;

        memcpy(wanted.bytes, uuid, sizeof wanted.bytes);
        if (d->open)
                return memcmp(&wanted, &d->device.uuid, sizeof wanted) == 0 ?
                               0 :
                               kvd_refuse(&d->why, -EPROTO, "memory of another device than before");
        r = kvd_device_open(&d->device, &wanted);
        if (r < 0)
                return kvd_refuse(&d->why, r, "%s", d->device.why);
        r = kvd_device_enter(&d->device);
        if (r == 0) {
                r = make_stream(d);
                kvd_device_leave(&d->device);
        } else {
                kvd_refuse(&d->why, r, "%s", d->device.why);
        }
        if (r < 0) {
                d->broken = false; /* the failed context is closed; the next call makes a new one */
                kvd_device_close(&d->device);
                return r;
        }
        d->open = true;
        return 0;
}

int device_enter(struct worker_device *d) {
        int r = kvd_device_enter(&d->device);

        d->empty_ns = sys_now_ns();
        return r < 0 ? kvd_refuse(&d->why, r, "%s", d->device.why) : 0;
}

void device_leave(struct worker_device *d) {
        d->buffers.kernels = false;
        kvd_device_leave(&d->device);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int clear_one(struct worker_device *d, cu_address at, int fd, uint64_t bytes) {
        int r = kvd_device_map(&d->device, at, bytes, fd, true);

        if (r < 0)
                return kvd_refuse(&d->why, r, "%s", d->device.why);
        return device_zero(d, at, bytes);
}

int device_clear(struct worker_device *d, const int *fds, uint32_t n, uint64_t bytes) {
        cu_address at;
        uint32_t done = 0;
        int r = kvd_device_reserve(&d->device, n * bytes, &at), end;

        if (r < 0)
                return kvd_refuse(&d->why, r, "%s", d->device.why);
        while (r == 0 && done < n) {
                r = clear_one(d, at + done * bytes, fds[done], bytes);
                done += r == 0;
        }
        end = device_finish(d);
        for (uint32_t i = 0; i < n; i++)
                if (i < done && kvd_device_unmap(&d->device, at + i * bytes, bytes) < 0)
                        d->broken = true;
        kvd_device_unreserve(&d->device, at, n * bytes);
        return r ?: end;
}

static int wake_all(struct worker_device *d, void *page, uint64_t bytes, const uint64_t *words,
                    uint32_t n) {
        cu_address at;
        int r = kvd_device_register(&d->device, page, bytes, &at), end;

        if (r < 0)
                return kvd_refuse(&d->why, r, "%s", d->device.why);
        for (uint32_t i = 0; r == 0 && i < n; i++)
                r = words[2 * i] < bytes / sizeof *words ?
                            check(d,
                                  d->device.cuda
                                          ->cuStreamWriteValue64(d->stream,
                                                                 at + words[2 * i] * sizeof *words,
                                                                 words[2 * i + 1],
                                                                 CU_WRITE_DEFAULT),
                                  "cuStreamWriteValue64") :
                            kvd_refuse(&d->why, -EPROTO, "a semaphore beyond its page");
        end = device_finish(d);
        kvd_device_unregister(&d->device, page);
        return r ?: end;
}

int device_wake(struct worker_device *d, int fd, uint64_t bytes, const uint64_t *words,
                uint32_t n) {
        void *page = sys->mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        int r;

        if (page == MAP_FAILED)
                return kvd_refuse(&d->why, negative_errno(),
                                  "the semaphore page cannot be mapped: %s", strerror(errno));
        r = wake_all(d, page, bytes, words, n);
        munmap(page, bytes);
        return r;
}

static void free_staging(struct worker_device *d) {
        if (d->buffers.staging)
                d->device.cuda->cuMemFreeHost(d->buffers.staging);
        d->buffers.staging = NULL;
        d->buffers.staging_bytes = 0;
}

static void free_room(struct worker_device *d) {
        if (d->buffers.room)
                d->device.cuda->cuMemFree(d->buffers.room);
        d->buffers.room = d->buffers.room_bytes = 0;
}

uint8_t *device_staging(struct worker_device *d, uint64_t bytes) {
        struct device_buffers *b = &d->buffers;
        void *at;

        if (bytes <= b->staging_bytes)
                return b->staging;
        bytes = MAX(bytes, STAGING_LEAST);
        free_staging(d);
        if (check(d, d->device.cuda->cuMemHostAlloc(&at, bytes, CU_HOST_PORTABLE),
                  "cuMemHostAlloc") < 0)
                return NULL;
        b->staging = at;
        b->staging_bytes = bytes;
        return b->staging;
}

cu_address device_room(struct worker_device *d, uint64_t bytes) {
        struct device_buffers *b = &d->buffers;

        if (bytes <= b->room_bytes)
                return b->room;
        free_room(d);
        if (check(d, d->device.cuda->cuMemAlloc(&b->room, bytes), "cuMemAlloc") < 0)
                b->room = 0;
        else
                b->room_bytes = bytes;
        return b->room;
}

bool device_put_aside(struct worker_device *d, struct device_buffers *ret) {
        uint64_t bytes = d->buffers.staging_bytes + d->buffers.room_bytes;

        if (d->aside + bytes > ASIDE_MOST || device_finish(d) < 0)
                return false;
        d->aside += bytes;
        *ret = d->buffers;
        d->buffers = (struct device_buffers){0};
        return true;
}

/* Frees the buffers of the job that ran meanwhile. */
void device_take_back(struct worker_device *d, const struct device_buffers *buffers) {
        free_staging(d);
        free_room(d);
        d->buffers = *buffers;
        d->empty_ns = sys_now_ns();
        d->aside -= buffers->staging_bytes + buffers->room_bytes;
}

/* Tests one kernel: a build has either all kernels or none, and so does a device. */
struct gpu *device_kernels(struct worker_device *d) {
        if (d->kernels == KERNELS_UNKNOWN)
                d->kernels = gpu_open(&d->gpu, d->device.ordinal) == 0 &&
                                             gpu_resident_blocks(&d->gpu, GPU_KERNEL_compact, 128,
                                                                 0) ?
                                     KERNELS_THERE :
                                     KERNELS_NONE;
        d->buffers.kernels = d->kernels == KERNELS_THERE;
        return d->buffers.kernels ? &d->gpu : NULL;
}

void device_without_kernels(struct worker_device *d) {
        d->buffers.kernels = false;
        d->busy_ns = 0;
}

int device_read(struct worker_device *d, void *to, cu_address from, uint64_t bytes) {
        return check(d, d->device.cuda->cuMemcpyDtoHAsync(to, from, bytes, d->stream),
                     "cuMemcpyDtoHAsync");
}

int device_write(struct worker_device *d, cu_address to, const void *from, uint64_t bytes) {
        return check(d, d->device.cuda->cuMemcpyHtoDAsync(to, from, bytes, d->stream),
                     "cuMemcpyHtoDAsync");
}

int device_zero(struct worker_device *d, cu_address at, uint64_t bytes) {
        return check(d, d->device.cuda->cuMemsetD8Async(at, 0, bytes, d->stream),
                     "cuMemsetD8Async");
}

int device_finish(struct worker_device *d) {
        int r = check(d, d->device.cuda->cuStreamSynchronize(d->stream), "cuStreamSynchronize");
        uint64_t now = sys_now_ns();

        if (d->buffers.kernels)
                d->busy_ns += now - d->empty_ns;
        d->empty_ns = now;
        return r;
}

uint32_t device_take_busy_us(struct worker_device *d) {
        uint64_t us = DIV_UP(d->busy_ns, UINT64_C(1000));

        d->busy_ns = 0;
        return (uint32_t)MIN(us, UINT32_MAX);
}

int device_mark(struct worker_device *d, uint32_t mark) {
        const struct kvd_cuda *cuda = d->device.cuda;
        int r = 0;

        if (!d->marks[mark])
                r = check(d, cuda->cuEventCreate(&d->marks[mark], CU_EVENT_DISABLE_TIMING),
                          "cuEventCreate");
        return r < 0 ? r :
                       check(d, cuda->cuEventRecord(d->marks[mark], d->stream), "cuEventRecord");
}

int device_reached(struct worker_device *d, uint32_t mark) {
        if (!d->marks[mark])
                return 0;
        return check(d, d->device.cuda->cuEventSynchronize(d->marks[mark]), "cuEventSynchronize");
}
