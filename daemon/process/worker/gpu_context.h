/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_GPU_CONTEXT_H
#define KVD_DAEMON_PROCESS_WORKER_GPU_CONTEXT_H

/*
 * The worker's GPU: its context, made at first use, one stream of the lowest priority, and pinned
 * host memory through which blocks are copied. One thread uses it at a time: the one that serves
 * the owner, or a job's thread; both call device_enter first and device_leave at the end.
 *
 * A driver error after the context was made ends the worker (broken), since a context that has
 * failed cannot be used again.
 */

#include "ipc/base/device.h"
#include "ipc/base/util.h"
#include "ipc/base/why.h"
#include "kernels/cuda/gpu.h"

struct device_buffers {
        uint8_t *staging; /* owned; pinned host memory */
        uint64_t staging_bytes;
        cu_address room; /* owned; GPU memory */
        uint64_t room_bytes;
        bool kernels; /* the job launches kernels */
};

struct worker_device {
        struct kvd_device device;
        bool open, broken;
        cu_stream stream;              /* owned */
        cu_event marks[2];             /* owned; made at first use */
        struct device_buffers buffers; /* of the running job */
        uint64_t aside;                /* bytes of the buffers of paused jobs */
        struct gpu gpu;                /* for kernels; opened at first use */
        enum { KERNELS_UNKNOWN, KERNELS_THERE, KERNELS_NONE } kernels;
        uint64_t empty_ns; /* when the stream was last empty, or the job began or resumed */
        uint64_t busy_ns;  /* time with running kernels since the last device_take_busy_us */
        struct kvd_why why;
};

/* Opens the device of that UUID, at most one for each d. 0, or negative errno with why set. */
int device_use(struct worker_device *d, const uint8_t uuid[16]);

int device_enter(struct worker_device *d);
void device_leave(struct worker_device *d);

/* Zeros the memory of n descriptors, `bytes` each. It is mapped only during the call. */
int device_clear(struct worker_device *d, const int *fds, uint32_t n, uint64_t bytes);

/*
 * Has the stream write n values into the semaphore page fd (ipc/base/semaphore.h): words[2 * i + 1]
 * into semaphore words[2 * i].
 */
int device_wake(struct worker_device *d, int fd, uint64_t bytes, const uint64_t *words, uint32_t n);

/* Staging of at least so many bytes; the contents are lost. NULL, with why set, on failure. */
uint8_t *device_staging(struct worker_device *d, uint64_t bytes);

/* Uninitialized GPU memory of at least so many bytes, until the next call. 0 on failure. */
cu_address device_room(struct worker_device *d, uint64_t bytes);

/*
 * Moves the buffers of a job that pauses to ret. False, and nothing changed: the buffers of paused
 * jobs would exceed their limit, or the stream has failed.
 */
bool device_put_aside(struct worker_device *d, struct device_buffers *ret);
void device_take_back(struct worker_device *d, const struct device_buffers *buffers);

/*
 * Allocates a part of a room: returns its address, and advances *next behind it. A room is laid out
 * twice: from 0, to find its size, and then from its address.
 */
static inline cu_address device_part(cu_address *next, uint64_t bytes) {
        cu_address at = *next;

        *next += ALIGN_UP(bytes, 256);
        return at;
}

/* For a job that launches kernels on the stream. NULL: this build or this device has no kernels. */
struct gpu *device_kernels(struct worker_device *d);
/* The job has launched no kernels after all: the processor does it. */
void device_without_kernels(struct worker_device *d);

/* Asynchronous: done when device_finish returns 0. Any host memory will do; pinned is faster. */
int device_read(struct worker_device *d, void *to, cu_address from, uint64_t bytes);
int device_write(struct worker_device *d, cu_address to, const void *from, uint64_t bytes);
int device_zero(struct worker_device *d, cu_address at, uint64_t bytes);
int device_finish(struct worker_device *d);

/*
 * Time for which kernels used the GPU since the last call. It is an upper bound: all time until
 * device_finish counts if the job uses kernels.
 */
uint32_t device_take_busy_us(struct worker_device *d);

/*
 * device_mark sets mark 0 or 1 in the stream. device_reached waits until all work that was
 * submitted before it is done; it returns at once if the mark was never set.
 */
int device_mark(struct worker_device *d, uint32_t mark);
int device_reached(struct worker_device *d, uint32_t mark);

#endif
