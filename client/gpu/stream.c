/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The calls of kvd_cuda.h: seal, read and release in stream order. A block's descriptor names a
 * semaphore, and the value that it has once the data is there: see ipc/base/semaphore.h.
 * store/cache/semaphore.c explains why that is enough even if processes die.
 */

#include <errno.h>
#include <string.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/format.h"

int kvd_space_place(struct kvd_space *space, struct kvd_place *ret) {
        struct view *view;

        *ret = (struct kvd_place){.memory = KVD_MEMORY_HOST, .device = -1};
        if (is_index_only(space))
                ret->memory = KVD_MEMORY_NONE;
        if (space_check(space) < 0)
                return -ECHILD;
        view = view_get(space);
        ret->cache = view->ix->instance[0];
        if (view->device) {
                ret->memory = KVD_MEMORY_CUDA;
                ret->device = view->device->gpu.ordinal;
                memcpy(ret->uuid, view->ix->devices[view->shard], sizeof ret->uuid);
                ret->shard = view->shard;
                ret->legacy = view->ix->backend == KVD_BACKEND_LEGACY;
                ret->stream_order = view->device->streams;
        }
        if (view->ix->backend != KVD_BACKEND_HOST)
                ret->shards = view->ix->n_shards;
        view_put(view);
        return 0;
}

int index_only_refuses(const struct kvd_space *space) {
        return is_index_only(space) ?
                       client_fail(-EOPNOTSUPP, "this process maps only the index of space '%s'",
                                   space->name) :
                       0;
}

int check_memory(const struct kvd_space *space) {
        int r = space_check(space);

        return r < 0 ? r : index_only_refuses(space);
}

/* ---- reading --------------------------------------------------------------------------------- */

struct need {
        uint32_t semaphore;
        uint64_t value;
};

/* maximum number of waits that a walk collects; a chain of more streams is waited for in pieces */
#define NEEDS (2 * KVD_SHARDS)

static int wait_for(struct view *view, void *stream, const struct need *needs, uint32_t n) {
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < n; i++)
                r = semaphore_wait(view, stream, needs[i].semaphore, needs[i].value);
        return r;
}

/* Keeps one wait per semaphore, for the largest value. Returns their number, or an error. */
static int add_need(struct view *view, void *stream, struct need *needs, uint32_t n,
                    struct need one) {
        int r;

        for (uint32_t i = 0; i < n; i++)
                if (needs[i].semaphore == one.semaphore) {
                        needs[i].value = MAX(needs[i].value, one.value);
                        return (int)n;
                }
        if (n == NEEDS) {
                r = wait_for(view, stream, needs, n);
                if (r < 0)
                        return r;
                n = 0;
        }
        needs[n] = one;
        return (int)n + 1;
}

/*
 * Returns a block's descriptor and moves *at to its parent; NULL at the end of the chain. Links
 * cannot change while the chain is pinned.
 */
static const struct kvd_desc *next_block(const struct view *view, kvd_ref *at) {
        const struct kvd_desc *desc;

        if (*at == KVD_ROOT || kvd_ref_id(*at) >= view->ix->capacity)
                return NULL;
        desc = kvd_index_desc(view->ix, kvd_ref_id(*at));
        *at = shm_get64(&desc->parent);
        return desc;
}

/*
 * Reads the semaphore before its value: the daemon clears the semaphore once the data is there.
 * Partner: index_arrived.
 */
static struct need need_of(const struct kvd_desc *desc) {
        struct need need = {__atomic_load_n(&desc->semaphore, __ATOMIC_ACQUIRE), 0};

        need.value = need.semaphore ? shm_get64(&desc->semaphore_value) : 0;
        return need;
}

/* What a block needs from the streams that write its other shards; n_shards - 1. */
static struct need other_need(const struct view *view, const struct kvd_desc *desc, uint32_t i) {
        uint32_t id = (uint32_t)(((const uint8_t *)desc - (const uint8_t *)view->ix -
                                  view->ix->desc_off) /
                                 view->ix->desc_stride);
        const struct kvd_promise *promise = &kvd_index_promises(view->ix, id)[i];

        return (struct need){shm_get32(&promise->semaphore), shm_get64(&promise->value)};
}

/* True: the data of all blocks is there. Partner: set_pending in store/cache/unready.c. */
static bool nothing_pending(const struct view *view) {
        return !view->device ||
               atomic_load_explicit(&view->ix->n_pending, memory_order_acquire) == 0;
}

int kvd_wait_on(struct kvd_space *space, const struct kvd_pin *pin, void *stream) {
        kvd_ref at = kvd_ref_make(pin->leaf, pin->generation);
        struct need needs[NEEDS], need;
        struct view *view = pin->view;
        const struct kvd_desc *desc;
        int n = check_memory(space);

        if (n < 0)
                return n;
        if (!view || nothing_pending(view))
                return 0;
        while (n >= 0 && (desc = next_block(view, &at))) {
                need = need_of(desc);
                if (!need.semaphore)
                        continue;
                n = add_need(view, stream, needs, (uint32_t)n, need);
                for (uint32_t i = 0; n >= 0 && i + 1 < view->ix->n_shards; i++) {
                        need = other_need(view, desc, i);
                        if (need.semaphore)
                                n = add_need(view, stream, needs, (uint32_t)n, need);
                }
        }
        return n < 0 ? n : wait_for(view, stream, needs, (uint32_t)n);
}

/*
 * Reads the semaphore before the flag: for a dead producer, the daemon sets the flag before it
 * writes the value. The next daemon cannot set the flag, and writes SEMAPHORE_ENDED instead.
 */
static int check_need(const struct view *view, const struct need *need) {
        uint64_t has = need->semaphore ? semaphore_reached(view, need->semaphore) : 0;

        if (!need->semaphore)
                return 0;
        if (has < need->value)
                return -EAGAIN;
        return semaphore_was_reached(has, need->value) ? 0 : -EIO;
}

static int check_block(const struct view *view, const struct kvd_desc *desc) {
        struct need need = need_of(desc);
        bool pending = need.semaphore;
        int r = check_need(view, &need);

        for (uint32_t i = 0; pending && r == 0 && i + 1 < view->ix->n_shards; i++) {
                need = other_need(view, desc, i);
                r = check_need(view, &need);
        }
        return __atomic_load_n(&desc->flags, __ATOMIC_ACQUIRE) & KVD_DESC_POISONED ? -EIO : r;
}

int kvd_check_pin(struct kvd_space *space, const struct kvd_pin *pin) {
        kvd_ref at = kvd_ref_make(pin->leaf, pin->generation);
        const struct view *view = pin->view;
        const struct kvd_desc *desc;
        bool waits = false;
        int r = check_memory(space);

        if (r < 0)
                return r;
        if (!view || !view->device)
                return 0;
        while ((desc = next_block(view, &at))) {
                r = check_block(view, desc);
                if (r == -EIO)
                        return client_fail(r,
                                           "a block's data was never written: its producer died");
                waits |= r == -EAGAIN;
        }
        return waits ? client_fail(-EAGAIN, "a block's data has not been written yet") : 0;
}

/* ---- publishing ------------------------------------------------------------------------------ */

static int seal_on(struct kvd_space *space, struct kvd_pin *pin, uint32_t n,
                   struct kvd_block *blocks, const uint32_t *tokens, uint32_t n_tokens,
                   uint32_t *ids, void *stream) {
        int r = seal_check(space, pin, n, blocks, n_tokens);
        struct promise until;
        struct view *view;

        if (r == 0)
                r = index_only_refuses(space);
        if (r < 0)
                return r;
        view = blocks[0].view;
        if (view->ix->n_shards > 1)
                return client_fail(
                        -EOPNOTSUPP,
                        "the pool has %u GPUs, and this stream orders the writes of one: "
                        "see kvd_seal_written, or call kvd_seal when all are done",
                        view->ix->n_shards);
        if (!view->device)
                return seal_blocks(space, pin, n, blocks, tokens, n_tokens, ids, NULL);
        r = semaphore_promise(view, stream, &until);
        if (r < 0 && r != -EOPNOTSUPP)
                return r;
        r = seal_blocks(space, pin, n, blocks, tokens, n_tokens, ids,
                        r == 0 ? &(struct seal_until){.own = &until} : NULL);
        deferred_settle(view);
        return r;
}

int kvd_seal_on(struct kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                const uint32_t *tokens, uint32_t n_tokens, void *stream) {
        return seal_on(space, pin, n, blocks, tokens, n_tokens, NULL, stream);
}

int kvd_seal_keep_on(struct kvd_space *space, struct kvd_pin *pin, uint32_t n,
                     struct kvd_block *blocks, const uint32_t *tokens, uint32_t n_tokens,
                     uint32_t *ids, void *stream) {
        return seal_on(space, pin, n, blocks, tokens, n_tokens, ids, stream);
}

int kvd_write_on(struct kvd_space *space, void *stream, struct kvd_written *ret) {
        struct promise until;
        struct view *view;
        int r = check_memory(space);

        *ret = (struct kvd_written){0};
        if (r < 0)
                return r;
        view = view_get(space);
        if (!view_is_current(view) || !view_is_served(view))
                r = client_fail(-ESTALE, "the daemon that the blocks belong to is gone; free them");
        else
                r = view->device ? semaphore_promise(view, stream, &until) : -EOPNOTSUPP;
        if (r == 0)
                *ret = (struct kvd_written){until.value, semaphore_at(view->device->row, until.at),
                                            view->device->token};
        view_put(view);
        return r == -EOPNOTSUPP ? 0 : r;
}

/* Leaves out what was written already when the call that should have promised it waited instead. */
static int promises_of(const struct view *view, const struct kvd_written *written, uint32_t n,
                       struct promise_list *ret) {
        if (n > view->ix->n_shards)
                return client_fail(-EINVAL, "%u streams, and a block has %u shards", n,
                                   view->ix->n_shards);
        ret->n = 0;
        for (uint32_t i = 0; i < n; i++)
                if (written[i].semaphore)
                        ret->at[ret->n++] = (struct kvd_promise){written[i].value,
                                                                 written[i].semaphore,
                                                                 written[i].writer};
        return 0;
}

int kvd_seal_written(struct kvd_space *space, struct kvd_pin *pin, uint32_t n,
                     struct kvd_block *blocks, const uint32_t *tokens, uint32_t n_tokens,
                     uint32_t *ids, const struct kvd_written *written, uint32_t n_written) {
        int r = seal_check(space, pin, n, blocks, n_tokens);
        struct promise_list promises;

        if (r == 0)
                r = promises_of(blocks[0].view, written, n_written, &promises);
        return r < 0 ? r :
                       seal_blocks(space, pin, n, blocks, tokens, n_tokens, ids,
                                   &(struct seal_until){.streams = &promises});
}

/* ---- letting go ------------------------------------------------------------------------------ */

/*
 * Returns 1 with a promise, 0 after waiting for the stream instead, or -EBUSY. If both fail, it
 * returns 0: the stream's context has failed, so its work will never touch the blocks again.
 */
static int promise_or_wait(struct view *view, void *stream, struct promise *ret) {
        int r = semaphore_promise(view, stream, ret);

        return r == -EBUSY ? r : r == 0;
}

int kvd_unpin_on(struct kvd_space *space, struct kvd_pin *pin, void *stream) {
        struct view *view = pin->view;
        struct promise until;
        int r;

        if (!view || forked(space->handle))
                return 0;
        r = index_only_refuses(space);
        if (r == 0 && view->device)
                r = promise_or_wait(view, stream, &until);
        if (r < 0)
                return r;
        if (r > 0) {
                deferred_settle(view);
                /* a pin for the deferred entry; kvd_unpin releases the caller's */
                count_pin(view, pin->leaf);
                deferred_add(view, until, kvd_ref_make(pin->leaf, pin->generation), true);
        }
        kvd_unpin(space, pin);
        return 0;
}

static bool on_device(const struct kvd_block *block) {
        struct view *view = view_of(block);

        return view && view->device;
}

/* One promise serves all blocks of a view. free_behind returns the same as promise_or_wait. */
struct behind {
        struct view *view;
        struct promise until;
};

static int free_behind(struct kvd_block *block, void *stream, struct behind *behind) {
        struct view *view = view_of(block);
        int r = 1;

        /* only the daemon knows its state (seal.c, post.c), and may free it at once */
        if (!block->data || is_posted(block))
                return semaphore_finish(view, stream);
        if (view != behind->view)
                r = promise_or_wait(view, stream, &behind->until);
        if (r <= 0)
                return r;
        behind->view = view;
        deferred_add(view, behind->until, kvd_ref_make(block->id, block->generation), false);
        *block = (struct kvd_block){0};
        view_put(view); /* the deferred entry has its own reference */
        return r;
}

int kvd_free_on(struct kvd_space *space, uint32_t n, struct kvd_block *blocks, void *stream) {
        struct behind behind = {0};
        int r;

        if (forked(space->handle))
                return 0;
        r = index_only_refuses(space);
        if (r < 0)
                return r;
        for (uint32_t i = 0; i < n; i++)
                if (on_device(&blocks[i])) {
                        r = free_behind(&blocks[i], stream, &behind);
                        if (r < 0)
                                return r;
                }
        kvd_free(space, n, blocks);
        if (behind.view)
                kvd_settle(space);
        return 0;
}

/* Returns memory that the daemon wants back: another call may not come for a long time. */
static void give_back_memory(struct kvd_space *space) {
        struct view *view = view_get(space);

        if (view->device && device_drain_wanted(view) && handle_lock(space->handle) == 0) {
                device_drain(view);
                handle_unlock(space->handle);
        }
        view_put(view);
}

int kvd_settle(struct kvd_space *space) {
        uint32_t waiting = 0;

        if (forked(space->handle))
                return 0;
        deadline_begin();
        for (struct view *view = atomic_load(&space->view); view; view = view->older)
                if (view_hold(view)) {
                        waiting += view->device ? deferred_settle(view) : 0;
                        view_put(view);
                }
        give_back_memory(space);
        return (int)waiting;
}

/* ---- layers ---------------------------------------------------------------------------------- */

void layer_lay_out(const struct kvd_index *ix, uint8_t *base, uint32_t layer,
                   struct kvd_layer_view *ret) {
        const struct kvd_shape *g = &ix->geometry;
        uint32_t per_group = g->layers / g->layer_groups;
        uint64_t row = kvd_format_row(g->dtype, g->head_dim),
                 plane = row * g->kv_heads * g->block_tokens;
        bool hnd = g->order == KVD_HND;

        *ret = (struct kvd_layer_view){
                .keys = base + layer % per_group * 2 * plane,
                .values = base + (layer % per_group * 2 + 1) * plane,
                .block_stride = ix->block_bytes,
                .head_stride = hnd ? row * g->block_tokens : row,
                .token_stride = hnd ? row : row * g->kv_heads,
                .element = kvd_dtype_bytes(g->dtype),
                .group = layer / per_group,
        };
}

int kvd_layer_view(struct kvd_space *space, uint32_t layer, struct kvd_layer_view *ret) {
        struct view *view;
        int r;

        r = check_memory(space);
        if (r < 0)
                return r;
        if (kvd_shape_is_opaque(&space->geometry))
                return client_fail(
                        -EINVAL, "space '%s' has opaque blocks (%s), in which kvd knows no layers",
                        space->name, space->geometry.layout);
        if (layer >= space->geometry.layers)
                return client_fail(-EINVAL, "layer %u of %u", layer, space->geometry.layers);
        r = handle_lock(space->handle);
        if (r < 0)
                return r;
        r = view_attach(space, &view);
        if (r == 0)
                r = view_map_segments(view, atomic_load(&view->ix->n_segments));
        if (r == 0) {
                layer_lay_out(view->ix, view->base, layer, ret);
                ret->blocks = kvd_segments_ids(view->ix, atomic_load(&view->n_mapped));
        }
        handle_unlock(space->handle);
        return r;
}
