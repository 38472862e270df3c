/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Handles are memfds, and reservations are inaccessible mappings. The memfd is mapped into a
 * reservation with the access that was set, which applies to the processor as well.
 */

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/driver.h"

struct memory {
        struct memory *next;
        cu_memory handle; /* never reused */
        /* references by cuMemCreate, cuMemImport...; 0: the handle is no longer valid */
        unsigned handles;
        unsigned mappings;
        struct device *device;
        size_t bytes;
        int fd;
        bool exportable, imported;
        bool filled; /* with FAKE_FRESH: at the first map or export; unused memory costs nothing */
};

static struct memory *memories;
static cu_memory last_handle = 0x5eed0000;

static bool is_granular(uint64_t n) {
        return n % FAKE_GRANULARITY == 0;
}

/* ---- handles --------------------------------------------------------------------------------- */

static struct memory *memory_of(cu_memory handle) {
        struct memory *it = memories;

        while (it && !(it->handle == handle && it->handles))
                it = it->next;
        return it;
}

static struct memory *memory_add(int fd, size_t bytes, struct device *device, bool exportable,
                                 bool imported) {
        struct memory *it = calloc(1, sizeof *it);

        if (!it)
                abort();
        *it = (struct memory){.next = memories,
                              .handle = ++last_handle,
                              .handles = 1,
                              .device = device,
                              .bytes = bytes,
                              .fd = fd,
                              .exportable = exportable,
                              .imported = imported};
        memories = it;
        device->used += imported ? 0 : bytes;
        return it;
}

static void memory_drop_if_unused(struct memory *memory) {
        struct memory **to = &memories;

        if (memory->handles || memory->mappings)
                return;
        while (*to != memory)
                to = &(*to)->next;
        *to = memory->next;
        memory->device->used -= memory->imported ? 0 : memory->bytes;
        close(memory->fd);
        free(memory);
}

static cu_result check_allocation(const struct cu_allocation *what, struct device **ret) {
        if (!what || what->type != CU_ALLOCATION_PINNED ||
            what->location.type != CU_LOCATION_DEVICE || what->handle_types & ~CU_HANDLE_POSIX_FD)
                return CU_INVALID_VALUE;
        *ret = fake_device(what->location.id);
        if (!*ret)
                return CU_INVALID_DEVICE;
        return what->handle_types && !fake_settings.vmm ? CU_NOT_SUPPORTED : CU_OK;
}

cu_result cuMemGetAllocationGranularity(size_t *ret, const struct cu_allocation *what, int option) {
        struct device *device;

        ENTER(cuMemGetAllocationGranularity, NEEDS_INIT);
        if (!ret || (option != CU_GRANULARITY_MINIMUM && option != CU_GRANULARITY_RECOMMENDED))
                return CU_INVALID_VALUE;
        *ret = FAKE_GRANULARITY;
        return check_allocation(what, &device);
}

static cu_result fill(struct memory *memory) {
        void *at;

        if (memory->filled || memory->imported)
                return CU_OK;
        at = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
        if (at == MAP_FAILED)
                return CU_OUT_OF_MEMORY;
        memset(at, FAKE_FRESH, memory->bytes);
        munmap(at, memory->bytes);
        memory->filled = true;
        return CU_OK;
}

static cu_result create(cu_memory *ret, size_t bytes, struct device *device, bool exportable) {
        int fd;

        if (!usage_fits(device, bytes))
                return CU_OUT_OF_MEMORY;
        fd = usage_memfd(device, "handle");
        if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) {
                closep(&fd);
                return CU_OUT_OF_MEMORY;
        }
        *ret = memory_add(fd, bytes, device, exportable, false)->handle;
        return CU_OK;
}

cu_result cuMemCreate(cu_memory *ret, size_t bytes, const struct cu_allocation *what,
                      unsigned long long flags) {
        struct device *device;
        cu_result error;

        ENTER(cuMemCreate, NEEDS_INIT);
        error = check_allocation(what, &device);
        if (error)
                return error;
        if (!ret || !bytes || !is_granular(bytes) || flags)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        error = create(ret, bytes, device, what->handle_types & CU_HANDLE_POSIX_FD);
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuMemRelease(cu_memory handle) {
        struct memory *memory;

        ENTER(cuMemRelease, NEEDS_INIT);
        pthread_mutex_lock(&fake.lock);
        memory = memory_of(handle);
        if (memory) {
                memory->handles--;
                memory_drop_if_unused(memory);
        }
        pthread_mutex_unlock(&fake.lock);
        return memory ? CU_OK : CU_INVALID_VALUE;
}

cu_result cuMemExportToShareableHandle(void *ret, cu_memory handle, int type,
                                       unsigned long long flags) {
        struct memory *memory;
        int fd = -1;

        ENTER(cuMemExportToShareableHandle, NEEDS_INIT);
        if (!ret || type != CU_HANDLE_POSIX_FD || flags)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        memory = memory_of(handle);
        if (memory && memory->exportable && fill(memory) == CU_OK)
                fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
        pthread_mutex_unlock(&fake.lock);
        if (!memory || !memory->exportable)
                return CU_INVALID_VALUE;
        if (fd < 0)
                return CU_UNKNOWN;
        memcpy(ret, &fd, sizeof fd);
        return CU_OK;
}

/* Every import has a handle of its own. Only memory of visible devices can be imported. */
cu_result cuMemImportFromShareableHandle(cu_memory *ret, void *handle, int type) {
        struct device *device = NULL;
        int fd = (int)(intptr_t)handle, number;
        struct stat st;

        ENTER(cuMemImportFromShareableHandle, NEEDS_INIT);
        if (!ret || type != CU_HANDLE_POSIX_FD || fstat(fd, &st) < 0 ||
            !usage_is_ours(fd, "handle", &number))
                return CU_INVALID_VALUE;
        for (int i = 0; i < fake.n_devices; i++)
                if (fake.devices[i].number == number)
                        device = &fake.devices[i];
        if (!device)
                return CU_INVALID_DEVICE;
        fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
                return CU_UNKNOWN;
        pthread_mutex_lock(&fake.lock);
        *ret = memory_add(fd, (size_t)st.st_size, device, true, true)->handle;
        pthread_mutex_unlock(&fake.lock);
        return CU_OK;
}

cu_result cuMemGetAllocationPropertiesFromHandle(struct cu_allocation *ret, cu_memory handle) {
        const struct memory *memory;

        ENTER(cuMemGetAllocationPropertiesFromHandle, NEEDS_INIT);
        pthread_mutex_lock(&fake.lock);
        memory = memory_of(handle);
        if (memory && ret)
                *ret = (struct cu_allocation){.type = CU_ALLOCATION_PINNED,
                                              .handle_types = memory->exportable ?
                                                                      CU_HANDLE_POSIX_FD :
                                                                      CU_HANDLE_NONE,
                                              .location = {CU_LOCATION_DEVICE,
                                                           (int)(memory->device - fake.devices)}};
        pthread_mutex_unlock(&fake.lock);
        return memory && ret ? CU_OK : CU_INVALID_VALUE;
}

/* ---- addresses ------------------------------------------------------------------------------- */

/* Reserves aligned addresses: reserves more, and unmaps both ends. */
static void *reserve(size_t bytes, size_t alignment) {
        uint8_t *at = mmap(NULL, bytes + alignment, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        size_t before;

        if (at == MAP_FAILED)
                return NULL;
        before = ALIGN_UP((uintptr_t)at, alignment) - (uintptr_t)at;
        if (before)
                munmap(at, before);
        munmap(at + before + bytes, alignment - before);
        return at + before;
}

cu_result cuMemAddressReserve(cu_address *ret, size_t bytes, size_t alignment, cu_address hint,
                              unsigned long long flags) {
        void *at;

        ENTER(cuMemAddressReserve, NEEDS_INIT);
        if (!ret || !bytes || !is_granular(bytes) || alignment & (alignment - 1) || flags)
                return CU_INVALID_VALUE;
        at = reserve(bytes, MAX(alignment, FAKE_GRANULARITY));
        if (!at)
                return CU_OUT_OF_MEMORY;
        pthread_mutex_lock(&fake.lock);
        range_add(RANGE_RESERVED, (cu_address)(uintptr_t)at, bytes, NULL);
        pthread_mutex_unlock(&fake.lock);
        *ret = (cu_address)(uintptr_t)at;
        return CU_OK;
}

cu_result cuMemAddressFree(cu_address at, size_t bytes) {
        struct range *range;
        bool good;

        ENTER(cuMemAddressFree, NEEDS_INIT);
        pthread_mutex_lock(&fake.lock);
        range = range_at(RANGE_RESERVED, at);
        good = range && range->bytes == bytes && !range_overlapping(RANGE_MAPPED, at, bytes);
        if (good) {
                munmap((void *)(uintptr_t)at, bytes);
                range_drop(range);
        }
        pthread_mutex_unlock(&fake.lock);
        return good ? CU_OK : CU_INVALID_VALUE;
}

static cu_result map(cu_address at, size_t bytes, struct memory *memory) {
        const struct range *reserved = range_holding(RANGE_RESERVED, at);
        struct range *range;

        if (!memory || bytes != memory->bytes || !reserved ||
            reserved->at + reserved->bytes - at < bytes ||
            range_overlapping(RANGE_MAPPED, at, bytes))
                return CU_INVALID_VALUE;
        if (fill(memory) != CU_OK || mmap((void *)(uintptr_t)at, bytes, PROT_NONE,
                                          MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED)
                return CU_OUT_OF_MEMORY;
        range = range_add(RANGE_MAPPED, at, bytes, memory->device);
        range->access = CU_ACCESS_NONE;
        range->memory = memory;
        memory->mappings++;
        return CU_OK;
}

cu_result cuMemMap(cu_address at, size_t bytes, size_t offset, cu_memory handle,
                   unsigned long long flags) {
        cu_result error;

        ENTER_UNSAFE(cuMemMap, NEEDS_INIT);
        if (!is_granular(at) || !bytes || !is_granular(bytes) || offset || flags)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        error = map(at, bytes, memory_of(handle));
        pthread_mutex_unlock(&fake.lock);
        return error;
}

static void unmap(struct range *range, int unused) {
        struct memory *memory = range->memory;

        if (mmap((void *)(uintptr_t)range->at, range->bytes, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
                abort();
        range_drop(range);
        memory->mappings--;
        memory_drop_if_unused(memory);
}

cu_result cuMemUnmap(cu_address at, size_t bytes) {
        bool good;

        ENTER_UNSAFE(cuMemUnmap, NEEDS_INIT);
        pthread_mutex_lock(&fake.lock);
        good = range_each_mapped(at, bytes, unmap, 0);
        pthread_mutex_unlock(&fake.lock);
        return good ? CU_OK : CU_INVALID_VALUE;
}

static void set_access(struct range *range, int access) {
        range->access = access;
        range_protect(range);
}

static cu_result check_access(const struct cu_access *access, size_t n) {
        if (!access || n != 1 || access->location.type != CU_LOCATION_DEVICE ||
            (access->flags != CU_ACCESS_NONE && access->flags != CU_ACCESS_READ &&
             access->flags != CU_ACCESS_READ_WRITE))
                return CU_INVALID_VALUE;
        return fake_device(access->location.id) ? CU_OK : CU_INVALID_DEVICE;
}

/* No device is a peer of another one here. */
cu_result cuMemSetAccess(cu_address at, size_t bytes, const struct cu_access *access, size_t n) {
        const struct range *range;
        cu_result error;

        ENTER_UNSAFE(cuMemSetAccess, NEEDS_INIT);
        error = check_access(access, n);
        if (error)
                return error;
        pthread_mutex_lock(&fake.lock);
        range = range_at(RANGE_MAPPED, at);
        if (range && range->device != fake_device(access->location.id))
                error = CU_INVALID_DEVICE;
        else if (!range_each_mapped(at, bytes, set_access, access->flags))
                error = CU_INVALID_VALUE;
        pthread_mutex_unlock(&fake.lock);
        return error;
}
