/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A space gets a view when it is opened, and another one whenever its daemon was replaced or the
 * space deleted: this is where the connection comes back, and where what the daemon sends is mapped
 * and checked. Every call that asks the daemon for something comes through view_attach, and mostly
 * finds that all is as it was.
 */

#include <errno.h>
#include <sys/mman.h>

#include "client/device.h"
#include "ipc/base/sys.h"

#define REVIVE_PAUSE_NS UINT64_C(100000000)

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
        int r = view_map_file(fd, kvd_pinpage_bytes(capacity), PROT_READ | PROT_WRITE, &at);

        if (r < 0)
                return r;
        view->page = at;
        view->pins = (shm_u32 *)((uint8_t *)at + KVD_PINS_OFF);
        view->touch = (shm_u32 *)((uint8_t *)at + kvd_touch_off(capacity));
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
        };
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
        view->memory = view->ix->backend == KVD_BACKEND_HOST ? &mapping_host : &mapping_device;
        r = view->memory->reserve(view);
        return r == 0 && view->device ? semaphore_open(view, fds->fd[2], reply->semaphore_row) : r;
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
                view_unmap(old);
}

static bool usable(const struct view *view) {
        return view && view->epoch == view->space->handle->epoch && atomic_load(&view->ix->alive);
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

/*
 * The index says that its daemon is gone or the space deleted: attaches anew, but not at every
 * lookup.
 */
void space_revive(struct kvd_space *space) {
        struct kvd *handle = space->handle;
        uint64_t now = sys_now_ns();
        struct view *view;

        if (pthread_mutex_trylock(&handle->lock) != 0)
                return;
        if (now >= handle->retry_ns) {
                handle->retry_ns = now + REVIVE_PAUSE_NS;
                view_attach(space, &view);
        }
        pthread_mutex_unlock(&handle->lock);
}
