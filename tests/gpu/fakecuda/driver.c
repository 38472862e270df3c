/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/fakecuda/driver.h"

#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc/base/util.h"

#define CONTEXTS 32 /* that a thread may push */

struct fake fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static __thread struct device *stack[CONTEXTS];
static __thread unsigned depth;

struct device *fake_current(void) {
        return depth ? stack[depth - 1] : NULL;
}

struct device *fake_device(cu_device it) {
        return it >= 0 && it < fake.n_devices ? &fake.devices[it] : NULL;
}

void fake_break(struct device *device, cu_result error) {
        if (!device->broken)
                device->broken = error;
        pthread_cond_broadcast(&fake.changed);
        syscall(SYS_futex, &device->broken, FUTEX_WAKE, INT32_MAX, NULL, NULL,
                0); /* see run_wait */
}

/* ---- start ----------------------------------------------------------------------------------- */

static struct cu_uuid uuid_of(int number) {
        return (struct cu_uuid){{'f', 'a', 'k', 'e', 0xc0, 0xda, 0x40, 1, 0x80, 2, 3, 5, 8, 13, 21,
                                 (uint8_t)number}};
}

static void uuid_text(const struct cu_uuid *uuid, char to[41]) {
        char *at = stpcpy(to, fake_settings.mig ? "MIG-" : "GPU-");

        for (int i = 0; i < 16; i++)
                at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                              uuid->bytes[i]);
}

/*
 * The device of an entry of CUDA_VISIBLE_DEVICES: an ordinal, or a prefix of a UUID. -1: no such
 * device.
 */
static int device_named(const char *name) {
        char *end, text[41];
        long n = strtol(name, &end, 10);

        if (*name && !*end)
                return n >= 0 && n < fake_settings.devices ? (int)n : -1;
        for (int i = 0; i < fake_settings.devices; i++) {
                struct cu_uuid uuid = uuid_of(i);

                uuid_text(&uuid, text);
                if (strncmp(name, text, 4) == 0 && strncmp(text, name, strlen(name)) == 0)
                        return i;
        }
        return -1;
}

static void add_device(int number) {
        struct device *device = &fake.devices[fake.n_devices++];

        device->number = number;
        device->uuid = uuid_of(number);
}

/* The list ends at the first entry that names no device. */
static void find_devices(void) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        char list[256], *rest = list, *name;
        int n = 0;

        for (int i = 0; !visible && i < fake_settings.devices; i++)
                add_device(i);
        snprintf(list, sizeof list, "%s", visible ?: "");
        while (visible && fake.n_devices < FAKE_DEVICES && (name = strsep(&rest, ",")) && n >= 0) {
                n = device_named(name);
                if (n >= 0)
                        add_device(n);
        }
}

cu_result cuInit(unsigned flags) {
        ENTER(cuInit, NEEDS_NOTHING);
        if (flags)
                return CU_INVALID_VALUE;
        pthread_mutex_lock(&fake.lock);
        if (!fake.pid) {
                find_devices();
                if (fake.n_devices)
                        fake.pid = getpid();
                if (fake_settings.outlives)
                        streams_watch_forks();
        }
        pthread_mutex_unlock(&fake.lock);
        if (!fake.n_devices)
                return CU_NO_DEVICE;
        return fake.pid == getpid() ? CU_OK : CU_NOT_INITIALIZED;
}

cu_result cuDriverGetVersion(int *ret) {
        ENTER(cuDriverGetVersion, NEEDS_NOTHING);
        if (!ret)
                return CU_INVALID_VALUE;
        *ret = fake_settings.version;
        return CU_OK;
}

/* ---- functions by name and version ----------------------------------------------------------- */

cu_result cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *)
        __attribute__((visibility("default")));

static const struct {
        const char *name;
        int version;
        void *function;
} functions[] = {
#define FUNCTION(name, version, parameters) {#name, version, (void *)name},
        KVD_CUDA_CALLS(FUNCTION)
#undef FUNCTION
                {"cuGetProcAddress", 12000, (void *)cuGetProcAddress_v2},
        /* Other signatures under the same name, which are not supported. */
        {"cuCtxSynchronize", 13000, NULL},
        {"cuEventElapsedTime", 12080, NULL},
};

/* Finds the newest function of that name that is not newer than version. */
cu_result cuGetProcAddress_v2(const char *name, void **ret, int version, uint64_t flags,
                              int *status) {
        enum { FOUND, NOT_FOUND, VERSION_NOT_SUFFICIENT } found = NOT_FOUND;
        int newest = 0;

        fake_read_settings();
        if (!name || !ret)
                return CU_INVALID_VALUE;
        *ret = NULL;
        for (size_t i = 0; i < ARRAY_SIZE(functions); i++) {
                if (strcmp(functions[i].name, name) != 0)
                        continue;
                if (functions[i].version > version ||
                    functions[i].version > fake_settings.version) {
                        found = newest ? FOUND : VERSION_NOT_SUFFICIENT;
                } else if (functions[i].version > newest) {
                        newest = functions[i].version;
                        *ret = functions[i].function;
                        found = FOUND;
                }
        }
        if (status)
                *status = (int)(found == FOUND && !*ret ? NOT_FOUND : found);
        return version > fake_settings.version || !*ret ? CU_NOT_FOUND : CU_OK;
}

/* ---- errors ---------------------------------------------------------------------------------- */

static const struct {
        cu_result error;
        const char *name, *text;
} errors[] = {
        {CU_OK, "CUDA_SUCCESS", "no error"},
        {CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
        {CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
        {CU_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
        {CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
        {CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
        {CU_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
        {CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
        {CU_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
         "no kernel image is available for execution on the device"},
        {CU_UNSUPPORTED_PTX, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
         "the provided PTX was compiled with an unsupported toolchain."},
        {CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
        {CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
        {CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
        {CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
         "an illegal memory access was encountered"},
        {CU_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
         "too many resources requested for launch"},
        {CU_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
        {CU_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
         "part or all of the requested memory range is already mapped"},
        {CU_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
         "pointer does not correspond to a registered memory region"},
        {CU_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
        {CU_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
        {CU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
        {CU_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
         "operation not permitted when stream is capturing"},
        {CU_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
         "operation failed due to a previous error during capture"},
        {CU_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
         "operation would make the legacy stream depend on a capturing blocking stream"},
        {CU_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static cu_result describe(cu_result error, bool name, const char **ret) {
        if (!ret)
                return CU_INVALID_VALUE;
        *ret = NULL;
        for (size_t i = 0; i < ARRAY_SIZE(errors); i++)
                if (errors[i].error == error)
                        *ret = name ? errors[i].name : errors[i].text;
        return *ret ? CU_OK : CU_INVALID_VALUE;
}

cu_result cuGetErrorName(cu_result error, const char **ret) {
        ENTER(cuGetErrorName, NEEDS_NOTHING);
        return describe(error, true, ret);
}

cu_result cuGetErrorString(cu_result error, const char **ret) {
        ENTER(cuGetErrorString, NEEDS_NOTHING);
        return describe(error, false, ret);
}

/* ---- devices --------------------------------------------------------------------------------- */

cu_result cuDeviceGetCount(int *ret) {
        ENTER(cuDeviceGetCount, NEEDS_INIT);
        if (!ret)
                return CU_INVALID_VALUE;
        *ret = fake.n_devices;
        return CU_OK;
}

cu_result cuDeviceGet(cu_device *ret, int ordinal) {
        ENTER(cuDeviceGet, NEEDS_INIT);
        if (!ret)
                return CU_INVALID_VALUE;
        if (!fake_device(ordinal))
                return CU_INVALID_DEVICE;
        *ret = ordinal;
        return CU_OK;
}

cu_result cuDeviceGetName(char *ret, int n, cu_device it) {
        const struct device *device = fake_device(it);

        ENTER(cuDeviceGetName, NEEDS_INIT);
        if (!ret || n <= 0)
                return CU_INVALID_VALUE;
        if (!device)
                return CU_INVALID_DEVICE;
        snprintf(ret, (size_t)n, "Stand-in GPU %d%s (host memory)", device->number,
                 fake_settings.mig ? " MIG 1g.10gb" : "");
        return CU_OK;
}

cu_result cuDeviceGetUuid(struct cu_uuid *ret, cu_device it) {
        ENTER(cuDeviceGetUuid, NEEDS_INIT);
        if (!ret)
                return CU_INVALID_VALUE;
        if (!fake_device(it))
                return CU_INVALID_DEVICE;
        *ret = fake_device(it)->uuid;
        return CU_OK;
}

cu_result cuDeviceTotalMem(size_t *ret, cu_device it) {
        ENTER(cuDeviceTotalMem, NEEDS_INIT);
        if (!ret)
                return CU_INVALID_VALUE;
        if (!fake_device(it))
                return CU_INVALID_DEVICE;
        *ret = fake_settings.memory;
        return CU_OK;
}

cu_result cuDeviceGetAttribute(int *ret, int attribute, cu_device it) {
        const struct device *device = fake_device(it);

        ENTER(cuDeviceGetAttribute, NEEDS_INIT);
        if (!ret)
                return CU_INVALID_VALUE;
        if (!device)
                return CU_INVALID_DEVICE;
        switch (attribute) {
        case CU_ATTR_WARP_SIZE: *ret = 32; return CU_OK;
        case CU_ATTR_CLOCK_KHZ: *ret = 1000000; return CU_OK;
        case CU_ATTR_MULTIPROCESSORS: *ret = 4; return CU_OK;
        case CU_ATTR_PCI_BUS: *ret = device->number + 1; return CU_OK;
        case CU_ATTR_PCI_DEVICE: *ret = 0; return CU_OK;
        case CU_ATTR_L2_BYTES: *ret = 4 << 20; return CU_OK;
        case CU_ATTR_PCI_DOMAIN: *ret = 0; return CU_OK;
        case CU_ATTR_CAPABILITY_MAJOR: *ret = 9; return CU_OK;
        case CU_ATTR_CAPABILITY_MINOR: *ret = 0; return CU_OK;
        case CU_ATTR_SHARED_PER_BLOCK_OPTIN: *ret = (int)fake_settings.shared; return CU_OK;
        case CU_ATTR_VIRTUAL_MEMORY: *ret = 1; return CU_OK;
        case CU_ATTR_POSIX_FD: *ret = fake_settings.vmm; return CU_OK;
        case CU_ATTR_STREAM_WAIT_64: *ret = fake_settings.stream_order; return CU_OK;
        case CU_ATTR_MPS_ENABLED: *ret = 0; return CU_OK;
        default: return CU_INVALID_VALUE;
        }
}

/* ---- contexts: the devices' primary ones ----------------------------------------------------- */

static cu_result make_context(struct device *device) {
        if (!fake_settings.context)
                return CU_OK;
        if (!usage_fits(device, fake_settings.context))
                return CU_OUT_OF_MEMORY;
        device->context = usage_memfd(device, "context");
        if (device->context < 0 || ftruncate(device->context, (off_t)fake_settings.context) < 0)
                abort();
        device->used += fake_settings.context;
        return CU_OK;
}

static void end_context(struct device *device) {
        stream_destroy_all(device);
        memory_free_all(device);
        if (!device->context)
                return;
        close(device->context);
        device->context = 0;
        device->used -= fake_settings.context;
}

cu_result cuDevicePrimaryCtxRetain(cu_context *ret, cu_device it) {
        struct device *device = fake_device(it);
        cu_result error = CU_OK;

        ENTER(cuDevicePrimaryCtxRetain, NEEDS_INIT);
        if (!ret)
                return CU_INVALID_VALUE;
        if (!device)
                return CU_INVALID_DEVICE;
        pthread_mutex_lock(&fake.lock);
        if (!device->retained) {
                fake_delay(WORK_CONTEXT);
                error = make_context(device);
        }
        device->retained += !error;
        pthread_mutex_unlock(&fake.lock);
        *ret = device;
        return error;
}

/* The last release frees streams, memory and registrations. Mappings of handles stay. */
cu_result cuDevicePrimaryCtxRelease(cu_device it) {
        struct device *device = fake_device(it);
        cu_result error = CU_OK;

        ENTER(cuDevicePrimaryCtxRelease, NEEDS_INIT);
        if (!device)
                return CU_INVALID_DEVICE;
        pthread_mutex_lock(&fake.lock);
        if (!device->retained) {
                error = CU_INVALID_CONTEXT;
        } else if (--device->retained == 0) {
                end_context(device);
        }
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuCtxPushCurrent(cu_context context) {
        struct device *device = context;

        ENTER(cuCtxPushCurrent, NEEDS_INIT);
        if (!device || device < fake.devices || device >= fake.devices + fake.n_devices ||
            !device->retained)
                return CU_INVALID_CONTEXT;
        if (depth == CONTEXTS)
                return CU_UNKNOWN;
        stack[depth++] = device;
        return CU_OK;
}

cu_result cuCtxPopCurrent(cu_context *ret) {
        ENTER(cuCtxPopCurrent, NEEDS_INIT);
        if (!depth)
                return CU_INVALID_CONTEXT;
        depth--;
        if (ret)
                *ret = stack[depth];
        return CU_OK;
}

cu_result cuCtxGetCurrent(cu_context *ret) {
        ENTER(cuCtxGetCurrent, NEEDS_INIT);
        if (!ret)
                return CU_INVALID_VALUE;
        *ret = fake_current();
        return CU_OK;
}

cu_result cuCtxSynchronize(void) {
        cu_result error;

        ENTER(cuCtxSynchronize, NEEDS_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        error = capture_allows_waiting_for_all(fake_current());
        if (!error)
                error = stream_wait_all(fake_current());
        pthread_mutex_unlock(&fake.lock);
        return error;
}

cu_result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
        ENTER(cuCtxGetStreamPriorityRange, NEEDS_CONTEXT);
        if (least)
                *least = 0;
        if (greatest)
                *greatest = -5;
        return CU_OK;
}
