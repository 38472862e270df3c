/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_DEVICE_H
#define KVD_BASE_DEVICE_H

/*
 * GPU memory as a pool's user sees it (libkvd and the worker): the device that the daemon names, by
 * UUID, since ordinals differ from process to process (CUDA_VISIBLE_DEVICES), and a range of
 * addresses in which segments are mapped side by side. Uses the device's primary context, the one
 * that PyTorch, JAX and the CUDA runtime use, and leaves the calling thread's current context as it
 * was.
 *
 * Results: 0 or negative errno, with a line in why.
 */

#include "ipc/base/cuda.h"

#define KVD_DEVICE_WHY 200

/* How a pool's segments are handed out; in the index and in `kvctl status`. */
enum kvd_backend {
        KVD_BACKEND_HOST = 0,   /* memfds */
        KVD_BACKEND_VMM = 1,    /* cuMemCreate, POSIX descriptors */
        /* cuMemAlloc, 64-byte handles: one segment a space, read-only for nobody */
        KVD_BACKEND_LEGACY = 2,
};

struct kvd_device {
        const struct kvd_cuda *cuda;
        cu_device ordinal;
        cu_context context;     /* primary, retained */
        struct cu_uuid uuid;
        size_t granularity;     /* of segments: bytes */
        char why[KVD_DEVICE_WHY];
};

/*
 * The name of a device by its UUID, as nvidia-smi and CUDA_VISIBLE_DEVICES have it. name: what the
 * driver calls it, which tells a MIG instance from a whole GPU; NULL: unknown, and then no prefix
 * does.
 */
#define KVD_UUID_TEXT 41
void kvd_uuid_text(const struct cu_uuid *uuid, const char *name, char to[static KVD_UUID_TEXT]);

/*
 * -ENODEV: no driver, or no visible device of that UUID (d->why). d is usable for why in any case.
 */
int kvd_device_open(struct kvd_device *d, const struct cu_uuid *uuid);
void kvd_device_close(struct kvd_device *d);

/*
 * Brackets around driver calls that need the context current. Enter nests. Within them nothing
 * breaks the capture of a stream but waiting for that stream.
 */
int kvd_device_enter(struct kvd_device *d);
void kvd_device_leave(struct kvd_device *d);

/* Addresses for bytes (a multiple of granularity), nothing mapped. */
int kvd_device_reserve(struct kvd_device *d, uint64_t bytes, cu_address *ret);
void kvd_device_unreserve(struct kvd_device *d, cu_address at, uint64_t bytes);

/*
 * Maps a whole segment, given as a POSIX descriptor (stays the caller's), at an address inside a
 * reservation. The memory lives as long as it is mapped, whatever becomes of the daemon.
 */
int kvd_device_map(struct kvd_device *d, cu_address at, uint64_t bytes, int fd, bool writable);

/* Nothing on the device may use it any more. May wait for the device. */
int kvd_device_unmap(struct kvd_device *d, cu_address at, uint64_t bytes);

/*
 * Legacy handles bring their own address. All who open one in this process have the same, until the
 * last of them closes it.
 */
int kvd_device_open_handle(struct kvd_device *d, const struct cu_ipc_handle *handle,
                           cu_address *ret);
void kvd_device_close_handle(struct kvd_device *d, cu_address at);

/*
 * Host memory of ours that streams read and write: registered whole, its address for the device in
 * *ret.
 */
int kvd_device_register(struct kvd_device *d, void *at, uint64_t bytes, cu_address *ret);
void kvd_device_unregister(struct kvd_device *d, void *at);

#endif
