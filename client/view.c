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
#include <sys/stat.h>

#include "client/internal.h"
#include "ipc/base/sys.h"

#define HUGE_BYTES (UINT64_C(2) << 20)

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
        if (view->page) {
                keep_counters(view);
                munmap(view->page, kvd_pinpage_bytes(view->ix->capacity));
        }
        if (view->base)
                munmap(view->base, view->reserved);
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

static int map_file(int fd, uint64_t bytes, int prot, void **ret) {
        struct stat st;
        void *at;

        if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < bytes || bytes == 0)
                return bad_daemon(-EPROTO, "a mapping is shorter than announced");
        at = sys->mmap(NULL, bytes, prot, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED)
                return client_fail(-errno, "cannot map %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
        sys->madvise(at, bytes, MADV_DONTFORK);
        *ret = at;
        return 0;
}

static int map_index(struct view *view, int fd, uint64_t bytes) {
        void *at;
        int r = bytes < KVD_INDEX_HEADER_BYTES ? bad_daemon(-EPROTO, "an index without a header") :
                                                 map_file(fd, bytes, PROT_READ, &at);

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
        int r = map_file(fd, kvd_pinpage_bytes(capacity), PROT_READ | PROT_WRITE, &at);

        if (r < 0)
                return r;
        view->page = at;
        view->pins = (shm_u32 *)((uint8_t *)at + KVD_PINS_OFF);
        view->touch = (shm_u32 *)((uint8_t *)at + kvd_touch_off(capacity));
        return 0;
}

/* Address space for all segments there can be, so that a growing pool keeps its base. */
static int reserve(struct view *view) {
        uint64_t bytes = (uint64_t)view->ix->max_segments * view->ix->segment_bytes + HUGE_BYTES;
        uint8_t *at = sys->mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        uint8_t *aligned;

        if (at == MAP_FAILED)
                return client_fail(-errno, "no address space for a pool of %llu bytes", (unsigned long long)bytes);
        aligned = (uint8_t *)ALIGN_UP((uintptr_t)at, HUGE_BYTES);
        if (aligned > at)
                munmap(at, (size_t)(aligned - at));
        if (aligned - at < (ptrdiff_t)HUGE_BYTES)
                munmap(aligned + bytes - HUGE_BYTES, (size_t)(at + HUGE_BYTES - aligned));
        view->base = aligned;
        view->reserved = bytes - HUGE_BYTES;
        return 0;
}

static int map_segment(struct view *view, uint32_t number, int fd, bool writable) {
        uint64_t bytes = view->ix->segment_bytes;
        uint8_t *at = view->base + number * bytes;
        int prot = PROT_READ | (writable ? PROT_WRITE : 0);

        if (sys->mmap(at, bytes, prot, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
                return client_fail(-errno, "cannot map pool segment %u: %s", number, strerror(errno));
        sys->madvise(at, bytes, MADV_DONTFORK);
        if (writable)
                view->writable[number / 64] |= UINT64_C(1) << number % 64;
        return 0;
}

static int fetch_segments(struct view *view, uint32_t first, uint32_t *n) {
        struct kvd_msg_segments request = {view->handle, first};
        struct kvd_msg_segments_reply reply;
        struct kvd_fds fds;
        int r = handle_call(view->space->handle, KVD_MSG_segments, &request, &reply, &fds);

        if (r < 0)
                return r;
        *n = MIN(fds.n, view->ix->max_segments - first);
        for (uint32_t i = 0; r == 0 && i < *n; i++)
                r = map_segment(view, first + i, fds.fd[i], reply.writable >> i & 1);
        kvd_fds_close(&fds);
        return r;
}

int view_map_segments(struct view *view, uint32_t at_least) {
        uint32_t have = atomic_load(&view->n_mapped), n;
        int r;

        if (view->epoch != view->space->handle->epoch || !conn_is_open(view->space->handle->conn))
                return client_fail(-ENOTCONN, "the pool has grown and its daemon is gone");
        while (have < at_least) {
                r = fetch_segments(view, have, &n);
                if (r < 0)
                        return r;
                if (n == 0)
                        return bad_daemon(-EPROTO, "a block of a segment that does not exist");
                have += n;
                atomic_store(&view->n_mapped, have);
        }
        return 0;
}

int view_map_blocks(struct view *view, const kvd_ref *refs, uint32_t n) {
        uint32_t need = 0;
        int r = 0;

        for (uint32_t i = 0; i < n; i++)
                need = MAX(need, kvd_segment_of(view->ix, kvd_ref_id(refs[i])) + 1);
        if (need <= atomic_load(&view->n_mapped))
                return 0;
        pthread_mutex_lock(&view->space->handle->lock);
        r = view_map_segments(view, need);
        pthread_mutex_unlock(&view->space->handle->lock);
        return r;
}

int view_make_writable(struct view *view, uint32_t segment) {
        uint32_t n;

        if (view->writable[segment / 64] >> segment % 64 & 1)
                return 0;
        return fetch_segments(view, segment, &n); /* it changed hands: this maps it again, and its neighbours */
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
                .kind = s->options.kind,
                .keys = s->options.keys,
                .policy = s->options.policy,
                .max_blocks = s->options.max_blocks,
        };
}

static int map_all(struct view *view, const struct kvd_msg_space_reply *reply, const struct kvd_fds *fds) {
        int r;

        if (fds->n != 2)
                return bad_daemon(-EPROTO, "a space comes with two descriptors");
        r = map_index(view, fds->fd[0], reply->index_bytes);
        if (r == 0 && kvd_geometry_difference(&view->ix->geometry, &view->space->geometry))
                r = bad_daemon(-EPROTO, "the index is of another geometry");
        if (r == 0)
                r = map_pins(view, fds->fd[1]);
        return r == 0 ? reserve(view) : r;
}

static struct view *view_new(struct kvd_space *space) {
        struct view *view = sys->mmap(NULL, sizeof *view, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (view == MAP_FAILED)
                return NULL;
        pthread_mutex_init(&view->stock_lock, NULL);
        view->space = space;
        return view;
}

static void view_free(struct view *view) {
        unmap(view);
        pthread_mutex_destroy(&view->stock_lock);
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
        if (usable(view))
                return 0;
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
