/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Segments of the pool, as they come: a pool grows and, on a GPU, has holes. A view asks its daemon
 * for what it has not mapped yet when it meets a block there; the answer holds a descriptor for
 * each segment that has memory.
 */

#include <errno.h>

#include "client/device.h"

/* ---- one answer ------------------------------------------------------------------------------ */

static int map_segment(struct view *view, uint32_t number, const struct segment_source *from,
                       bool writable) {
        bool had = view->device && view_has(view, number) && view_may_write(view, number);
        int r = view->memory->map(view, number, from, writable);

        if (r == 0)
                view_set_segment(view, number, true, writable || had);
        return r;
}

/*
 * What the answer has for segments from first on: a descriptor for each but those without memory,
 * or one handle.
 */
static int map_answer(struct view *view, uint32_t first, const struct kvd_msg_segments_reply *reply,
                      const struct kvd_fds *fds) {
        uint32_t n = MIN(reply->count, view->ix->max_segments - first), next = 0;
        const uint8_t *handles = reply->handles.data;
        int r = 0;

        if (reply->count > 64 ||
            (!handles && fds->n + (uint32_t)__builtin_popcountll(reply->absent) != reply->count) ||
            (reply->handles.size && reply->handles.size != reply->count * CU_IPC_HANDLE_BYTES))
                return daemon_fail(-EPROTO, "segments without descriptors");
        for (uint32_t i = 0; r == 0 && i < n; i++) {
                struct segment_source from = {-1,
                                              handles ? handles + i * CU_IPC_HANDLE_BYTES : NULL};

                if (reply->absent >> i & 1)
                        continue;
                if (!handles)
                        from.fd = fds->fd[next++];
                r = map_segment(view, first + i, &from, reply->writable >> i & 1);
        }
        return r;
}

/* Maps those from first on that one answer holds; n: how many it told of. */
static int fetch_segments(struct view *view, uint32_t first, uint32_t *n) {
        struct kvd_msg_segments request = {view->handle, first};
        struct kvd_msg_segments_reply reply;
        struct kvd_fds fds;
        int r = handle_call(view->space->handle, KVD_MSG_segments, &request, &reply, &fds);

        if (r < 0)
                return r;
        *n = reply.count;
        r = map_answer(view, first, &reply, &fds);
        kvd_fds_close(&fds);
        return r;
}

/* ---- as many as are needed ------------------------------------------------------------------- */

static int check_connected(const struct view *view) {
        if (view->epoch == view->space->handle->epoch && conn_is_open(view->space->handle->conn))
                return 0;
        return client_fail(-ENOTCONN, "the pool has grown and its daemon is gone");
}

int view_map_segments(struct view *view, uint32_t at_least) {
        int r = check_connected(view);

        for (uint32_t at = atomic_load(&view->n_mapped), n; r == 0 && at < at_least; at += n) {
                n = 1;
                if (view_has(view, at))
                        continue;
                r = fetch_segments(view, at, &n);
                if (r == 0 && n == 0)
                        r = daemon_fail(-EPROTO, "a block of a segment that does not exist");
        }
        return r;
}

int view_map_block(struct view *view, uint32_t id, bool write) {
        uint32_t segment = kvd_segment_of(view->ix, id), n;
        int r = 0;

        if (id >= view->ix->capacity)
                return daemon_fail(-EPROTO, "a block that does not exist");
        if (!view_has(view, segment))
                r = view_map_segments(view, segment + 1);
        /* it changed hands: this maps it again */
        if (r == 0 && write && !view_may_write(view, segment))
                r = fetch_segments(view, segment, &n);
        if (r == 0 && !view_has(view, segment))
                r = daemon_fail(-EPROTO, "a block of a segment without memory");
        return r;
}

int view_map_blocks(struct view *view, const kvd_ref *refs, uint32_t n) {
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < n; i++) {
                if (likely(kvd_segment_of(view->ix, kvd_ref_id(refs[i])) <
                           atomic_load(&view->n_mapped)))
                        continue;
                pthread_mutex_lock(&view->space->handle->lock);
                r = view_map_block(view, kvd_ref_id(refs[i]), false);
                pthread_mutex_unlock(&view->space->handle->lock);
        }
        return r;
}
