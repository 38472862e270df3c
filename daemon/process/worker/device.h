/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_DEVICE_H
#define KVD_DAEMON_PROCESS_WORKER_DEVICE_H

/*
 * The worker's GPU: its context, made at first use, one stream of the lowest priority, and pinned
 * host memory through which blocks come and go. One thread at a time: the one that serves the owner,
 * or that of a job, which enters first and leaves at its end.
 *
 * An error of the driver after the context was made ends the worker (broken): a context that has
 * failed stays failed.
 */

#include "ipc/base/device.h"
#include "ipc/base/util.h"
#include "ipc/base/why.h"
#include "kernels/cuda/gpu.h"

struct device_buffers {
        uint8_t *staging;      /* owned; pinned, staging_bytes of it */
        uint64_t staging_bytes;
        cu_address room;       /* owned; memory of the GPU, room_bytes of it */
        uint64_t room_bytes;
        bool kernels;          /* the job launches some */
};

struct worker_device {
        struct kvd_device device;
        bool open, broken;
        cu_stream stream;      /* owned */
        cu_event marks[2];     /* owned; made at first use */
        struct device_buffers buffers; /* of the job that is under way */
        uint64_t aside;        /* bytes of those of jobs that rest */
        struct gpu gpu;        /* for kernels; opened at first use */
        enum { KERNELS_UNKNOWN, KERNELS_THERE, KERNELS_NONE } kernels;
        uint64_t empty_ns;     /* when the stream was empty last, or the job went on */
        uint64_t busy_ns;      /* in which kernels were under way, since device_take_busy_us */
        struct kvd_why why;
};

/* The device of that UUID, and no other for the life of the worker. Negative: why. */
int device_use(struct worker_device *d, const uint8_t uuid[16]);

int device_enter(struct worker_device *d);
void device_leave(struct worker_device *d);

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

/*
 * A job that rests takes its staging and room along. false: there is too much aside already, or the
 * stream does not end, and nothing was done.
 */
bool device_put_aside(struct worker_device *d, struct device_buffers *ret);
void device_take_back(struct worker_device *d, const struct device_buffers *buffers);

/*
 * A part of a room: its beginning, and *next becomes what follows. Called twice: from 0, to know how
 * much is wanted, and from where it is.
 */
static inline cu_address device_part(cu_address *next, uint64_t bytes) {
        cu_address at = *next;

        *next += ALIGN_UP(bytes, 256);
        return at;
}

/* The job launches kernels on the stream; NULL: this build, or this device, has none. */
struct gpu *device_kernels(struct worker_device *d);
/* It has launched none: the processor does it all. */
void device_without_kernels(struct worker_device *d);

/* Copies, and zeros, that are done when device_finish returns 0. Host memory: any; pinned is faster. */
int device_read(struct worker_device *d, void *to, cu_address from, uint64_t bytes);
int device_write(struct worker_device *d, cu_address to, const void *from, uint64_t bytes);
int device_zero(struct worker_device *d, cu_address at, uint64_t bytes);
int device_finish(struct worker_device *d);

/*
 * For how long kernels had the GPU, since it was asked last: all of the time until device_finish, of
 * a job that asked for them, and so no less than it was.
 */
uint32_t device_take_busy_us(struct worker_device *d);

/*
 * What was asked for before mark 0 or 1 was set last has been done when it is reached; at once if it
 * was never set.
 */
int device_mark(struct worker_device *d, uint32_t mark);
int device_reached(struct worker_device *d, uint32_t mark);

#endif
