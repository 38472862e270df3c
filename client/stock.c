/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks to fill. They come from the daemon in batches and wait in the view's stock, so that most allocations are a
 * pop under an uncontended lock. The stock is small beside the pool: what lies in it, nobody else can have.
 */

#include <errno.h>
#include <string.h>

#include "client/device.h"

/* Blocks fetched ahead: 128, but a 64th of the space at most (of arenas, a quarter of the ids is in use). */
static uint32_t batch(const struct view *view) {
        uint32_t blocks = view->ix->arena ? view->ix->capacity / 4 : view->ix->capacity;

        return MAX(1, MIN(STOCK_ROOM / 2, blocks / 64));
}

/* ---- with the daemon ---------------------------------------------------------------------------------------- */

static void release(struct view *view, const kvd_ref *blocks, uint32_t n) {
        struct kvd_msg_release request = {view->handle, {blocks, n * (uint32_t)sizeof *blocks}};

        if (n && view->epoch == view->space->handle->epoch && conn_is_open(view->space->handle->conn))
                handle_call(view->space->handle, KVD_MSG_release, &request, NULL, NULL);
}

/* Under kvd.lock: n blocks at most, into to. How many, or an error. */
static int fetch(struct view *view, uint32_t n, kvd_ref *to) {
        struct kvd_msg_allocate request = {view->handle, n};
        struct kvd_msg_allocate_reply reply;
        int r = handle_call(view->space->handle, KVD_MSG_allocate, &request, &reply, NULL);
        uint32_t got;

        if (r < 0)
                return r;
        got = reply.blocks.size / (uint32_t)sizeof *to;
        if (got == 0 || got > n)
                return client_fail(-EPROTO, "the daemon handed out %u blocks of %u", got, n);
        memcpy(to, reply.blocks.data, got * sizeof *to);
        for (uint32_t i = 0; i < got; i++) {
                r = view_map_block(view, kvd_ref_id(to[i]), true);
                if (r < 0) {
                        release(view, to, got);
                        return r;
                }
        }
        return (int)got;
}

/* ---- the stock ---------------------------------------------------------------------------------------------- */

static uint32_t pop(struct view *view, uint32_t n, kvd_ref *to) {
        uint32_t got = MIN(n, view->n_stock);

        for (uint32_t i = 0; i < got; i++)
                to[i] = view->stock[--view->n_stock];
        return got;
}

/* Under stock_lock: takes what the stock lacks from the daemon, and some more. */
static int refill(struct view *view, uint32_t n, kvd_ref *to, uint32_t room) {
        struct kvd_space *space = view->space;
        uint32_t want = MIN(MAX(n, batch(view)), room);
        struct view *now;
        int r;

        pthread_mutex_lock(&space->handle->lock);
        r = view_attach(space, &now);
        if (r == 0)
                r = now == view ? fetch(view, want, to) : -ESTALE;
        pthread_mutex_unlock(&space->handle->lock);
        return r;
}

#define FETCH_MAX 256u
#define FREE_MAX 256u

/* n blocks at most from stock or daemon; -ESTALE: the view was replaced. */
static int take(struct view *view, uint32_t n, kvd_ref *to) {
        kvd_ref fetched[FETCH_MAX];
        uint32_t got;
        int r;

        if (unlikely(view->device))
                order_settle(view);
        pthread_mutex_lock(&view->stock_lock);
        got = pop(view, n, to);
        r = got ? 0 : refill(view, MIN(n, FETCH_MAX), fetched, FETCH_MAX);
        if (r > 0) {
                got = MIN((uint32_t)r, n);
                memcpy(to, fetched, got * sizeof *to);
                for (uint32_t i = got; i < (uint32_t)r; i++) /* at most batch(): there is room */
                        view->stock[view->n_stock++] = fetched[i];
        }
        pthread_mutex_unlock(&view->stock_lock);
        return r < 0 ? r : (int)got;
}

static void send_back(struct view *view, const kvd_ref *blocks, uint32_t n) {
        pthread_mutex_lock(&view->space->handle->lock);
        release(view, blocks, n);
        pthread_mutex_unlock(&view->space->handle->lock);
}

/* Blocks that nobody wants any more: into the stock, and what it has no room for to the daemon. */
void give_back(struct view *view, const kvd_ref *blocks, uint32_t n) {
        uint32_t kept = 0;

        if (view_is_current(view)) {
                pthread_mutex_lock(&view->stock_lock);
                for (; kept < n && view->n_stock < batch(view); kept++)
                        view->stock[view->n_stock++] = blocks[kept];
                pthread_mutex_unlock(&view->stock_lock);
        }
        if (kept < n)
                send_back(view, blocks + kept, n - kept);
}

/* ---- the calls ---------------------------------------------------------------------------------------------- */

static void hand_out(struct view *view, const kvd_ref *refs, uint32_t n, struct kvd_block *blocks) {
        for (uint32_t i = 0; i < n; i++) {
                uint32_t id = kvd_ref_id(refs[i]);

                blocks[i] = (struct kvd_block){view->base + id * view->ix->block_bytes, view, id,
                                               kvd_ref_generation(refs[i])};
        }
        atomic_fetch_add(&view->refs, n);
        count(view->space, COUNT_ALLOCATED, n);
}

int kvd_alloc(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        kvd_ref refs[FETCH_MAX];
        struct view *view;
        int r;

        if (forked(space->handle))
                return client_fail(-ECHILD, "this process was forked from the one that opened the space; open it anew");
        if (n == 0)
                return client_fail(-EINVAL, "0 blocks asked for");
        do {
                view = view_get(space);
                r = take(view, MIN(n, FETCH_MAX), refs);
                if (r > 0)
                        hand_out(view, refs, (uint32_t)r, blocks);
                view_put(view);
        } while (r == -ESTALE);
        if (r == -ENOBUFS || r == -EDQUOT)
                count(space, COUNT_REFUSED, 1);
        return r;
}

/* As many as can go back with one message: of one view, and all or none of them perhaps sealed. */
static uint32_t free_some(uint32_t n, struct kvd_block *blocks) {
        struct view *view = blocks[0].view;
        bool in_doubt = !blocks[0].data;
        kvd_ref refs[FREE_MAX];
        uint32_t k = 0;

        for (; k < MIN(n, FREE_MAX) && blocks[k].view == view && !blocks[k].data == in_doubt; k++) {
                refs[k] = kvd_ref_make(blocks[k].id, blocks[k].generation);
                blocks[k] = (struct kvd_block){0};
        }
        if (!view)
                return k;
        if (in_doubt)
                send_back(view, refs, k); /* see seal.c: the daemon knows what they are */
        else
                give_back(view, refs, k);
        for (uint32_t i = 0; i < k; i++)
                view_put(view);
        return k;
}

void kvd_free(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        if (forked(space->handle))
                return;
        for (uint32_t i = 0; i < n;)
                i += free_some(n - i, blocks + i);
}
