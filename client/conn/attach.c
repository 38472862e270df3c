/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A space gets a view when it is opened, and a new one whenever the daemon was replaced or the
 * space deleted. This file reconnects if necessary, and maps and checks what the daemon sends.
 * Every call that sends the daemon a request calls view_attach first, which usually has nothing to
 * do.
 */

#include <errno.h>
#include <sys/mman.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/numa.h"
#include "ipc/base/sys.h"

/* ---- mapping --------------------------------------------------------------------------------- */

static int map_index(struct view *view, int fd, uint64_t bytes) {
        void *at;
        int r = bytes < KVD_INDEX_HEADER_BYTES ? daemon_fail(-EPROTO, "an index without a header") :
                                                 view_map_file(fd, bytes, PROT_READ, &at);

        if (r < 0)
                return r;
        view->ix = at;
        view->index_bytes = bytes;
        if (kvd_index_validate(view->ix, bytes) < 0)
                return daemon_fail(-EPROTO, "the index is of another version or broken");
        return 0;
}

static int map_pins(struct view *view, int fd) {
        uint32_t capacity = view->ix->capacity;
        void *at;
        int r = view_map_file(fd, kvd_pinpage_bytes(view->ix), PROT_READ | PROT_WRITE, &at);

        if (r < 0)
                return r;
        view->page = at;
        view->words = (struct kvd_pin_words *)((uint8_t *)at + KVD_PINS_OFF);
        view->groups = (shm_u64 *)((uint8_t *)at + kvd_groups_off(view->ix->capacity));
        latency_prepare();
        view->asked = (shm_u64 *)((uint8_t *)at + kvd_asked_off(capacity));
        return 0;
}

/* ---- attaching ------------------------------------------------------------------------------- */

static struct kvd_msg_space open_request(const struct kvd_space *s) {
        const struct kvd_shape *g = &s->geometry;

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
                .node = (uint32_t)(numa_here() + 1),
        };
}

/* On a GPU without kvd.lock: the driver may create a context, or wait for work of the GPU. */
static int reserve(struct view *view, int semaphores, const struct kvd_msg_space_reply *reply) {
        struct kvd *handle = view->space->handle;
        int r;

        if (view->mapping != &mapping_device)
                return view->mapping->reserve(view);
        handle_unlock(handle);
        r = view->mapping->reserve(view);
        if (r == 0)
                r = semaphore_open(view, semaphores, reply->semaphore_row, reply->writer_token);
        handle_lock_again(handle);
        return r;
}

static int map_all(struct view *view, const struct kvd_msg_space_reply *reply,
                   const struct kvd_fds *fds) {
        int r;

        if (fds->n < 2)
                return daemon_fail(-EPROTO, "a space comes with two descriptors");
        r = map_index(view, fds->fd[0], reply->index_bytes);
        if (r == 0 && kvd_shape_difference(&view->ix->geometry, &view->space->geometry))
                r = daemon_fail(-EPROTO, "the index is of another geometry");
        if (r == 0)
                r = map_pins(view, fds->fd[1]);
        if (r == 0 && fds->n != (view->ix->backend == KVD_BACKEND_HOST ? 2 : 3))
                r = daemon_fail(-EPROTO,
                                "a space comes with two descriptors, and one on a GPU with three");
        if (r < 0)
                return r;
        view->mapping = is_index_only(view->space)            ? &mapping_none :
                        view->ix->backend == KVD_BACKEND_HOST ? &mapping_host :
                                                                &mapping_device;
        return reserve(view, fds->fd[2], reply);
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
        if (r < 0 && view_is_connected(view)) {
                struct kvd_msg_detach detach = {view->handle};

                handle_call(space->handle, KVD_MSG_detach, &detach, NULL, NULL);
        }
        return r;
}

/* Posts that the old daemon refused count as lost too: its reasons are not reported any more. */
static void lose_posts(struct kvd_space *space, const struct view *old) {
        uint64_t told = atomic_exchange(&space->posts.told, 0);

        atomic_fetch_add(&space->posts.lost,
                         posts_untaken(old) + atomic_load(&old->page->posts_refused) - told);
}

static void publish(struct kvd_space *space, struct view *view) {
        struct view *old = atomic_load(&space->view);

        view->older = old;
        atomic_store(&space->view, view);
        if (!old)
                return;
        lose_posts(space, old);
        count(space, COUNT_RECONNECTS, 1);
}

static bool usable(const struct view *view) {
        return view && view_is_connected(view) && atomic_load(&view->ix->alive);
}

/*
 * Unmaps old views that are not used any more, and maps new segments. If that fails, lookups miss
 * their blocks; it is an error only if the daemon does not answer or is gone.
 */
static int keep_up(struct view *view) {
        int r;

        if (unlikely(view->older))
                view_is_last(view);
        r = view_catch_up(view);
        return r == -ETIMEDOUT || !conn_is_open(view->space->handle->conn) ? r : 0;
}

/* Gives the space a view of the current connection. */
static int attach_anew(struct kvd_space *space, struct view **ret) {
        struct view *view = view_new(space);
        int r;

        *ret = view;
        if (!view)
                return client_fail(-ENOMEM, "out of memory");
        space->attaching = true;
        r = attach(space, view);
        space->attaching = false;
        handle_changed(space->handle);
        if (r == 0) {
                publish(space, view);
                return 0;
        }
        view_unmap(view);
        view_free(view);
        return r;
}

/* Returns 1 if the space is attached, 0 to retry: the lock was released, and things changed. */
static int try_attach(struct kvd_space *space, struct view **ret) {
        struct view *view = atomic_load(&space->view);
        int r;

        if (view && view->device)
                device_drain(view);
        r = handle_connect(space->handle);
        if (r < 0)
                return r;
        view = atomic_load(&space->view);
        if (!usable(view) && space->attaching)
                return handle_wait(space->handle);
        if (!usable(view))
                r = attach_anew(space, &view);
        if (r == 0)
                r = keep_up(view);
        *ret = view;
        return r < 0 ? r : view_is_current(view) && view_is_connected(view);
}

int view_attach(struct kvd_space *space, struct view **ret) {
        int r;

        do
                r = try_attach(space, ret);
        while (r == 0);
        if (r < 0)
                return r;
        space->handle->retry_ns = 0; /* whatever kvd_catch_up has met before */
        return 0;
}

/* ---- catching up ----------------------------------------------------------------------------- */

#define RETRY_NS UINT64_C(100000000)

/*
 * The connection to a daemon that was killed may look open for a moment, until the kernel has torn
 * down its io_uring. Its successor is recognised by what it has written into our page.
 */
static bool was_replaced(const struct kvd_space *space) {
        const struct view *view = atomic_load(&space->view);

        return view && view->epoch == space->handle->epoch && !view_is_served(view);
}

static int catch_up(struct kvd_space *space) {
        struct kvd *handle = space->handle;
        uint64_t began = sys_now_ns();
        struct view *view;
        int r;

        if (began < handle->retry_ns)
                return client_fail(-EAGAIN, "the daemon did not answer a moment ago");
        if (conn_is_open(handle->conn) && (!conn_has_peer(handle->conn) || was_replaced(space)))
                handle->conn = conn_close(handle->conn);
        r = view_attach(space, &view);
        if (r < 0) /* wait for at least as long as this attempt took */
                handle->retry_ns = 2 * sys_now_ns() - began + RETRY_NS;
        return r;
}

int kvd_catch_up(struct kvd_space *space) {
        int r = space_check(space);

        if (r == 0)
                r = handle_lock(space->handle);
        if (r < 0)
                return r;
        r = catch_up(space);
        handle_unlock(space->handle);
        return r;
}
