/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_WORKER_DEVICE_H
#define KVD_DAEMON_WORKER_DEVICE_H

/*
 * The worker's GPU: its context, made at first use, one stream of the lowest priority, and pinned
 * host memory through which blocks come and go. All calls from the thread that serves the owner.
 *
 * An error of the driver after the context was made ends the worker (broken): a context that has
 * failed stays failed.
 */

#include "ipc/base/device.h"
#include "ipc/base/why.h"
#include "kernels/cuda/gpu.h"

struct worker_device {
        struct kvd_device device;
        bool open, broken;
        cu_stream stream;      /* owned */
        uint8_t *staging;      /* owned; pinned, staging_bytes of it */
        uint64_t staging_bytes;
        cu_address room;       /* owned; memory of the GPU, room_bytes of it */
        uint64_t room_bytes;
        struct gpu gpu;        /* for kernels; opened at first use */
        enum { KERNELS_UNKNOWN, KERNELS_THERE, KERNELS_NONE } kernels;
        struct kvd_why why;
};

/* The device of that UUID, and no other for the life of the worker. Negative: why. */
int device_use(struct worker_device *d, const uint8_t uuid[16]);

/* Fills whole descriptors' worth of memory with zeros, and has nothing mapped afterwards. */
int device_clear(struct worker_device *d, const int *fds, uint32_t n, uint64_t bytes);

/*
 * A stream writes each of n values, words[2 * i + 1], into semaphore words[2 * i] of a page
 * (ipc/base/semaphore.h).
 */
int device_wake(struct worker_device *d, int fd, uint64_t bytes, const uint64_t *words, uint32_t n);

/* At least so much staging; what was in it is lost. NULL: there is none (why). */
uint8_t *device_staging(struct worker_device *d, uint64_t bytes);

/*
 * At least so much memory of the GPU, with anything in it, until the next call. 0: there is none.
 */
cu_address device_room(struct worker_device *d, uint64_t bytes);

/* Launches kernels on the stream; NULL: this build, or this device, has none. */
struct gpu *device_kernels(struct worker_device *d);

/* Copies that are done when device_finish returns 0. Host memory: any; pinned is faster. */
int device_read(struct worker_device *d, void *to, cu_address from, uint64_t bytes);
int device_write(struct worker_device *d, cu_address to, const void *from, uint64_t bytes);
int device_finish(struct worker_device *d);

#endif
