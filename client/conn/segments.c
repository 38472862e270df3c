/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Maps segments of the pool as they appear: a pool grows and has holes, and a segment that lost its
 * memory may return with another memfd. Every call that sends the daemon a request also fetches new
 * segments. Lookups do not, but set view->wanted if they miss one. A reply has a descriptor for
 * each segment that has memory.
 */

#include <errno.h>

#include "client/gpu/gpu_view.h"

/* ---- one reply ------------------------------------------------------------------------------- */

/*
 * memory: value in the index before the request, so that what is mapped is no older. On a GPU a
 * segment keeps its memory for the client that was given it, so the current value is right.
 */
static int map_segment(struct view *view, uint32_t number, const struct segment_source *from,
                       uint32_t memory, bool writable) {
        bool had = view->device && view_has(view, number) && view_may_write(view, number);
        int r;

        if (view->device)
                memory = atomic_load(&kvd_index_memory(view->ix)[number]);
        if (atomic_load(&view->memory[number]) != memory)
                view_lose_segment(view, number);
        r = view->mapping->map(view, number, from, writable);
        if (r < 0)
                return r;
        atomic_store(&view->memory[number], memory);
        view_set_segment(view, number, true, writable || had);
        return 0;
}

/*
 * Maps the segments of a reply, from first on. It has a descriptor for each segment with memory, or
 * else a legacy handle for each segment.
 */
static int map_answer(struct view *view, uint32_t first, const struct kvd_msg_segments_reply *reply,
                      const struct kvd_fds *fds, const uint32_t memory[64]) {
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
                r = map_segment(view, first + i, &from, memory[i], reply->writable >> i & 1);
        }
        return r;
}

static int check_connected(const struct view *view) {
        if (view_is_connected(view))
                return 0;
        return client_fail(-ENOTCONN, "the pool has grown and its daemon is gone");
}

/* Maps the segments from first on that one reply covers, and sets *n to their number. */
static int fetch_segments(struct view *view, uint32_t first, uint32_t *n) {
        struct kvd_msg_segments request = {view->handle, first, view->shard};
        struct kvd_msg_segments_reply reply;
        uint32_t memory[64] = {0};
        struct kvd_fds fds;
        int r = check_connected(view);

        if (r < 0)
                return r;
        if (view->mapping == &mapping_none) {
                *n = mapping_none_note(view, first);
                return 0;
        }
        for (uint32_t i = 0; i < ARRAY_SIZE(memory) && first + i < view->ix->max_segments; i++)
                memory[i] = atomic_load(&kvd_index_memory(view->ix)[first + i]);
        r = handle_call(view->space->handle, KVD_MSG_segments, &request, &reply, &fds);
        if (r < 0)
                return r;
        *n = reply.count;
        r = map_answer(view, first, &reply, &fds, memory);
        kvd_fds_close(&fds);
        return r;
}

/* ---- as many as are needed ------------------------------------------------------------------- */

/* Marks segments with new memory as not mapped. */
static void forget_replaced(struct view *view) {
        uint32_t epoch = atomic_load(&view->ix->memory_epoch);

        if (view_is_fresh(view))
                return;
        for (uint32_t i = 0; i < view->ix->max_segments; i++)
                if (!view_has(view, i))
                        view_lose_segment(view, i);
        atomic_store(&view->memory_epoch, epoch);
}

int view_map_segments(struct view *view, uint32_t at_least) {
        int r = 0;

        forget_replaced(view);
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

int view_catch_up(struct view *view) {
        uint32_t n = MIN(atomic_load(&view->ix->n_segments), view->ix->max_segments);
        bool wanted = atomic_load(&view->wanted);
        int r;

        if (likely(n == atomic_load(&view->fetched) && !wanted && view_is_fresh(view)))
                return 0;
        /* leave it to a later call, rather than wait for the driver as well */
        if (view->device && device_is_mapping(view))
                return 0;
        /* the addresses of a fixed space are free once its older views are unmapped */
        if (is_fixed(view->space) && !view_is_last(view))
                return 0;
        atomic_store(&view->wanted, false);
        r = view_map_segments(view, n);
        if (r == 0)
                atomic_store(&view->fetched, n);
        return r;
}

int view_map_block(struct view *view, uint32_t id, bool write) {
        uint32_t segment = kvd_segment_of(view->ix, id), n;
        int r = 0;

        if (id >= view->ix->capacity)
                return daemon_fail(-EPROTO, "a block that does not exist");
        if (!view_has(view, segment))
                r = view_map_segments(view, segment + 1);
        /* we became its writer: this maps it again */
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
                                   atomic_load(&view->n_mapped) &&
                           view_is_fresh(view)))
                        continue;
                r = handle_lock(view->space->handle);
                if (r < 0)
                        return r;
                r = view_map_block(view, kvd_ref_id(refs[i]), false);
                handle_unlock(view->space->handle);
        }
        return r;
}
