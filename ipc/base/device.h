/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_DEVICE_H
#define KVD_BASE_DEVICE_H

/*
 * GPU memory for the users of a pool (libkvd and the worker). The daemon names the device by UUID,
 * since ordinals differ from process to process (CUDA_VISIBLE_DEVICES). Segments are mapped
 * contiguously into a reserved range of addresses. The functions use the device's primary context,
 * like PyTorch, JAX and the CUDA runtime, and leave the calling thread's current context unchanged.
 *
 * Results: 0, or a negative errno with a line of text in why.
 */

#include "ipc/base/cuda.h"

#define KVD_DEVICE_WHY 200

/* How clients get a pool's segments; in the index and in `kvctl status`. */
enum kvd_backend {
        KVD_BACKEND_HOST = 0, /* memfds */
        KVD_BACKEND_VMM = 1,  /* cuMemCreate, POSIX descriptors */
        /* cuMemAlloc, 64-byte handles: one segment per space, writable for all clients */
        KVD_BACKEND_LEGACY = 2,
};

struct kvd_device {
        const struct kvd_cuda *cuda;
        cu_device ordinal;
        cu_context context; /* primary, retained */
        struct cu_uuid uuid;
        size_t granularity; /* bytes; segment sizes are multiples of it */
        char why[KVD_DEVICE_WHY];
};

/*
 * Formats a device's UUID as nvidia-smi and CUDA_VISIBLE_DEVICES do. name: the driver's name of the
 * device, which decides between the prefixes GPU- and MIG-; NULL: unknown, no prefix.
 */
#define KVD_UUID_TEXT 41
void kvd_uuid_text(const struct cu_uuid *uuid, const char *name, char to[static KVD_UUID_TEXT]);

/* -ENODEV: no driver, or no visible device with that UUID. d->why is set after any error. */
int kvd_device_open(struct kvd_device *d, const struct cu_uuid *uuid);
void kvd_device_close(struct kvd_device *d);

/*
 * Enclose driver calls that need the device's context to be current. May be nested. In between, the
 * only call that breaks a stream capture is waiting for that stream.
 */
int kvd_device_enter(struct kvd_device *d);
void kvd_device_leave(struct kvd_device *d);

/* Reserves addresses for bytes (a multiple of granularity) without mapping memory. */
int kvd_device_reserve(struct kvd_device *d, uint64_t bytes, cu_address *ret);
void kvd_device_unreserve(struct kvd_device *d, cu_address at, uint64_t bytes);

/*
 * Maps a whole segment, given as a POSIX descriptor (which stays the caller's), at an address
 * inside a reservation. The memory exists as long as it is mapped, even if the daemon ends.
 */
int kvd_device_map(struct kvd_device *d, cu_address at, uint64_t bytes, int fd, bool writable);

/* The device must not use the memory any more. May block until the device is idle. */
int kvd_device_unmap(struct kvd_device *d, cu_address at, uint64_t bytes);

/*
 * The driver chooses the address of a legacy handle. It is the same for all users in this process
 * until the last one closes it.
 */
int kvd_device_open_handle(struct kvd_device *d, const struct cu_ipc_handle *handle,
                           cu_address *ret);
void kvd_device_close_handle(struct kvd_device *d, cu_address at);

/* Registers host memory for streams to read and write; *ret is its address on the device. */
int kvd_device_register(struct kvd_device *d, void *at, uint64_t bytes, cu_address *ret);
void kvd_device_unregister(struct kvd_device *d, void *at);

#endif
