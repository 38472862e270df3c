/* SPDX-License-Identifier: Apache-2.0 */

/*
 * cuMemAlloc, its memory in other processes, and host memory. A legacy handle contains the process
 * id and descriptor of the memory. A process that may read /proc/PID/fd opens it from there.
 */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/driver.h"

static void *pointer(cu_address at) {
        return (void *)(uintptr_t)at;
}

static cu_address address(const void *at) {
        return (cu_address)(uintptr_t)at;
}

static void unmap_and_drop(struct range *range) {
        munmap(pointer(range->at), ALIGN_UP(range->bytes, FAKE_PAGE));
        closep(&range->fd);
        if (range->kind == RANGE_ALLOCATED)
                range->device->used -= range->bytes;
        range_drop(range);
}

void memory_free_all(struct device *device) {
        struct range *it;

        while ((it = range_first(RANGE_ALLOCATED | RANGE_OPENED | RANGE_HOST, device)))
                unmap_and_drop(it);
        while ((it = range_first(RANGE_REGISTERED, device)))
                range_drop(it);
}

/* ---- of the device --------------------------------------------------------------------------- */

cu_result cuMemGetInfo(size_t *free, size_t *total) {
        uint64_t used;

        ENTER(cuMemGetInfo, NEEDS_CONTEXT);
        if (!free || !total)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        used = usage_bytes(fake_current());
        pthread_mutex_unlock(&fake.lock);
        *total = fake_settings.memory;
        *free = *total - MIN(used, *total);
        return CU_OK;
}

static struct range *map_shared(enum range_kind kind, int fd, size_t bytes, struct device *device) {
        void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        struct range *it;

        if (at == MAP_FAILED)
                return NULL;
        it = range_add(kind, address(at), bytes, device);
        it->access = CU_ACCESS_READ_WRITE;
        it->fd = fd;
        return it;
}

static cu_result allocate(cu_address *ret, size_t bytes, struct device *device) {
        struct range *it = NULL;
        int fd;

        if (!usage_fits(device, bytes))
                return CU_OUT_OF_MEMORY;
        fd = usage_memfd(device, "alloc");
        if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0)
                it = map_shared(RANGE_ALLOCATED, fd, bytes, device);
        if (!it) {
                closep(&fd);
                return CU_OUT_OF_MEMORY;
        }
        memset(pointer(it->at), FAKE_FRESH, bytes);
        range_protect(it);
        device->used += bytes;
        *ret = it->at;
        return CU_OK;
}

cu_result cuMemAlloc(cu_address *ret, size_t bytes) {
        cu_result error;

        ENTER_UNSAFE(cuMemAlloc, NEEDS_CONTEXT);
        if (!ret || !bytes)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        error = allocate(ret, bytes, fake_current());
        pthread_mutex_unlock(&fake.lock);
        return error;
}

static void free_alone(const struct range *it) {
        if (!fake_settings.free_alone || !usage_is_elsewhere(it->device, it->fd))
                return;
        fprintf(stderr, "fakecuda: cuMemFree of memory that another process has open\n");
        abort();
}

cu_result cuMemFree(cu_address at) {
        struct range *it;
        cu_result error = CU_OK;

        ENTER_UNSAFE(cuMemFree, NEEDS_CONTEXT);
        if (!at)
                return CU_OK;
        pthread_mutex_lock(&fake.lock);
        it = range_at(RANGE_ALLOCATED, at);
        if (it)
                error = stream_wait_all(it->device);
        it = range_at(RANGE_ALLOCATED, at);
        if (it && !error)
                free_alone(it);
        if (it && !error)
                unmap_and_drop(it);
        pthread_mutex_unlock(&fake.lock);
        return it ? error : CU_INVALID_VALUE;
}

/* ---- in other processes ---------------------------------------------------------------------- */

struct legacy {
        char magic[8];
        int32_t pid, fd, device, unused;
        uint64_t inode, filesystem, bytes;
        uint8_t zeros[16];
};
_Static_assert(sizeof(struct legacy) == CU_IPC_HANDLE_BYTES, "a handle has 64 bytes");

static const char magic[8] = "fakecuda";

cu_result cuIpcGetMemHandle(struct cu_ipc_handle *ret, cu_address at) {
        struct legacy legacy = {.pid = getpid()};
        const struct range *it;
        struct stat st;

        ENTER(cuIpcGetMemHandle, NEEDS_CONTEXT);
        if (!fake_settings.legacy)
                return CU_NOT_SUPPORTED;
        pthread_mutex_lock(&fake.lock);
        it = range_holding(RANGE_ALLOCATED, at);
        if (it && fstat(it->fd, &st) == 0) {
                memcpy(legacy.magic, magic, sizeof magic);
                legacy.fd = it->fd;
                legacy.device = it->device->number;
                legacy.inode = st.st_ino;
                legacy.filesystem = st.st_dev;
                legacy.bytes = it->bytes;
        }
        pthread_mutex_unlock(&fake.lock);
        if (!it || !ret)
                return CU_INVALID_VALUE;
        memcpy(ret, &legacy, sizeof legacy);
        return CU_OK;
}

/* The memory of a handle, or -1 if the process has ended or has freed that memory. */
static int open_legacy(const struct legacy *legacy) {
        char path[64];
        struct stat st;
        int fd;

        snprintf(path, sizeof path, "/proc/%d/fd/%d", legacy->pid, legacy->fd);
        fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0 &&
            (fstat(fd, &st) < 0 || st.st_ino != legacy->inode || st.st_dev != legacy->filesystem)) {
                close(fd);
                fd = -1;
        }
        return fd;
}

static cu_result open_handle(cu_address *ret, const struct legacy *legacy, struct device *device) {
        int fd = open_legacy(legacy);
        struct range *it;

        if (fd < 0)
                return CU_INVALID_HANDLE;
        it = range_of_file(RANGE_OPENED, fd);
        if (it) {
                close(fd); /* opened again: the same address */
        } else {
                it = map_shared(RANGE_OPENED, fd, legacy->bytes, device);
                if (it)
                        range_protect(it);
                else
                        close(fd);
        }
        if (it)
                *ret = it->at;
        return it ? CU_OK : CU_OUT_OF_MEMORY;
}

cu_result cuIpcOpenMemHandle(cu_address *ret, struct cu_ipc_handle handle, unsigned flags) {
        struct legacy legacy;
        cu_result error;

        ENTER_UNSAFE(cuIpcOpenMemHandle, NEEDS_CONTEXT);
        memcpy(&legacy, &handle, sizeof legacy);
        if (!ret || flags != CU_IPC_LAZY_PEER_ACCESS ||
            memcmp(legacy.magic, magic, sizeof magic) != 0)
                return CU_INVALID_VALUE;
        if (legacy.pid == getpid() || legacy.device != fake_current()->number)
                return CU_INVALID_CONTEXT;
        pthread_mutex_lock(&fake.lock);
        error = open_handle(ret, &legacy, fake_current());
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuIpcCloseMemHandle(cu_address at) {
        struct range *it;

        ENTER_UNSAFE(cuIpcCloseMemHandle, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        it = range_at(RANGE_OPENED, at);
        if (it)
                unmap_and_drop(it);
        pthread_mutex_unlock(&fake.lock);
        return it ? CU_OK : CU_INVALID_VALUE;
}

/* ---- of the host ----------------------------------------------------------------------------- */

cu_result cuMemHostAlloc(void **ret, size_t bytes, unsigned flags) {
        void *at;

        ENTER_UNSAFE(cuMemHostAlloc, NEEDS_CONTEXT);
        if (!ret || !bytes || flags & ~(CU_HOST_PORTABLE | CU_HOST_MAPPED | CU_HOST_WRITE_COMBINED))
                return CU_INVALID_VALUE;
        at = mmap(NULL, ALIGN_UP(bytes, FAKE_PAGE), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED)
                return CU_OUT_OF_MEMORY;
        memset(at, FAKE_FRESH, bytes);
        pthread_mutex_lock(&fake.lock);
        range_add(RANGE_HOST, address(at), bytes, fake_current())->access = CU_ACCESS_READ_WRITE;
        pthread_mutex_unlock(&fake.lock);
        *ret = at;
        return CU_OK;
}

cu_result cuMemFreeHost(void *at) {
        struct range *it;

        ENTER_UNSAFE(cuMemFreeHost, NEEDS_CONTEXT);
        if (!at)
                return CU_OK;
        pthread_mutex_lock(&fake.lock);
        it = range_at(RANGE_HOST, address(at));
        if (it)
                unmap_and_drop(it);
        pthread_mutex_unlock(&fake.lock);
        return it ? CU_OK : CU_INVALID_VALUE;
}

/* Is there memory at every page? */
static bool is_there(const void *at, size_t bytes) {
        uintptr_t page = (uintptr_t)at / FAKE_PAGE * FAKE_PAGE, end = (uintptr_t)at + bytes;

        return end > page && msync((void *)page, end - page, MS_ASYNC) == 0;
}

cu_result cuMemHostRegister(void *at, size_t bytes, unsigned flags) {
        cu_result error = CU_OK;
        struct range *it;

        ENTER_UNSAFE(cuMemHostRegister, NEEDS_CONTEXT);
        if (!at || !bytes ||
            flags & ~(CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED | CU_REGISTER_READ_ONLY) ||
            !is_there(at, bytes))
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        if (range_overlapping(RANGE_OF_HOST, address(at), bytes)) {
                error = CU_ALREADY_REGISTERED;
        } else if (range_overlapping(RANGE_OF_DEVICE | RANGE_RESERVED, address(at), bytes)) {
                error = CU_INVALID_VALUE;
        } else {
                it = range_add(RANGE_REGISTERED, address(at), bytes, fake_current());
                it->access = flags & CU_REGISTER_READ_ONLY ? CU_ACCESS_READ : CU_ACCESS_READ_WRITE;
        }
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuMemHostUnregister(void *at) {
        struct range *it;

        ENTER_UNSAFE(cuMemHostUnregister, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        it = range_at(RANGE_REGISTERED, address(at));
        if (it)
                range_drop(it);
        pthread_mutex_unlock(&fake.lock);
        return it ? CU_OK : CU_NOT_REGISTERED;
}

cu_result cuMemHostGetDevicePointer(cu_address *ret, void *at, unsigned flags) {
        bool there;

        ENTER(cuMemHostGetDevicePointer, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        there = range_holding(RANGE_OF_HOST, address(at));
        pthread_mutex_unlock(&fake.lock);
        if (!ret || flags || !there)
                return CU_INVALID_VALUE;
        *ret = address(at);
        return CU_OK;
}
