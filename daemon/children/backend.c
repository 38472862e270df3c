/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chooses the backend once, at the start, and gives the reason in one line.
 *
 * The driver is initialised in this process. It starts no thread before there is a context, and all
 * children are started by exec, so none of them inherits a driver that a fork has broken.
 */

#include "daemon/children/backend.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "daemon/base/memory_limit.h"
#include "daemon/children/exporter_child.h"
#include "ipc/base/util.h"
#include "store/file_tier.h"

static int check(struct backend *b, cu_result error, const char *what) {
        char text[128];

        if (error == CU_OK)
                return 0;
        return kvd_refuse(&b->why, kvd_cuda_errno(error), "%s: %s", what,
                          kvd_cuda_why(b->cuda, error, text, sizeof text));
}

const char *backend_name(enum kvd_backend backend) {
        static const char *const names[] = {[KVD_BACKEND_HOST] = "host",
                                            [KVD_BACKEND_VMM] = "cuda (vmm)",
                                            [KVD_BACKEND_LEGACY] = "cuda (legacy)"};

        return names[backend];
}

/* ---- device ---------------------------------------------------------------------------------- */

/*
 * Numbers GPUs as nvidia-smi and the device nodes do, not by speed, unless the user has chosen an
 * order.
 */
static void count_by_bus(void) {
        setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 0);
}

/*
 * MPS has one server per user, which waits until the clients of other users have ended. If one of
 * its clients faults, it ends all of them. So kvd and its children keep out of MPS, unless the user
 * has chosen otherwise. Engines of one user may still be its clients.
 */
static void keep_out_of_mps(void) {
        setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent", 0);
}

/*
 * A service may see only its own GPU (DeviceAllow, a container's devices). The driver then calls it
 * number 0, whatever its number on the machine. So the number is ignored if there is only one GPU.
 */
static int find_device(struct backend *b, uint32_t number, bool only, int *ret) {
        int n, r = check(b, b->cuda->cuDeviceGetCount(&n), "cuDeviceGetCount");

        if (r < 0)
                return r;
        if (n == 0)
                return kvd_refuse(&b->why, -ENODEV, "the driver sees no GPU");
        only = only && n == 1;
        if (number >= (uint32_t)n && !only)
                return kvd_refuse(&b->why, -ENODEV,
                                  "there is no GPU %u; the driver sees %d, numbered from 0", number,
                                  n);
        return check(b, b->cuda->cuDeviceGet(ret, only ? 0 : (int)number), "cuDeviceGet");
}

/* "NVIDIA H200, UUID GPU-...", or of several "NVIDIA H200, UUIDs GPU-..., GPU-..." */
static void describe(struct backend *b, uint32_t number, const char *name,
                     const struct cu_uuid *uuid) {
        size_t at = strlen(b->device);
        char text[KVD_UUID_TEXT];

        kvd_uuid_text(uuid, name, text);
        if (number == 0)
                snprintf(b->device, sizeof b->device, "%s, UUID%s %s", name,
                         b->n_gpus > 1 ? "s" : "", text);
        else
                snprintf(b->device + at, sizeof b->device - at, ", %s", text);
}

static int look_at(struct backend *b, uint32_t number, uint32_t device) {
        char name[100] = "";
        struct cu_uuid uuid;
        size_t bytes = 0;
        int ordinal, r = find_device(b, device, b->n_gpus == 1, &ordinal);

        if (r == 0)
                r = check(b, b->cuda->cuDeviceGetName(name, sizeof name, ordinal),
                          "cuDeviceGetName");
        if (r == 0)
                r = check(b, b->cuda->cuDeviceGetUuid(&uuid, ordinal), "cuDeviceGetUuid");
        if (r == 0)
                r = check(b, b->cuda->cuDeviceTotalMem(&bytes, ordinal), "cuDeviceTotalMem");
        if (r < 0)
                return r;
        b->gpus[number].ordinal = ordinal;
        memcpy(b->gpus[number].uuid, uuid.bytes, sizeof uuid.bytes);
        b->bytes = number ? MIN(b->bytes, bytes) : bytes;
        describe(b, number, name, &uuid);
        return 0;
}

static int look_at_all(struct backend *b, const struct number_list *devices) {
        int r = 0;

        b->n_gpus = devices->n;
        for (uint32_t i = 0; r == 0 && i < devices->n; i++)
                r = look_at(b, i, devices->at[i]);
        return r;
}

/* ---- what it can do -------------------------------------------------------------------------- */

/*
 * Allocates and exports memory to be sure: drivers, containers and virtual machines may prevent
 * what the device's attributes promise.
 */
static int probe_vmm(struct backend *b, const struct store_gpu *gpu) {
        const struct cu_allocation what = {.type = CU_ALLOCATION_PINNED,
                                           .handle_types = CU_HANDLE_POSIX_FD,
                                           .location = {CU_LOCATION_DEVICE, gpu->ordinal}};
        size_t bytes = 0;
        cu_memory memory = 0;
        int fd = -1, r;

        r = check(b,
                  b->cuda->cuMemGetAllocationGranularity(&bytes, &what, CU_GRANULARITY_RECOMMENDED),
                  "cuMemGetAllocationGranularity");
        if (r == 0)
                r = check(b, b->cuda->cuMemCreate(&memory, bytes, &what, 0), "cuMemCreate");
        if (r < 0)
                return r;
        r = check(b, b->cuda->cuMemExportToShareableHandle(&fd, memory, CU_HANDLE_POSIX_FD, 0),
                  "cuMemExportToShareableHandle");
        b->cuda->cuMemRelease(memory);
        if (r == 0)
                close(fd);
        return r;
}

static int find(struct backend *b, const struct config *config) {
        const char *why = NULL;
        int r;

        b->cuda = kvd_cuda_load(&why);
        if (!b->cuda)
                return kvd_refuse(&b->why, -ENODEV, "%s", why);
        count_by_bus();
        keep_out_of_mps();
        r = check(b, b->cuda->cuInit(0), "cuInit");
        return r == 0 ? look_at_all(b, &config->device) : r;
}

static int take_vmm(struct backend *b) {
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < b->n_gpus; i++)
                r = probe_vmm(b, &b->gpus[i]);
        if (r < 0)
                return r;
        b->backend = KVD_BACKEND_VMM;
        return kvd_refuse(&b->why, 0,
                          "memory can be allocated, and shared with other processes as "
                          "descriptors");
}

/* Legacy handles need a context, so a separate process. because: why descriptors are not used. */
static int take_legacy(struct backend *b, const struct config *config, const char *because) {
        const char *also = because[0] ? "; " : "";
        char why[120];
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < b->n_gpus; i++)
                r = exporter_probe(config->worker_program, b->gpus[i].uuid, why, sizeof why);
        if (r < 0)
                return kvd_refuse(&b->why, r, "%s%s%s", because, also, why);
        b->backend = KVD_BACKEND_LEGACY;
        return kvd_refuse(&b->why, 0,
                          "%s%san exporter can allocate memory, and share it with other processes "
                          "as legacy handles",
                          because, also);
}

static int take_gpu(struct backend *b, const struct config *config) {
        int r;

        if (config->backend == CONFIG_BACKEND_LEGACY)
                return take_legacy(b, config, "backend = cuda-legacy");
        r = take_vmm(b);
        return r < 0 ? take_legacy(b, config, b->why.line) : r;
}

static void take_host(struct backend *b, const char *because) {
        struct kvd_why why;

        kvd_refuse(&why, 0, "%s", because);
        *b = (struct backend){.backend = KVD_BACKEND_HOST, .why = why};
}

int backend_choose(const struct config *config, struct backend *ret) {
        int r;

        *ret = (struct backend){.backend = KVD_BACKEND_HOST};
        if (config->backend == CONFIG_BACKEND_HOST) {
                take_host(ret, "backend = host");
                return 0;
        }
        r = find(ret, config);
        if (r == 0)
                r = take_gpu(ret, config);
        if (r < 0 && config->backend == CONFIG_BACKEND_AUTO) {
                degraded_set(host_memory, ret->cuda != NULL);
                take_host(ret, ret->why.line);
                return 0;
        }
        return r;
}

/* ---- pool ------------------------------------------------------------------------------------ */

#define RESERVE (UINT64_C(1) << 30) /* bytes, for the contexts of the worker and of an engine */

static void size_by_gpu(const struct backend *b, struct config *config) {
        uint64_t share = b->bytes / 100 * config->pool_share;

        if (!config->reserve)
                config->reserve = MIN(RESERVE, b->bytes / 16);
        if (config->pool_share)
                config->pool = MIN(share, b->bytes - MIN(b->bytes, config->reserve)) * b->n_gpus;
}

/* A worker carries blocks to and from tiers, and uses one GPU. */
static int check_gpus(const struct backend *b, const struct config *config, struct kvd_why *why) {
        if (b->n_gpus > 1 && (config->file[0] || config->remote[0] || config->host_tier))
                return kvd_refuse(
                        why, -EINVAL,
                        "file, remote and host_tier take the blocks of one GPU, and device "
                        "names %u; leave them out, or start a daemon for each GPU",
                        b->n_gpus);
        if (DIV_UP(config->pool, b->n_gpus) + config->reserve <= b->bytes)
                return 0;
        return kvd_refuse(why, -EINVAL,
                          "pool is %llu MiB%s, reserve %llu MiB, and %s has %llu MiB; lower one of "
                          "them",
                          (unsigned long long)(config->pool >> 20),
                          b->n_gpus > 1 ? " on all GPUs together" : "",
                          (unsigned long long)(config->reserve >> 20), b->device,
                          (unsigned long long)(b->bytes >> 20));
}

/* Blocks pass through host memory on their way to and from files and servers. */
static uint64_t least_spill(const struct config *config) {
        return config->host_tier + (config->file[0] ? STORE_CARRY_BYTES : 0) +
               (config->remote[0] ? STORE_CARRY_BYTES : 0);
}

int backend_size_pool(const struct backend *b, struct config *config, struct kvd_why *why) {
        if (b->backend != KVD_BACKEND_HOST)
                size_by_gpu(b, config);
        config->pool_share = 0;
        if (b->backend == KVD_BACKEND_HOST)
                return config_check(config, why);
        if (!config->spill)
                config->spill = MIN(config->pool, memory_usable("") / 4) + least_spill(config);
        if (config->spill < least_spill(config))
                return kvd_refuse(why, -EINVAL,
                                  "spill is less than the %llu MiB that host_tier, file and remote "
                                  "need below a GPU (file and remote 16 MiB each); raise it",
                                  (unsigned long long)(least_spill(config) >> 20));
        if (check_gpus(b, config, why) < 0)
                return -EINVAL;
        if (config->worker == CONFIG_OFF)
                return kvd_refuse(why, -EINVAL,
                                  "worker = off, but only the worker can clear GPU memory before "
                                  "clients use it; set worker = auto, or backend = host");
        return config_check(config, why);
}
