/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Loads libcuda at run time. Without it kvd uses host memory, and one line says why there is no
 * GPU.
 */

#include "ipc/base/cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>

#include "ipc/base/util.h"

/* cuGetProcAddress of CUDA 12.0, the first version that reports why a function is missing. */
typedef cu_result (*get_address)(const char *name, void **ret, int version, uint64_t flags,
                                 int *status);

enum { STATUS_FOUND = 0, STATUS_VERSION_TOO_OLD = 2 };

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Written once, by load_once. */
static struct kvd_cuda table;
static bool loaded;
static char load_why[200];

static bool resolve(get_address get, const char *name, int version, void *to) {
        void *at = NULL;
        int status = STATUS_FOUND;
        cu_result error = get(name, &at, version, 0, &status);

        if (error == CU_OK && status == STATUS_FOUND && at) {
                *(void **)to = at;
                return true;
        }
        snprintf(load_why, sizeof load_why, "the CUDA driver has no %s of version %d.%d%s", name,
                 version / 1000, version % 1000 / 10,
                 status == STATUS_VERSION_TOO_OLD ? ": it is too old" : "");
        return false;
}

static bool resolve_all(get_address get) {
        bool all = true;

#define RESOLVE(name, version, parameters) all = all && resolve(get, #name, version, &table.name);
        KVD_CUDA_CALLS(RESOLVE)
#undef RESOLVE
        return all;
}

/* The library stays open: its threads outlive any use of ours. */
static void load_once(void) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *get;

        if (!library) {
                snprintf(load_why, sizeof load_why, "no CUDA driver: %s", dlerror());
                return;
        }
        get = dlsym(library, "cuGetProcAddress_v2");
        if (!get) {
                snprintf(load_why, sizeof load_why,
                         "the CUDA driver is older than 12.0: no cuGetProcAddress_v2");
                return;
        }
        loaded = resolve_all((get_address)get);
}

const struct kvd_cuda *kvd_cuda_load(const char **why) {
        pthread_once(&once, load_once);
        if (!loaded && why)
                *why = load_why;
        return loaded ? &table : NULL;
}

const char *kvd_cuda_why(const struct kvd_cuda *cuda, cu_result error, char *to, size_t size) {
        const char *name = NULL, *text = NULL;

        if (cuda && cuda->cuGetErrorName(error, &name) == CU_OK &&
            cuda->cuGetErrorString(error, &text) == CU_OK && name && text)
                snprintf(to, size, "%s: %s", name, text);
        else
                snprintf(to, size, "CUDA error %d", error);
        return to;
}

int kvd_cuda_errno(cu_result error) {
        static const struct {
                cu_result error;
                int number;
        } known[] = {
                {CU_OK, 0},
                {CU_INVALID_VALUE, -EINVAL},
                {CU_OUT_OF_MEMORY, -ENOMEM},
                {CU_NOT_INITIALIZED, -ENODEV},
                {CU_NO_DEVICE, -ENODEV},
                {CU_INVALID_DEVICE, -ENODEV},
                {CU_INVALID_IMAGE, -ENOEXEC},
                {CU_INVALID_CONTEXT, -EINVAL},
                {CU_NO_BINARY_FOR_GPU, -ENOEXEC},
                {CU_UNSUPPORTED_PTX, -ENOEXEC},
                {CU_INVALID_HANDLE, -EBADF},
                {CU_NOT_FOUND, -ENOENT},
                {CU_NOT_READY, -EAGAIN},
                {CU_ALREADY_REGISTERED, -EEXIST},
                {CU_NOT_REGISTERED, -ENOENT},
                {CU_NOT_PERMITTED, -EPERM},
                {CU_NOT_SUPPORTED, -EOPNOTSUPP},
                {CU_CAPTURE_UNSUPPORTED, -EBUSY},
                {CU_CAPTURE_INVALIDATED, -EBUSY},
                {CU_CAPTURE_IMPLICIT, -EBUSY},
        };

        for (size_t i = 0; i < ARRAY_SIZE(known); i++)
                if (known[i].error == error)
                        return known[i].number;
        return -EIO;
}
