/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Mappings of one attachment. A lookup holds a reference while it reads; a pin and a block that the caller fills hold
 * one each until they are let go. When the daemon is replaced, the space gets a new view, and the old one is unmapped
 * with its last reference. The struct itself lives until the space is closed, so that a thread that was late in
 * view_get may still touch its reference count.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client/device.h"
#include "ipc/base/file.h"
#include "ipc/base/sys.h"

/* ---- references --------------------------------------------------------------------------------------------- */

bool view_is_current(const struct view *view) {
        return atomic_load(&view->space->view) == view;
}

static void keep_counters(struct view *view) {
        static const uint32_t place[KVD_N_CLIENT_COUNTERS] = {
                [KVD_CLIENT_LOOKUPS] = offsetof(struct kvd_counters, lookups) / sizeof(uint64_t),
                [KVD_CLIENT_HITS] = offsetof(struct kvd_counters, lookup_hits) / sizeof(uint64_t),
                [KVD_CLIENT_TOKENS_ASKED] = offsetof(struct kvd_counters, tokens_asked) / sizeof(uint64_t),
                [KVD_CLIENT_TOKENS_FOUND] = offsetof(struct kvd_counters, tokens_found) / sizeof(uint64_t),
                [KVD_CLIENT_RETRIES] = offsetof(struct kvd_counters, retries) / sizeof(uint64_t),
        };

        for (uint32_t i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                count(view->space, place[i], atomic_load_explicit(&view->page->counters[i], memory_order_relaxed));
}

static void unmap(struct view *view) {
        if (view->unmapped)
                return;
        view->unmapped = true;
        if (view->memory)
                view->memory->release(view); /* first: what streams still hold is pinned until then */
        if (view->page) {
                keep_counters(view);
                munmap(view->page, kvd_pinpage_bytes(view->ix->capacity));
        }
        if (view->ix)
                munmap((void *)view->ix, view->index_bytes);
}

struct view *view_get(struct kvd_space *space) {
        for (;;) {
                struct view *view = atomic_load(&space->view);

                atomic_fetch_add(&view->refs, 1);
                if (likely(atomic_load(&space->view) == view))
                        return view;
                view_put(view); /* retired in the meantime */
        }
}

void view_put(struct view *view) {
        struct kvd *handle = view->space->handle;

        if (atomic_fetch_sub(&view->refs, 1) != 1 || view_is_current(view))
                return;
        pthread_mutex_lock(&handle->lock);
        if (atomic_load(&view->refs) == 0)
                unmap(view);
        pthread_mutex_unlock(&handle->lock);
}

/* ---- mapping ------------------------------------------------------------------------------------------------ */

static int bad_daemon(int error, const char *what) {
        return client_fail(error, "what the daemon sent cannot be used: %s", what);
}

int view_map_file(int fd, uint64_t bytes, int prot, void **ret) {
        int r = shared_file_map(fd, bytes, prot, ret);

        if (r == -EPROTO)
                return bad_daemon(r, "a mapping is shorter than announced");
        if (r < 0)
                return client_fail(r, "cannot map %llu bytes: %s", (unsigned long long)bytes, strerror(-r));
        sys->madvise(*ret, bytes, MADV_DONTFORK);
        return 0;
}

static int map_index(struct view *view, int fd, uint64_t bytes) {
        void *at;
        int r = bytes < KVD_INDEX_HEADER_BYTES ? bad_daemon(-EPROTO, "an index without a header") :
                                                 view_map_file(fd, bytes, PROT_READ, &at);

        if (r < 0)
                return r;
        view->ix = at;
        view->index_bytes = bytes;
        if (kvd_index_validate(view->ix, bytes) < 0)
                return bad_daemon(-EPROTO, "the index is of another version or broken");
        return 0;
}

static int map_pins(struct view *view, int fd) {
        uint32_t capacity = view->ix->capacity;
        void *at;
        int r = view_map_file(fd, kvd_pinpage_bytes(capacity), PROT_READ | PROT_WRITE, &at);

        if (r < 0)
                return r;
        view->page = at;
        view->pins = (shm_u32 *)((uint8_t *)at + KVD_PINS_OFF);
        view->touch = (shm_u32 *)((uint8_t *)at + kvd_touch_off(capacity));
        return 0;
}

/* ---- segments ----------------------------------------------------------------------------------------------- */

bool view_has(const struct view *view, uint32_t segment) {
        uint64_t bits = atomic_load_explicit((_Atomic uint64_t *)&view->mapped[segment / 64], memory_order_acquire);

        return bits >> segment % 64 & 1;
}

bool view_has_any(const struct view *view) {
        for (uint32_t i = 0; i < ARRAY_SIZE(view->mapped); i++)
                if (atomic_load((_Atomic uint64_t *)&view->mapped[i]))
                        return true;
        return false;
}

/* Whoever let go of an old one's last reference may not have come to unmapping it. */
bool view_is_last(struct view *view) {
        for (struct view *old = view->older; old; old = old->older) {
                if (atomic_load(&old->refs) != 0 && !old->unmapped)
                        return false;
                unmap(old);
        }
        return true;
}

bool view_may_write(const struct view *view, uint32_t segment) {
        return view->writable[segment / 64] >> segment % 64 & 1;
}

static void set_segment(struct view *view, uint32_t segment, bool mapped, bool writable) {
        uint64_t bit = UINT64_C(1) << segment % 64, bits = atomic_load(&view->mapped[segment / 64]) & ~bit;
        uint32_t n = MIN(atomic_load(&view->n_mapped), segment);

        view->writable[segment / 64] &= ~bit;
        view->writable[segment / 64] |= writable ? bit : 0;
        atomic_store(&view->mapped[segment / 64], bits | (mapped ? bit : 0));
        while (n < view->ix->max_segments && view_has(view, n))
                n++;
        atomic_store(&view->n_mapped, n);
}

void view_lose_segment(struct view *view, uint32_t segment) {
        set_segment(view, segment, false, false);
}

static int map_segment(struct view *view, uint32_t number, const struct segment_source *from, bool writable) {
        bool had = view->device && view_has(view, number) && view_may_write(view, number);
        int r = view->memory->map(view, number, from, writable);

        if (r == 0)
                set_segment(view, number, true, writable || had);
        return r;
}

/* What the answer has for segments from first on: a descriptor for each but those without memory, or one handle. */
static int map_answer(struct view *view, uint32_t first, const struct kvd_msg_segments_reply *reply,
                      const struct kvd_fds *fds) {
        uint32_t n = MIN(reply->count, view->ix->max_segments - first), next = 0;
        const uint8_t *handles = reply->handles.data;
        int r = 0;

        if (reply->count > 64 || (!handles && fds->n + (uint32_t)__builtin_popcountll(reply->absent) != reply->count) ||
            (reply->handles.size && reply->handles.size != reply->count * CU_IPC_HANDLE_BYTES))
                return bad_daemon(-EPROTO, "segments without descriptors");
        for (uint32_t i = 0; r == 0 && i < n; i++) {
                struct segment_source from = {-1, handles ? handles + i * CU_IPC_HANDLE_BYTES : NULL};

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
                        r = bad_daemon(-EPROTO, "a block of a segment that does not exist");
        }
        return r;
}

int view_map_block(struct view *view, uint32_t id, bool write) {
        uint32_t segment = kvd_segment_of(view->ix, id), n;
        int r = 0;

        if (id >= view->ix->capacity)
                return bad_daemon(-EPROTO, "a block that does not exist");
        if (!view_has(view, segment))
                r = view_map_segments(view, segment + 1);
        if (r == 0 && write && !view_may_write(view, segment)) /* it changed hands: this maps it again */
                r = fetch_segments(view, segment, &n);
        if (r == 0 && !view_has(view, segment))
                r = bad_daemon(-EPROTO, "a block of a segment without memory");
        return r;
}

int view_map_blocks(struct view *view, const kvd_ref *refs, uint32_t n) {
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < n; i++) {
                if (likely(kvd_segment_of(view->ix, kvd_ref_id(refs[i])) < atomic_load(&view->n_mapped)))
                        continue;
                pthread_mutex_lock(&view->space->handle->lock);
                r = view_map_block(view, kvd_ref_id(refs[i]), false);
                pthread_mutex_unlock(&view->space->handle->lock);
        }
        return r;
}

/* ---- attaching ---------------------------------------------------------------------------------------------- */

static struct kvd_msg_space open_request(const struct kvd_space *s) {
        const struct kvd_geometry *g = &s->geometry;

        return (struct kvd_msg_space){
                .name = kvd_slice_of(s->name),
                .create = 1,
                .layers = g->layers,
                .kv_heads = g->kv_heads,
                .head_dim = g->head_dim,
                .block_tokens = g->block_tokens,
                .layer_groups = g->layer_groups,
                .dtype = g->dtype,
                .order = g->order,
                .rope = g->rope,
                .state_width = g->state_width,
                .vocab = g->vocab,
                .fingerprint0 = g->fingerprint[0],
                .fingerprint1 = g->fingerprint[1],
                .block_bytes = g->block_bytes,
                .layout = kvd_slice_of(g->layout),
                .kind = s->options.kind,
                .keys = s->options.keys,
                .policy = s->options.policy,
                .max_blocks = s->options.max_blocks,
        };
}

static int map_all(struct view *view, const struct kvd_msg_space_reply *reply, const struct kvd_fds *fds) {
        int r;

        if (fds->n < 2)
                return bad_daemon(-EPROTO, "a space comes with two descriptors");
        r = map_index(view, fds->fd[0], reply->index_bytes);
        if (r == 0 && kvd_geometry_difference(&view->ix->geometry, &view->space->geometry))
                r = bad_daemon(-EPROTO, "the index is of another geometry");
        if (r == 0)
                r = map_pins(view, fds->fd[1]);
        if (r == 0 && fds->n != (view->ix->backend == KVD_BACKEND_HOST ? 2 : 3))
                r = bad_daemon(-EPROTO, "a space comes with two descriptors, and one on a GPU with three");
        if (r < 0)
                return r;
        view->memory = view->ix->backend == KVD_BACKEND_HOST ? &mapping_host : &mapping_device;
        r = view->memory->reserve(view);
        return r == 0 && view->device ? semaphore_open(view, fds->fd[2], reply->semaphore_row) : r;
}

static struct view *view_new(struct kvd_space *space) {
        struct view *view = sys->mmap(NULL, sizeof *view, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (view == MAP_FAILED)
                return NULL;
        pthread_mutex_init(&view->magazine.lock, NULL);
        view->space = space;
        return view;
}

static void view_free(struct view *view) {
        unmap(view);
        pthread_mutex_destroy(&view->magazine.lock);
        free(view->magazine.refs);
        munmap(view, sizeof *view);
}

static int attach(struct kvd_space *space, struct view *view) {
        struct kvd_msg_space request = open_request(space);
        struct kvd_msg_space_reply reply;
        struct kvd_fds fds;
        int r = handle_call(space->handle, KVD_MSG_space, &request, &reply, &fds);

        if (r < 0)
                return r;
        view->handle = reply.space;
        view->epoch = space->handle->epoch;
        r = map_all(view, &reply, &fds);
        kvd_fds_close(&fds);
        if (r < 0) {
                struct kvd_msg_detach detach = {view->handle};

                handle_call(space->handle, KVD_MSG_detach, &detach, NULL, NULL);
        }
        return r;
}

static void publish(struct kvd_space *space, struct view *view) {
        struct view *old = atomic_load(&space->view);

        view->older = old;
        atomic_store(&space->view, view);
        if (!old)
                return;
        count(space, COUNT_RECONNECTS, 1);
        if (atomic_load(&old->refs) == 0)
                unmap(old);
}

static bool usable(const struct view *view) {
        return view && view->epoch == view->space->handle->epoch && atomic_load(&((struct kvd_index *)view->ix)->alive);
}

int view_attach(struct kvd_space *space, struct view **ret) {
        struct view *view = atomic_load(&space->view);
        int r = handle_connect(space->handle);

        if (r < 0)
                return r;
        *ret = view;
        if (usable(view)) {
                if (view->device)
                        device_drain(view);
                return 0;
        }
        view = view_new(space);
        if (!view)
                return client_fail(-ENOMEM, "out of memory");
        r = attach(space, view);
        if (r < 0) {
                view_free(view);
                return r;
        }
        publish(space, view);
        *ret = view;
        return 0;
}

/* In a forked child the mappings are not there, and something else may be at their place by now. */
void view_forget_mappings(struct kvd_space *space) {
        for (struct view *view = atomic_load(&space->view); view; view = view->older)
                view->unmapped = true;
}

void view_free_all(struct kvd_space *space) {
        struct view *view = atomic_exchange(&space->view, NULL);

        while (view) {
                struct view *older = view->older;

                view_free(view);
                view = older;
        }
}
