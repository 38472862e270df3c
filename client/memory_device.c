/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A pool on a GPU, as its user maps it. The daemon names the GPU by UUID, since its ordinal here
 * may be another one; all is done in that GPU's primary context. VMM segments lie side by side in
 * one reserved range of device addresses, as the host's do in one of host addresses; a legacy
 * handle brings its own address, so there is one segment and no range.
 *
 * What the GPU may be using is never unmapped: a segment is given back only when the daemon says
 * that it has no blocks, and a block stays while it is pinned, which it is until the stream of its
 * last reader has passed (order.c).
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/device.h"
#include "ipc/base/sys.h"

static void uuid_text(const uint8_t uuid[16], char to[static 41]) {
        char *p = to + sprintf(to, "GPU-");

        for (int i = 0; i < 16; i++)
                p += sprintf(p, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                             uuid[i]);
}

static int open_gpu(struct view *view, struct device *d) {
        struct cu_uuid uuid;
        char text[41];
        int r;

        memcpy(uuid.bytes, view->ix->device, sizeof uuid.bytes);
        r = kvd_device_open(&d->gpu, &uuid);
        if (r == 0)
                return 0;
        uuid_text(view->ix->device, text);
        return client_fail(r, "the pool is on %s, which this process cannot see: %s", text,
                           d->gpu.why);
}

static int device_fail(struct device *d, int error, const char *what) {
        return client_fail(error, "%s: %s", what, d->gpu.why);
}

static int reserve(struct view *view) {
        uint64_t bytes = (uint64_t)view->ix->max_segments * view->ix->segment_bytes;
        struct device *d;
        cu_address at;
        int r;

        if (is_fixed(view->space))
                return client_fail(-ENOTSUP, "fixed addresses (KVD_SPACE_FIXED) are for pools in "
                                             "host memory");
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
                return device_fail(d, r, "no device addresses for the pool");
        view->base = view->sealed = (uint8_t *)at;
        view->reserved = bytes;
        return 0;
}

static cu_address address(const struct view *view, uint32_t number) {
        return (cu_address)view->base + (uint64_t)number * view->ix->segment_bytes;
}

static int map_legacy(struct view *view, uint32_t number, const struct segment_source *from) {
        struct cu_ipc_handle handle;
        cu_address at;
        int r;

        if (view->base)
                return 0;
        if (number != 0 || !from->handle)
                return daemon_fail(-EPROTO, "a pool of legacy handles has one");
        memcpy(handle.bytes, from->handle, sizeof handle.bytes);
        r = kvd_device_open_handle(&view->device->gpu, &handle, &at);
        if (r < 0)
                return device_fail(view->device, r, "cannot open the pool's handle");
        /* before n_mapped, and so before any block is looked for in it */
        view->base = view->sealed = (uint8_t *)at;
        return 0;
}

static void unmap(struct view *view, uint32_t number) {
        kvd_device_unmap(&view->device->gpu, address(view, number), view->ix->segment_bytes);
}

/*
 * One that is mapped read-only and is to be written now belongs to nobody but us: nothing of it is
 * in use here.
 */
static int map(struct view *view, uint32_t number, const struct segment_source *from,
               bool writable) {
        struct device *d = view->device;
        int r;

        if (view->ix->backend == KVD_BACKEND_LEGACY)
                return map_legacy(view, number, from);
        if (view_has(view, number)) {
                if (!writable || view_may_write(view, number))
                        return 0;
                unmap(view, number);
        }
        r = kvd_device_map(&d->gpu, address(view, number), view->ix->segment_bytes, from->fd,
                           writable);
        if (r == 0)
                return 0;
        view_lose_segment(view, number);
        return device_fail(d, r, "cannot map a segment of the pool");
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

static void release(struct view *view) {
        if (!view->device)
                return;
        semaphore_close(view);
        unmap_all(view);
        kvd_device_close(&view->device->gpu);
        free(view->device);
        view->device = NULL;
}

const struct mapping_kind mapping_device = {
        .reserve = reserve, .map = map, .unmap = unmap, .release = release};

/* ---- giving segments back -------------------------------------------------------------------- */

#define DRAIN_MAX 1024u /* segments in one message */
#define DRAIN_ROUNDS 16u

/* Reports n segments as not mapped; n becomes those that are wanted back, into the same place. */
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
 * The bit goes first: who meets a block there later on maps the segment again, whatever it is made
 * of by then.
 */
static void let_go(struct view *view, uint32_t number) {
        if (number >= view->ix->max_segments || !view_has(view, number))
                return;
        view_lose_segment(view, number);
        unmap(view, number);
}

bool device_drain_wanted(const struct view *view) {
        return view->ix->backend == KVD_BACKEND_VMM &&
               atomic_load(&view->ix->drain_epoch) != atomic_load(&view->device->drained);
}

void device_drain(struct view *view) {
        uint32_t epoch = atomic_load(&view->ix->drain_epoch), segments[DRAIN_MAX], n = 0;

        if (likely(!device_drain_wanted(view)))
                return;
        for (uint32_t i = 0; i < DRAIN_ROUNDS && ask_drain(view, segments, &n) == 0; i++) {
                if (n == 0) {
                        atomic_store(&view->device->drained, epoch);
                        return;
                }
                for (uint32_t k = 0; k < n; k++)
                        let_go(view, segments[k]);
        }
}
