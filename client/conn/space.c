/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opens and closes a space, and returns the addresses of its memory. A space handle outlives its
 * attachments: each new daemon gives it a new view.
 */

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"

static void space_free(struct kvd_space *space) {
        attend_free_scratch(space);
        view_free_all(space);
        if (!forked(space->handle))
                mapping_host_end(space);
        free(space);
}

/* Checks what the daemon never sees, or would only refuse as a value over its limit. */
static int check_options(const struct kvd_space_options *o) {
        const char *bad = o->kind > KVD_kind_max     ? "kind: " KVD_NUMBERED(kind) :
                          o->keys > KVD_keys_max     ? "keys: " KVD_NUMBERED(keys) :
                          o->policy > KVD_policy_max ? "policy: " KVD_NUMBERED(policy) :
                          o->flags > KVD_SPACE_INDEX_ONLY ?
                                                       "flags: 1 fixed, 2 index only; not both" :
                          o->max_blocks > UINT32_MAX ? "max_blocks: less than 2^32" :
                          o->shard > KVD_SHARDS      ? "shard: at most 8" :
                          o->shard && (o->flags & KVD_SPACE_INDEX_ONLY) ?
                                                  "shard: 0 with index only" :
                          o->reserved ? "reserved: 0" :
                                        NULL;

        return bad ? client_fail(-EINVAL, "an option is unknown; %s", bad) : 0;
}

static int check_request(const char *name, const struct kvd_geometry *geometry,
                         const struct kvd_space_options *options) {
        if (!name || !geometry)
                return client_fail(-EINVAL, "a space needs a name and a geometry");
        if (strlen(name) > KVD_NAME_MAX)
                return client_fail(-EINVAL, "a space's name has at most %d characters",
                                   KVD_NAME_MAX);
        return options ? check_options(options) : 0;
}

int kvd_space_open(struct kvd *handle, const char *name, const struct kvd_geometry *geometry,
                   const struct kvd_space_options *options, struct kvd_space **ret) {
        struct kvd_space *space;
        struct view *view;
        const char *why;
        int r;

        if (handle_check(handle) < 0)
                return -ECHILD;
        r = check_request(name, geometry, options);
        if (r < 0)
                return r;
        space = sys->calloc(1, sizeof *space);
        if (!space)
                return client_fail(-ENOMEM, "out of memory");
        space->handle = handle;
        atomic_init(&space->users, 1);
        strcpy(space->name, name);
        space->geometry = shape_of(geometry);
        if (options)
                space->options = *options;
        r = kvd_shape_normalise(&space->geometry, &why);
        if (r < 0) {
                free(space);
                return client_fail(r, "space '%s': %s", name, why);
        }
        r = handle_lock(handle);
        if (r == 0) {
                r = view_attach(space, &view);
                handle_unlock(handle);
        }
        if (r < 0) {
                space_free(space);
                return r;
        }
        atomic_fetch_add(&handle->users, 1);
        *ret = space;
        return 0;
}

static void detach(struct kvd *handle, uint64_t epoch, uint32_t number) {
        struct kvd_msg_detach request = {number};

        if (handle_lock(handle) < 0) {
                later_detach(handle, epoch, number);
                return;
        }
        if (epoch == handle->epoch && conn_is_open(handle->conn))
                handle_call(handle, KVD_MSG_detach, &request, NULL, NULL);
        handle_unlock(handle);
}

/* Unmaps the space, and then tells the daemon that this process no longer uses it. */
static void close_space(struct kvd_space *space) {
        struct kvd *handle = space->handle;
        struct view *view;
        bool quiet = false;
        uint32_t number;
        uint64_t epoch;

        view = atomic_load(&space->view);
        number = view->handle;
        epoch = view->epoch;
        deadline_begin();
        if (forked(handle))
                view_forget_mappings(space);
        else
                quiet = !view->device || deferred_quiet(view);
        space_free(space);
        if (!forked(handle) && quiet) /* if not quiet, only process exit ends the GPU's work */
                detach(handle, epoch, number);
        kvd_close(handle);
}

void space_put(struct kvd_space *space) {
        if (atomic_fetch_sub(&space->users, 1) == 1)
                close_space(space);
}

struct kvd_space *kvd_space_close(struct kvd_space *space) {
        if (space)
                space_put(space);
        return NULL;
}

void kvd_counters(struct kvd_space *space, struct kvd_counters *ret) {
        uint64_t *out = (uint64_t *)ret;
        struct view *view;

        *ret = (struct kvd_counters){0};
        if (forked(space->handle))
                return;
        for (uint32_t i = 0; i < COUNTERS; i++)
                out[i] = atomic_load_explicit(&space->counters[i], memory_order_relaxed);
        view = view_get(space);
        view_count(view, out);
        view_put(view);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/*
 * Maps segments that are new or have new memory. If the daemon is gone, the current mapping stays.
 */
static void map_new_segments(struct view *view) {
        struct kvd *handle = view->space->handle;
        uint32_t n = atomic_load(&view->ix->n_segments);

        if (likely(atomic_load(&view->n_mapped) >= n && view_is_fresh(view)))
                return;
        if (handle_lock(handle) < 0)
                return;
        view_map_segments(view, n);
        handle_unlock(handle);
}

void view_memory(struct view *view, struct kvd_space_memory *ret) {
        map_new_segments(view);
        *ret = (struct kvd_space_memory){
                .base = view->base,
                .sealed = view->sealed,
                .block_bytes = view->ix->shard_bytes,
                .blocks = is_fixed(view->space) ? view->space->fixed.blocks : view->ix->capacity,
                .mapped = MIN(kvd_segments_ids(view->ix, atomic_load(&view->n_mapped)),
                              view->ix->capacity),
                .view = view,
        };
}

int kvd_space_memory(struct kvd_space *space, struct kvd_space_memory *ret) {
        struct view *view;

        if (space_check(space) < 0)
                return -ECHILD;
        view = view_get(space);
        view_memory(view, ret);
        view_put(view);
        return 0;
}
