/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Maps GPU memory for clients and workers: reserved address ranges with chunks mapped into them.
 * Every error names the driver call that failed.
 */

#include "ipc/base/device.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/sys.h"

/* Records what failed and returns its negative errno; 0 stays 0. */
static int check(struct kvd_device *d, cu_result error, const char *what) {
        char text[128];

        if (error == CU_OK)
                return 0;
        snprintf(d->why, sizeof d->why, "%s: %s", what,
                 kvd_cuda_why(d->cuda, error, text, sizeof text));
        return kvd_cuda_errno(error);
}

#define CHECK(d, call, ...) check(d, (d)->cuda->call(__VA_ARGS__), #call)

void kvd_uuid_text(const struct cu_uuid *uuid, const char *name, char to[static KVD_UUID_TEXT]) {
        char *at = stpcpy(to, !name ? "" : strstr(name, " MIG ") ? "MIG-" : "GPU-");

        for (int i = 0; i < 16; i++)
                at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                              uuid->bytes[i]);
}

static int find(struct kvd_device *d, const struct cu_uuid *uuid) {
        struct cu_uuid it;
        int n, r;

        r = CHECK(d, cuDeviceGetCount, &n);
        for (int i = 0; r == 0 && i < n; i++) {
                r = CHECK(d, cuDeviceGet, &d->ordinal, i);
                if (r == 0)
                        r = CHECK(d, cuDeviceGetUuid, &it, d->ordinal);
                if (r == 0 && memcmp(&it, uuid, sizeof it) == 0) {
                        d->uuid = it;
                        return 0;
                }
        }
        if (r < 0)
                return r;
        snprintf(d->why, sizeof d->why,
                 "none of the %d devices that this process sees is the daemon's", n);
        return -ENODEV;
}

/* A driver that cannot export descriptors has no granularity; it still supports legacy handles. */
static int granularity(struct kvd_device *d) {
        const struct cu_allocation what = {.type = CU_ALLOCATION_PINNED,
                                           .handle_types = CU_HANDLE_POSIX_FD,
                                           .location = {CU_LOCATION_DEVICE, d->ordinal}};
        cu_result r = d->cuda->cuMemGetAllocationGranularity(&d->granularity, &what,
                                                             CU_GRANULARITY_RECOMMENDED);

        if (r != CU_NOT_SUPPORTED)
                return check(d, r, "cuMemGetAllocationGranularity");
        d->granularity = 2 << 20;
        return 0;
}

int kvd_device_open(struct kvd_device *d, const struct cu_uuid *uuid) {
        const char *why = NULL;
        int r;

        *d = (struct kvd_device){0};
        d->cuda = kvd_cuda_load(&why);
        if (!d->cuda) {
                snprintf(d->why, sizeof d->why, "%s", why);
                return -ENODEV;
        }
        r = CHECK(d, cuInit, 0);
        if (r == 0)
                r = find(d, uuid);
        if (r == 0)
                r = granularity(d);
        if (r == 0)
                r = CHECK(d, cuDevicePrimaryCtxRetain, &d->context, d->ordinal);
        if (r < 0)
                kvd_device_close(d);
        return r;
}

void kvd_device_close(struct kvd_device *d) {
        if (d->context)
                d->cuda->cuDevicePrimaryCtxRelease(d->ordinal);
        d->context = NULL;
}

/* Of the calling thread: nesting of kvd_device_enter, and the capture mode outside of it. */
static __thread unsigned depth;
static __thread int mode_outside;

/*
 * Switches the thread to relaxed capture mode, so that mapping and registering memory does not
 * break a capture that a stream of this process has begun.
 */
int kvd_device_enter(struct kvd_device *d) {
        int mode = CU_CAPTURE_MODE_RELAXED, r = CHECK(d, cuCtxPushCurrent, d->context);

        if (r == 0 && depth++ == 0 && d->cuda->cuThreadExchangeStreamCaptureMode(&mode) == CU_OK)
                mode_outside = mode;
        return r;
}

void kvd_device_leave(struct kvd_device *d) {
        cu_context ours;

        if (--depth == 0)
                d->cuda->cuThreadExchangeStreamCaptureMode(&mode_outside);
        d->cuda->cuCtxPopCurrent(&ours);
}

int kvd_device_reserve(struct kvd_device *d, uint64_t bytes, cu_address *ret) {
        return CHECK(d, cuMemAddressReserve, ret, bytes, 0, 0, 0);
}

void kvd_device_unreserve(struct kvd_device *d, cu_address at, uint64_t bytes) {
        d->cuda->cuMemAddressFree(at, bytes);
}

/* The mapping keeps the memory alive, so the caller releases the handle in any case. */
static int map_handle(struct kvd_device *d, cu_address at, uint64_t bytes, cu_memory memory,
                      bool writable) {
        const struct cu_access access = {.location = {CU_LOCATION_DEVICE, d->ordinal},
                                         .flags = writable ? CU_ACCESS_READ_WRITE : CU_ACCESS_READ};
        int r = CHECK(d, cuMemMap, at, bytes, 0, memory, 0);

        if (r < 0)
                return r;
        r = CHECK(d, cuMemSetAccess, at, bytes, &access, 1);
        if (r < 0)
                d->cuda->cuMemUnmap(at, bytes);
        return r;
}

int kvd_device_map(struct kvd_device *d, cu_address at, uint64_t bytes, int fd, bool writable) {
        cu_memory memory;
        int r = kvd_device_enter(d);

        if (r < 0)
                return r;
        r = CHECK(d, cuMemImportFromShareableHandle, &memory, (void *)(intptr_t)fd,
                  CU_HANDLE_POSIX_FD);
        if (r == 0) {
                r = map_handle(d, at, bytes, memory, writable);
                d->cuda->cuMemRelease(memory);
        }
        kvd_device_leave(d);
        return r;
}

int kvd_device_unmap(struct kvd_device *d, cu_address at, uint64_t bytes) {
        int r = kvd_device_enter(d);

        if (r < 0)
                return r;
        r = CHECK(d, cuMemUnmap, at, bytes);
        kvd_device_leave(d);
        return r;
}

/* ---- legacy handles -------------------------------------------------------------------------- */

/*
 * A handle that is opened twice in a process has the same address both times, and drivers differ in
 * whether the first close unmaps it. So each handle is opened once, and its users are counted.
 */
struct opened {
        struct opened *next;
        struct cu_ipc_handle handle;
        cu_address at;
        uint32_t users;
};

static pthread_mutex_t opened_lock = PTHREAD_MUTEX_INITIALIZER;
static struct opened *all_opened; /* owned */

/* The driver compares pids, and two processes in different pid namespaces may have the same pid. */
static int open_handle(struct kvd_device *d, const struct cu_ipc_handle *handle, cu_address *ret) {
        cu_result r = d->cuda->cuIpcOpenMemHandle(ret, *handle, CU_IPC_LAZY_PEER_ACCESS);

        if (r != CU_INVALID_CONTEXT)
                return check(d, r, "cuIpcOpenMemHandle");
        snprintf(d->why, sizeof d->why,
                 "cuIpcOpenMemHandle: the driver takes this process for the one that made the "
                 "memory. Do both have pid %d, in different containers? Restart this process",
                 getpid());
        return kvd_cuda_errno(r);
}

static int open_once(struct kvd_device *d, const struct cu_ipc_handle *handle, cu_address *ret) {
        struct opened *it = all_opened;
        int r;

        while (it && memcmp(&it->handle, handle, sizeof *handle) != 0)
                it = it->next;
        if (!it) {
                it = sys->calloc(1, sizeof *it);
                if (!it)
                        return -ENOMEM;
                r = open_handle(d, handle, &it->at);
                if (r < 0) {
                        free(it);
                        return r;
                }
                it->handle = *handle;
                it->next = all_opened;
                all_opened = it;
        }
        it->users++;
        *ret = it->at;
        return 0;
}

static void close_last(struct kvd_device *d, cu_address at) {
        struct opened **link = &all_opened, *it;

        while (*link && (*link)->at != at)
                link = &(*link)->next;
        it = *link;
        if (!it || --it->users)
                return;
        *link = it->next;
        free(it);
        d->cuda->cuIpcCloseMemHandle(at);
}

int kvd_device_open_handle(struct kvd_device *d, const struct cu_ipc_handle *handle,
                           cu_address *ret) {
        int r = kvd_device_enter(d);

        if (r < 0)
                return r;
        pthread_mutex_lock(&opened_lock);
        r = open_once(d, handle, ret);
        pthread_mutex_unlock(&opened_lock);
        kvd_device_leave(d);
        return r;
}

void kvd_device_close_handle(struct kvd_device *d, cu_address at) {
        if (kvd_device_enter(d) < 0)
                return;
        pthread_mutex_lock(&opened_lock);
        close_last(d, at);
        pthread_mutex_unlock(&opened_lock);
        kvd_device_leave(d);
}

/* ---- host memory ----------------------------------------------------------------------------- */

int kvd_device_register(struct kvd_device *d, void *at, uint64_t bytes, cu_address *ret) {
        int r = kvd_device_enter(d);

        if (r < 0)
                return r;
        r = CHECK(d, cuMemHostRegister, at, bytes, CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED);
        if (r == 0) {
                r = CHECK(d, cuMemHostGetDevicePointer, ret, at, 0);
                if (r < 0)
                        d->cuda->cuMemHostUnregister(at);
        }
        kvd_device_leave(d);
        return r;
}

void kvd_device_unregister(struct kvd_device *d, void *at) {
        if (kvd_device_enter(d) < 0)
                return;
        d->cuda->cuMemHostUnregister(at);
        kvd_device_leave(d);
}
