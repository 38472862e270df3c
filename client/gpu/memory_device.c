/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Maps a pool on a GPU. The daemon identifies the GPU by UUID, since its ordinal may differ in this
 * process. Everything is done in that GPU's primary context. VMM segments lie side by side in one
 * reserved range of device addresses, as segments in host memory do. A legacy handle comes with its
 * own address, so there is one segment and no range.
 *
 * The driver may wait for the GPU's work, which may wait for anything. So segments are mapped and
 * unmapped without kvd.lock, and other threads continue meanwhile. They do not touch busy segments.
 *
 * Memory that the GPU may be using is never unmapped: a segment is given back only when the daemon
 * reports that it has no blocks, and a block stays while it is pinned, that is, until the stream of
 * its last reader has passed (semaphore.c).
 */

#include <errno.h>
#include <string.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/sys.h"

static int open_gpu(struct view *view, struct device *d) {
        struct cu_uuid uuid;
        char text[KVD_UUID_TEXT];
        int r;

        memcpy(uuid.bytes, view->ix->devices[view->shard], sizeof uuid.bytes);
        r = kvd_device_open(&d->gpu, &uuid);
        if (r == 0)
                return 0;
        kvd_uuid_text(&uuid, NULL, text);
        return client_fail(r,
                           "the pool is on the GPU with UUID %s, which this process cannot see: %s",
                           text, d->gpu.why);
}

static int device_fail(const struct kvd_device *gpu, int error, const char *what) {
        return client_fail(error, "%s: %s", what, gpu->why);
}

/* Of a pool on several GPUs, the caller says which one it uses: it may see all of them. */
static int choose_shard(struct view *view) {
        uint32_t n = view->ix->n_shards, shard = view->space->options.shard;

        if (shard > n)
                return client_fail(-EINVAL, "the pool has %u GPUs, and options.shard is %u", n,
                                   shard);
        if (!shard && n > 1)
                return client_fail(
                        -EINVAL,
                        "the pool has %u GPUs, with a shard of each block: say which one "
                        "this process uses (options.shard)",
                        n);
        view->shard = shard ? shard - 1 : 0;
        return 0;
}

static int reserve(struct view *view) {
        uint64_t bytes = (uint64_t)view->ix->max_segments * kvd_shard_segment(view->ix);
        struct device *d;
        cu_address at;
        int r;

        if (is_fixed(view->space))
                return client_fail(
                        -EOPNOTSUPP,
                        "fixed addresses (KVD_SPACE_FIXED) are for pools in host memory");
        r = choose_shard(view);
        if (r < 0)
                return r;
        d = sys->calloc(1, sizeof *d);
        if (!d)
                return client_fail(-ENOMEM, "out of memory");
        r = open_gpu(view, d);
        if (r < 0) {
                kvd_device_close(&d->gpu);
                free(d);
                return r;
        }
        view->device = d;
        if (view->ix->backend == KVD_BACKEND_LEGACY)
                return 0; /* the address comes with the segment */
        r = kvd_device_reserve(&d->gpu, bytes, &at);
        if (r < 0)
                return device_fail(&d->gpu, r, "no device addresses for the pool");
        view->base = view->sealed = (uint8_t *)at;
        view->reserved = bytes;
        return 0;
}

static cu_address address(const struct view *view, uint32_t number) {
        return (cu_address)view->base + (uint64_t)number * kvd_shard_segment(view->ix);
}

/* ---- busy segments --------------------------------------------------------------------------- */

static uint64_t *busy_word(struct view *view, uint32_t number) {
        return &view->device->busy[number / 64];
}

static bool is_busy(struct view *view, uint32_t number) {
        return *busy_word(view, number) >> number % 64 & 1;
}

/* Until hand_back, this thread owns the segments and does not hold kvd.lock. */
static void hand_over(struct view *view, const uint32_t *segments, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                *busy_word(view, segments[i]) |= UINT64_C(1) << segments[i] % 64;
        view->device->n_busy += n;
        atomic_fetch_add(&view->refs, 1);
        handle_unlock(view->space->handle);
}

static void hand_back(struct view *view, const uint32_t *segments, uint32_t n) {
        handle_lock_again(view->space->handle);
        view_leave(view);
        for (uint32_t i = 0; i < n; i++)
                *busy_word(view, segments[i]) &= ~(UINT64_C(1) << segments[i] % 64);
        view->device->n_busy -= n;
        handle_changed(view->space->handle);
}

bool device_is_mapping(const struct view *view) {
        return view->device->n_busy;
}

static int wait_for(struct view *view, uint32_t number) {
        int r = 0;

        atomic_fetch_add(&view->refs, 1);
        while (r == 0 && is_busy(view, number))
                r = handle_wait(view->space->handle);
        view_leave(view);
        return r;
}

/* ---- mapping --------------------------------------------------------------------------------- */

static int map_legacy(struct view *view, uint32_t number, const struct segment_source *from) {
        struct kvd_device gpu = view->device->gpu; /* a copy, for its own error message */
        struct cu_ipc_handle handle;
        cu_address at;
        int r;

        if (view->base)
                return 0;
        if (number != 0 || !from->handle)
                return daemon_fail(-EPROTO, "a pool with a legacy handle has one segment");
        memcpy(handle.bytes, from->handle, sizeof handle.bytes);
        hand_over(view, &number, 1);
        r = kvd_device_open_handle(&gpu, &handle, &at);
        hand_back(view, &number, 1);
        if (r < 0)
                return device_fail(&gpu, r, "cannot open the pool's handle");
        /* set before n_mapped, and so before a lookup uses it */
        view->base = view->sealed = (uint8_t *)at;
        return 0;
}

static void unmap(struct view *view, uint32_t number) {
        struct kvd_device gpu = view->device->gpu; /* a copy, for its own error message */

        kvd_device_unmap(&gpu, address(view, number), kvd_shard_segment(view->ix));
}

/*
 * A segment that is mapped read-only and now needs write access belongs to this client alone: none
 * of its blocks is in use here, so it can be mapped again.
 */
static int map_vmm(struct view *view, uint32_t number, int fd, bool writable) {
        struct kvd_device gpu = view->device->gpu; /* a copy, for its own error message */
        bool had = view_has(view, number);
        int r;

        if (had && (!writable || view_may_write(view, number)))
                return 0;
        view_lose_segment(view, number);
        hand_over(view, &number, 1);
        if (had)
                unmap(view, number);
        r = kvd_device_map(&gpu, address(view, number), kvd_shard_segment(view->ix), fd, writable);
        hand_back(view, &number, 1);
        return r < 0 ? device_fail(&gpu, r, "cannot map a segment of the pool") : 0;
}

static int map(struct view *view, uint32_t number, const struct segment_source *from,
               bool writable) {
        int r = wait_for(view, number);

        if (r < 0)
                return r;
        return view->ix->backend == KVD_BACKEND_LEGACY ? map_legacy(view, number, from) :
                                                         map_vmm(view, number, from->fd, writable);
}

static void unmap_all(struct view *view) {
        if (view->ix->backend == KVD_BACKEND_LEGACY) {
                if (view->base)
                        kvd_device_close_handle(&view->device->gpu, (cu_address)view->base);
                return;
        }
        for (uint32_t i = 0; i < view->ix->max_segments; i++)
                if (view_has(view, i))
                        unmap(view, i);
        if (view->base)
                kvd_device_unreserve(&view->device->gpu, (cu_address)view->base, view->reserved);
}

/* ---- writing --------------------------------------------------------------------------------- */

static cu_result copy_in(const struct kvd_device *gpu, void *to, const void *from, size_t bytes,
                         cu_stream stream) {
        cu_result error = gpu->cuda->cuMemcpyHtoDAsync((cu_address)(uintptr_t)to, from, bytes,
                                                       stream);

        return error ? error : gpu->cuda->cuStreamSynchronize(stream);
}

/* In a stream of its own: the legacy default stream would break captures and wait for others. */
int device_store(struct view *view, void *to, const void *from, size_t bytes) {
        struct kvd_device gpu = view->device->gpu; /* a copy, for its own error message */
        cu_stream stream = NULL;
        cu_result error;
        char words[128];
        int r = kvd_device_enter(&gpu);

        if (r < 0)
                return device_fail(&gpu, r, "cannot write a block");
        error = gpu.cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
        if (error == CU_OK) {
                error = copy_in(&gpu, to, from, bytes, stream);
                gpu.cuda->cuStreamDestroy(stream);
        }
        kvd_device_leave(&gpu);
        return error == CU_OK ? 0 :
                                client_fail(kvd_cuda_errno(error), "cannot write a block: %s",
                                            kvd_cuda_why(gpu.cuda, error, words, sizeof words));
}

/* ---- the end --------------------------------------------------------------------------------- */

static void release(struct view *view) {
        if (!view->device)
                return;
        semaphore_close(view);
        unmap_all(view);
        kvd_device_close(&view->device->gpu);
        free(view->device);
        view->device = NULL;
}

const struct mapping_kind mapping_device = {.reserve = reserve, .map = map, .release = release};

/* ---- giving segments back -------------------------------------------------------------------- */

#define DRAIN_MAX 1024u /* maximum number of segments in one message */
#define DRAIN_ROUNDS 16u

/* Reports n segments as unmapped. Replaces them, and n, by those that the daemon wants back. */
static int ask_drain(struct view *view, uint32_t *segments, uint32_t *n) {
        struct kvd_msg_drain request = {view->handle, {segments, *n * (uint32_t)sizeof *segments}};
        struct kvd_msg_drain_reply reply;
        int r = handle_call(view->space->handle, KVD_MSG_drain, &request, &reply, NULL);

        if (r < 0)
                return r;
        *n = MIN(reply.wanted.size / (uint32_t)sizeof *segments, DRAIN_MAX);
        if (*n)
                memcpy(segments, reply.wanted.data, *n * sizeof *segments);
        return 0;
}

/*
 * Clears the bits before unmapping: a thread that later needs a block there maps the segment again,
 * with the memory that it has then. Moves segments that were mapped to the front, and sets *n to
 * their number. A segment that is being mapped does not count yet.
 */
static void lose(struct view *view, uint32_t *segments, uint32_t *n) {
        uint32_t had = 0;

        for (uint32_t i = 0; i < *n; i++) {
                uint32_t number = segments[i];

                if (number >= view->ix->max_segments || !view_has(view, number))
                        continue;
                view_lose_segment(view, number);
                segments[i] = segments[had];
                segments[had++] = number;
        }
        *n = had;
}

static void give_back(struct view *view, uint32_t *segments, uint32_t n) {
        uint32_t had = n;

        lose(view, segments, &had);
        if (!had)
                return;
        hand_over(view, segments, had);
        for (uint32_t i = 0; i < had; i++)
                unmap(view, segments[i]);
        hand_back(view, segments, had);
}

static bool is_unmapped(struct view *view, uint32_t number) {
        return number >= view->ix->max_segments ||
               (!view_has(view, number) && !is_busy(view, number));
}

/* Omits segments that another thread has mapped again, or is mapping: they must not be reported. */
static uint32_t keep_unmapped(struct view *view, uint32_t *segments, uint32_t n) {
        uint32_t kept = 0;

        for (uint32_t i = 0; i < n; i++)
                if (is_unmapped(view, segments[i]))
                        segments[kept++] = segments[i];
        return kept;
}

bool device_drain_wanted(const struct view *view) {
        return view->ix->backend == KVD_BACKEND_VMM &&
               atomic_load(&view->ix->drain_epoch) != atomic_load(&view->device->drained);
}

static void drain(struct view *view) {
        uint32_t epoch = atomic_load(&view->ix->drain_epoch), segments[DRAIN_MAX], n = 0;

        for (uint32_t i = 0; i < DRAIN_ROUNDS && view_is_connected(view); i++) {
                n = keep_unmapped(view, segments, n);
                if (ask_drain(view, segments, &n) < 0)
                        return;
                if (n == 0) {
                        atomic_store(&view->device->drained, epoch);
                        return;
                }
                give_back(view, segments, n);
        }
}

/* One thread at a time. The reference keeps the view while the lock is released. */
void device_drain(struct view *view) {
        if (likely(!device_drain_wanted(view)) || view->device->draining)
                return;
        view->device->draining = true;
        atomic_fetch_add(&view->refs, 1);
        drain(view);
        view->device->draining = false;
        view_leave(view);
}
