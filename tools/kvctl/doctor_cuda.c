/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tries the CUDA driver as daemon and clients would use it. Each probe runs in its own process, so
 * that a driver that hangs or crashes is a finding.
 */

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/shared_file.h"
#include "kernels/cuda/cublas.h"
#include "kernels/cuda/block.h"
#include "tools/kvctl/doctor.h"

#define PAGE 4096u

/* ---- reporting ------------------------------------------------------------------------------- */

static void failed(struct finding *f, const struct kvd_cuda *cuda, const char *what,
                   cu_result error) {
        char text[200];

        found(f, HEALTH_MISSING, "%s: %s", what, kvd_cuda_why(cuda, error, text, sizeof text));
}

/* Makes a call of the driver. If it fails, reports that in f and returns false. */
#define TRY(f, cuda, call, ...) try(f, cuda, #call, (cuda)->call(__VA_ARGS__))

static bool try(struct finding *f, const struct kvd_cuda *cuda, const char *what, cu_result error) {
        if (error)
                failed(f, cuda, what, error);
        return !error;
}

/* ---- driver and devices ---------------------------------------------------------------------- */

static const struct kvd_cuda *load(struct finding *f) {
        const char *why = NULL;
        const struct kvd_cuda *cuda = kvd_cuda_load(&why);

        if (!cuda)
                found(f, HEALTH_MISSING, "%s", why);
        else if (!TRY(f, cuda, cuInit, 0))
                cuda = NULL;
        return cuda;
}

void probe_driver(struct finding *f, uint32_t device) {
        const struct kvd_cuda *cuda = load(f);
        Dl_info info = {0};
        int version = 0, n = 0;

        if (!cuda || !TRY(f, cuda, cuDriverGetVersion, &version) ||
            !TRY(f, cuda, cuDeviceGetCount, &n))
                return;
        dladdr(*(void **)&cuda->cuInit, &info);
        f->value[0] = (uint64_t)version;
        f->value[1] = (uint64_t)n;
        found(f, n ? HEALTH_OK : HEALTH_MISSING, "CUDA %d.%d, %d device%s, %s", version / 1000,
              version % 1000 / 10, n, n == 1 ? "" : "s",
              info.dli_fname ? info.dli_fname : "libcuda.so.1");
}

static uint64_t attribute(const struct kvd_cuda *cuda, int which, cu_device device) {
        int value = 0;

        return cuda->cuDeviceGetAttribute(&value, which, device) ? 0 : (uint64_t)value;
}

void probe_device(struct finding *f, uint32_t ordinal) {
        const struct kvd_cuda *cuda = load(f);
        char name[96], uuid[KVD_UUID_TEXT];
        cu_device device;
        size_t bytes;

        if (!cuda || !TRY(f, cuda, cuDeviceGet, &device, (int)ordinal) ||
            !TRY(f, cuda, cuDeviceGetName, name, sizeof name, device) ||
            !TRY(f, cuda, cuDeviceGetUuid, &f->uuid, device) ||
            !TRY(f, cuda, cuDeviceTotalMem, &bytes, device))
                return;
        f->value[0] = bytes;
        f->value[1] = attribute(cuda, CU_ATTR_CAPABILITY_MAJOR, device) * 10 +
                      attribute(cuda, CU_ATTR_CAPABILITY_MINOR, device);
        kvd_uuid_text(&f->uuid, name, uuid);
        found(f, HEALTH_OK, "%s, %.1f GiB, %llu.%llu, %s", name, (double)bytes / (1 << 30),
              (unsigned long long)f->value[1] / 10, (unsigned long long)f->value[1] % 10, uuid);
}

/* Opens the device as a client does. False: the reason is in f. */
static bool open_device(struct finding *f, struct kvd_device *d, uint32_t ordinal) {
        const struct kvd_cuda *cuda = load(f);
        struct cu_uuid uuid;
        cu_device device;

        if (!cuda || !TRY(f, cuda, cuDeviceGet, &device, (int)ordinal) ||
            !TRY(f, cuda, cuDeviceGetUuid, &uuid, device))
                return false;
        if (kvd_device_open(d, &uuid) == 0 && kvd_device_enter(d) == 0)
                return true;
        found(f, HEALTH_MISSING, "%s", d->why);
        return false;
}

/* ---- memory between processes ---------------------------------------------------------------- */

struct offer { /* sent by the process that makes the memory */
        uint64_t bytes;
        uint32_t writable, legacy;
        struct cu_ipc_handle handle;
};

/* Writes a word if the memory is writable, and reads it back. */
static bool use(struct finding *f, struct kvd_device *d, cu_address at, bool writable) {
        uint32_t word = 0;

        if (writable && !TRY(f, d->cuda, cuMemsetD32Async, at, 4711, 1, NULL))
                return false;
        if (!TRY(f, d->cuda, cuMemcpyDtoHAsync, &word, at, sizeof word, NULL) ||
            !TRY(f, d->cuda, cuStreamSynchronize, NULL))
                return false;
        if (writable && word != 4711)
                found(f, HEALTH_MISSING, "the word that was read differs from the one written");
        return !writable || word == 4711;
}

static void take_offer(struct finding *f, struct kvd_device *d, const struct offer *offer, int fd) {
        cu_address at;
        int r;

        if (offer->legacy)
                r = kvd_device_open_handle(d, &offer->handle, &at);
        else if ((r = kvd_device_reserve(d, offer->bytes, &at)) == 0)
                r = kvd_device_map(d, at, offer->bytes, fd, offer->writable);
        if (r < 0)
                found(f, HEALTH_MISSING, "another process cannot map it: %s", d->why);
        else if (use(f, d, at, offer->writable))
                f->health = HEALTH_OK;
}

/* The other process: a client. */
static void be_client(int socket, uint32_t device) {
        struct finding f = {.health = HEALTH_MISSING};
        struct kvd_device d;
        struct offer offer;
        int fd;

        if (socket_take(socket, &offer, sizeof offer, &fd) < 0)
                return;
        if (open_device(&f, &d, device))
                take_offer(&f, &d, &offer, fd);
        socket_send(socket, &f, sizeof f, -1);
}

static void ask_client(struct finding *f, int client, const struct offer *offer, int fd,
                       const char *well) {
        if (socket_send(client, offer, sizeof *offer, fd) < 0 ||
            socket_take(client, f, sizeof *f, NULL) < 0)
                found(f, HEALTH_MISSING, "the process that should map it is gone");
        else if (f->health == HEALTH_OK)
                found(f, HEALTH_OK, "%s", well);
}

/* Makes the memory as the daemon does: after cuInit, without a context. */
static void offer_chunk(struct finding *f, uint32_t ordinal, bool writable, const char *well) {
        int client = probe_other(be_client, ordinal), fd = -1;
        const struct kvd_cuda *cuda = load(f);
        struct cu_allocation what = {.type = CU_ALLOCATION_PINNED,
                                     .handle_types = CU_HANDLE_POSIX_FD,
                                     .location = {CU_LOCATION_DEVICE, 0}};
        struct offer offer = {.writable = writable};
        cu_device device;
        cu_memory memory;
        size_t bytes;

        if (!cuda || !TRY(f, cuda, cuDeviceGet, &device, (int)ordinal))
                return;
        what.location.id = device;
        if (!TRY(f, cuda, cuMemGetAllocationGranularity, &bytes, &what,
                 CU_GRANULARITY_RECOMMENDED) ||
            !TRY(f, cuda, cuMemCreate, &memory, bytes, &what, 0) ||
            !TRY(f, cuda, cuMemExportToShareableHandle, &fd, memory, CU_HANDLE_POSIX_FD, 0))
                return;
        offer.bytes = bytes;
        ask_client(f, client, &offer, fd, well);
}

void probe_vmm(struct finding *f, uint32_t device) {
        offer_chunk(f, device, true,
                    "made without a context, mapped and written by another process");
}

void probe_readonly(struct finding *f, uint32_t device) {
        offer_chunk(
                f, device, false,
                "mapped for reading by another process (a store was not tried: it would crash that process)");
}

void probe_legacy(struct finding *f, uint32_t ordinal) {
        int client = probe_other(be_client, ordinal);
        struct offer offer = {.bytes = 2 << 20, .writable = true, .legacy = true};
        struct kvd_device d;
        cu_address at;

        if (open_device(f, &d, ordinal) && TRY(f, d.cuda, cuMemAlloc, &at, offer.bytes) &&
            TRY(f, d.cuda, cuIpcGetMemHandle, &offer.handle, at))
                ask_client(f, client, &offer, -1, "opened and written by another process");
}

/* ---- streams that wait ----------------------------------------------------------------------- */

struct order {
        struct kvd_device d;
        cu_stream waits, writes;
        uint64_t *page; /* host memory; NULL if the slot is in the device's memory */
        cu_address slot;
};

static bool order_open(struct finding *f, struct order *o, uint32_t device, bool in_host) {
        struct shared_file file;

        if (!open_device(f, &o->d, device) ||
            !TRY(f, o->d.cuda, cuStreamCreateWithPriority, &o->waits, CU_STREAM_NON_BLOCKING, 0) ||
            !TRY(f, o->d.cuda, cuStreamCreateWithPriority, &o->writes, CU_STREAM_NON_BLOCKING, 0))
                return false;
        if (!in_host)
                return TRY(f, o->d.cuda, cuMemAlloc, &o->slot, PAGE) &&
                       TRY(f, o->d.cuda, cuMemsetD8Async, o->slot, 0, PAGE, o->waits) &&
                       TRY(f, o->d.cuda, cuStreamSynchronize, o->waits);
        if (shared_file_new("kvctl-doctor", PAGE, SHARED_MAPPED, &file) < 0)
                return false;
        o->page = file.at;
        if (kvd_device_register(&o->d, o->page, PAGE, &o->slot) < 0) {
                found(f, HEALTH_MISSING, "host memory cannot be registered: %s", o->d.why);
                return false;
        }
        return true;
}

static void nap_ms(long ms) {
        nanosleep(&(struct timespec){0, ms * 1000000}, NULL);
}

/* Waits up to a second for the waiting stream. CU_NOT_READY: it is not done. */
static cu_result settle(struct order *o) {
        cu_result r = CU_NOT_READY;

        for (int i = 0; i < 1000 && r == CU_NOT_READY; i++) {
                r = o->d.cuda->cuStreamQuery(o->waits);
                nap_ms(1);
        }
        return r;
}

static void order(struct finding *f, uint32_t device, bool in_host, bool store, const char *well) {
        struct order o = {0};
        cu_result r;

        if (!order_open(f, &o, device, in_host) ||
            !TRY(f, o.d.cuda, cuStreamWaitValue64, o.waits, o.slot, 1, CU_WAIT_GEQ))
                return;
        nap_ms(20); /* let the stream begin to wait */
        if (store)
                __atomic_store_n(o.page, 1, __ATOMIC_SEQ_CST);
        else if (!TRY(f, o.d.cuda, cuStreamWriteValue64, o.writes, o.slot, 1, CU_WRITE_DEFAULT))
                return;
        r = settle(&o);
        if (r == CU_NOT_READY)
                found(f, HEALTH_MISSING, "the stream still waits a second later");
        else if (try(f, o.d.cuda, "the waiting stream", r))
                found(f, HEALTH_OK, "%s", well);
}

void probe_order_device(struct finding *f, uint32_t device) {
        order(f, device, false, false, "a stream waits for a value that another stream writes");
}

void probe_order_host(struct finding *f, uint32_t device) {
        order(f, device, true, false, "a stream waits for a value that another stream writes");
}

void probe_order_store(struct finding *f, uint32_t device) {
        order(f, device, true, true,
              "a waiting stream continues when a processor stores the value");
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* Copies the last and the first token of a block of four to the next block. */
static bool launch(struct finding *f, struct gpu *gpu) {
        static const struct {
                float blocks[2][8];
                uint32_t ids[2], index[2];
        } from = {{{1, 2, 3, 4, 5, 6, 7, 8}}, {0, 1}, {3, 0}};
        static const float copied[8] = {4, 1, 0, 0, 8, 5};
        float to[8] = {0};
        cu_address at;
        struct gpu_compact a = {.blocks.block_bytes = sizeof to,
                                .plane = sizeof to / 2,
                                .slot_stride = sizeof *to,
                                .bytes = sizeof *to,
                                .to = 1,
                                .layers = 1,
                                .heads = 1,
                                .per_block = 4,
                                .n = 2};

        if (!TRY(f, gpu->cuda, cuMemAlloc, &at, 4096) ||
            !TRY(f, gpu->cuda, cuMemcpyHtoDAsync, at, &from, sizeof from, NULL))
                return false;
        a.blocks.base = at;
        a.blocks.ids = at + offsetof(typeof(from), ids);
        a.index = at + offsetof(typeof(from), index);
        if (gpu_compact(gpu, NULL, &a) < 0) {
                found(f, HEALTH_MISSING, "%s", gpu->why);
                return false;
        }
        if (!TRY(f, gpu->cuda, cuMemcpyDtoHAsync, to, at + sizeof to, sizeof to, NULL) ||
            !TRY(f, gpu->cuda, cuStreamSynchronize, NULL))
                return false;
        if (memcmp(to, copied, sizeof to) != 0)
                found(f, HEALTH_MISSING, "a kernel ran, and its result is wrong");
        else
                found(f, HEALTH_OK, "launched, result compared");
        return true;
}

void probe_kernels(struct finding *f, uint32_t device) {
        struct gpu gpu;

        if (gpu_open(&gpu, (cu_device)device) < 0 || gpu_has_kernels(&gpu) < 0)
                found(f, HEALTH_MISSING, "%s", gpu.why);
        else
                launch(f, &gpu);
}

void probe_cublas(struct finding *f, uint32_t device) {
        const char *why = NULL;
        const struct cublas *calls = cublas_load(&why);
        int version = 0;
        void *handle = NULL;
        struct gpu gpu;

        if (!calls) {
                found(f, HEALTH_NOTE, "%s (kvlm on a GPU needs it; daemon and clients do not)",
                      why);
                return;
        }
        if (gpu_open(&gpu, (cu_device)device) < 0) {
                found(f, HEALTH_NOTE, "%s", gpu.why);
                return;
        }
        if (calls->create(&handle) || calls->get_version(handle, &version))
                found(f, HEALTH_NOTE, "found, but it does not start on this device");
        else
                found(f, HEALTH_OK, "version %d", version);
}
