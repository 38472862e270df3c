/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Publishing. For each block, the daemon replies with the block that holds the content now: ours,
 * or one that was sealed before. In one call all duplicates come first, since a new block has no
 * children yet. So there are two cases. If the last block is ours, we have pinned it before the
 * request, and the chain is held from the moment it exists. If all are duplicates, the last one
 * must be pinned like a block that a lookup found. This fails if it was evicted in between; then we
 * repeat the request, because our blocks are still ours.
 */

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/key.h"
#include "ipc/base/sys.h"

#define PIECE_TOKENS 8192u
#define PIECE_BLOCKS 2048u
#define TRIES 4u

struct piece {
        struct view *view;
        struct kvd_pin *pin;
        struct kvd_block *blocks;
        uint32_t n_blocks;
        const uint32_t *tokens;
        uint32_t n_tokens;
        uint64_t root;               /* as in message seal */
        struct kvd_key prefix;       /* bidirectional */
        const struct promise *until; /* NULL: the data is complete, or promises say when it is */
        const struct promise_list *promises; /* or NULL */
        /* out: ids of the chain's blocks; NULL: blocks become these, and duplicates are freed */
        uint32_t *ids;
};

static kvd_ref ref_of(const struct kvd_block *block) {
        return kvd_ref_make(block->id, block->generation);
}

/* ---- one request ----------------------------------------------------------------------------- */

/* *in_doubt is set if it is unknown whether the blocks were sealed. */
static int ask(const struct piece *p, const kvd_ref *own, kvd_ref *ret, bool *in_doubt) {
        uint32_t bytes = p->n_blocks * (uint32_t)sizeof *own;
        uint64_t begun_ns = sys_now_ns();
        struct kvd_msg_seal request = {
                .space = p->view->handle,
                .group = p->pin->group,
                .parent = chain_end(p->pin),
                .root = p->root,
                .blocks = {own, bytes},
                .tokens = {p->tokens, p->n_tokens * (uint32_t)sizeof *p->tokens},
                .fresh = magazine_lacks(p->view, p->n_blocks),
        };
        struct kvd *handle = p->view->space->handle;
        struct kvd_msg_seal_reply reply;
        struct view *now;
        int r;

        if (p->until) {
                request.semaphore = p->until->at + 1;
                request.semaphore_value = p->until->value;
        }
        if (p->promises)
                request.promises = (struct kvd_slice){p->promises->at,
                                                      p->promises->n *
                                                              (uint32_t)sizeof *p->promises->at};
        if (p->view->ix->kind == KVD_BIDIRECTIONAL)
                request.prefix_key = (struct kvd_slice){&p->prefix, sizeof p->prefix};
        *in_doubt = false;
        r = handle_lock(handle);
        if (r < 0)
                return r;
        r = view_attach(p->view->space, &now);
        if (r == 0 && now != p->view) {
                r = client_fail(-ESTALE, "the blocks belong to a daemon that is gone; free them");
        } else if (r == 0) {
                r = handle_call(handle, KVD_MSG_seal, &request, &reply, NULL);
                *in_doubt = conn_in_doubt(handle->conn) || (r == 0 && reply.blocks.size != bytes);
        }
        if (r == 0 && *in_doubt)
                r = client_fail(-EPROTO, "the daemon sealed another number of blocks");
        if (r == 0) {
                memcpy(ret, reply.blocks.data, bytes);
                magazine_bring(p->view, reply.fresh, request.fresh);
        }
        latency_count(p->view, KVD_LATENCY_SEAL, begun_ns);
        handle_unlock(handle);
        return r;
}

/* ---- what it changes ------------------------------------------------------------------------- */

static void extend_pin(const struct piece *p, kvd_ref leaf) {
        struct kvd_pin *pin = p->pin;

        if (pin->view)
                unpin_block(p->view, pin->leaf); /* its child's pin holds it */
        else
                atomic_fetch_add(&p->view->refs, 1);
        pin->view = p->view;
        pin->base = p->view->sealed;
        pin->block_bytes = p->view->ix->shard_bytes;
        pin->leaf = kvd_ref_id(leaf);
        pin->generation = kvd_ref_generation(leaf);
        pin->n_blocks += pin->n_posted + p->n_blocks;
        pin->n_tokens += pin->n_posted * kvd_full_tokens(&p->view->ix->geometry, pin->group) +
                         p->n_tokens;
        atomic_fetch_add_explicit(&p->view->page->held, pin->n_posted + p->n_blocks,
                                  memory_order_relaxed);
        pin->n_posted = 0;
}

/* Frees our copies of duplicates; with a promise, a stream may still be writing them. */
static void give_back_spare(const struct piece *p, const kvd_ref *spare, uint32_t n) {
        for (uint32_t i = 0; p->until && i < n; i++)
                deferred_add(p->view, *p->until, spare[i], false);
        if (!p->until && n)
                magazine_put(p->view, spare, n);
}

/* Makes the block refer to the one that holds the content now, at its read-only address. */
static void rename_block(const struct piece *p, struct kvd_block *block, kvd_ref now) {
        block->id = kvd_ref_id(now);
        block->generation = kvd_ref_generation(now);
        block->data = p->view->sealed + block->id * p->view->ix->shard_bytes;
}

/* From now on the pin's reference to the view covers the blocks of the chain. */
static void adopt(const struct piece *p, const kvd_ref *own, const kvd_ref *now) {
        kvd_ref spare[PIECE_BLOCKS];
        uint32_t n = 0;

        for (uint32_t i = 0; i < p->n_blocks; i++) {
                rename_block(p, &p->blocks[i], now[i]);
                if (now[i] != own[i])
                        spare[n++] = own[i];
        }
        give_back_spare(p, spare, n);
        view_put_some(p->view, p->n_blocks);
}

/* The caller keeps its copies of duplicates. */
static void adopt_own(const struct piece *p, const kvd_ref *own, const kvd_ref *now) {
        uint32_t sealed = 0;

        for (uint32_t i = 0; i < p->n_blocks; i++) {
                p->ids[i] = kvd_ref_id(now[i]);
                if (now[i] != own[i])
                        continue;
                p->blocks[i] = (struct kvd_block){0};
                sealed++;
        }
        view_put_some(p->view, sealed);
}

static void count_sealed(const struct piece *p, const kvd_ref *own, const kvd_ref *now) {
        uint32_t sealed = 0;

        for (uint32_t i = 0; i < p->n_blocks; i++)
                sealed += now[i] == own[i];
        count(p->view->space, COUNT_SEALED, sealed);
        count(p->view->space, COUNT_DUPLICATE, p->n_blocks - sealed);
}

/* Blocks that may be sealed must not be written again: they can only be freed (see kvd_free). */
static void withdraw(const struct piece *p) {
        for (uint32_t i = 0; i < p->n_blocks; i++)
                p->blocks[i].data = NULL;
}

/*
 * Maps the blocks that hold the content now. Until the last block of the chain is pinned, the chain
 * may be evicted and its segments may lose their memory. So that block is pinned first, unless it
 * is our own, which is pinned already.
 */
static int hold_and_map(const struct piece *p, const kvd_ref *now, bool own_last, bool *in_doubt) {
        kvd_ref last = now[p->n_blocks - 1];
        int r;

        if (!own_last && !pin_block(p->view, last))
                return -EAGAIN;
        r = view_map_blocks(p->view, now, p->n_blocks);
        *in_doubt = r < 0;
        if (r < 0 && !own_last)
                unpin_block(p->view, kvd_ref_id(last));
        return r;
}

/*
 * Seals a piece and moves the pin to its end. -EAGAIN: all were duplicates, and the last one was
 * evicted.
 */
static int seal_once(const struct piece *p) {
        kvd_ref own[PIECE_BLOCKS], now[PIECE_BLOCKS], last = ref_of(&p->blocks[p->n_blocks - 1]);
        bool held = false, in_doubt = false;
        int r;

        assert(p->n_blocks && p->n_blocks <= PIECE_BLOCKS);
        for (uint32_t i = 0; i < p->n_blocks; i++)
                own[i] = ref_of(&p->blocks[i]);
        count_pin(p->view, kvd_ref_id(last));
        r = ask(p, own, now, &in_doubt);
        if (r == 0)
                r = hold_and_map(p, now, now[p->n_blocks - 1] == last, &in_doubt);
        held = r == 0 && now[p->n_blocks - 1] == last;
        if (!held)
                unpin_block(p->view, kvd_ref_id(last));
        if (in_doubt)
                withdraw(p);
        if (r != 0)
                return r;
        extend_pin(p, now[p->n_blocks - 1]);
        count_sealed(p, own, now);
        (p->ids ? adopt_own : adopt)(p, own, now);
        return 0;
}

static int seal_piece(const struct piece *p) {
        int r = -EAGAIN;

        for (uint32_t i = 0; i < TRIES && r == -EAGAIN; i++)
                r = seal_once(p);
        if (r == -EAGAIN)
                r = client_fail(-ESTALE,
                                "the same blocks were repeatedly sealed by others and evicted");
        return r;
}

/* ---- the call -------------------------------------------------------------------------------- */

int seal_check_any(const struct kvd_space *space, const struct kvd_pin *pin, uint32_t n,
                   const struct kvd_block *blocks, uint32_t n_tokens) {
        uint32_t bt = kvd_full_tokens(&space->geometry, pin->group);

        if (space_check(space) < 0)
                return -ECHILD;
        if (n == 0 || DIV_UP((uint64_t)n_tokens, bt) != n)
                return client_fail(-EINVAL, "%u tokens do not fit %u blocks of %u", n_tokens, n,
                                   bt);
        if (pin->n_tokens % bt != 0)
                return client_fail(-EINVAL, "the chain ended with a partial block");
        if (space->options.kind == KVD_BIDIRECTIONAL && pin->salt)
                return client_fail(-EINVAL,
                                   "salts are for causal spaces: a bidirectional prefix is found "
                                   "by all of its tokens");
        if (space->options.kind == KVD_BIDIRECTIONAL && pin->view)
                return client_fail(-EINVAL, "a bidirectional prefix is sealed whole: the pin must "
                                            "hold nothing");
        for (uint32_t i = 0; i < n; i++)
                if (!blocks[i].view || !blocks[i].data || is_posted(&blocks[i]) ||
                    blocks[i].view != blocks[0].view || (pin->view && blocks[i].view != pin->view))
                        return client_fail(-ESTALE, "a block is not allocated, or belongs to a "
                                                    "daemon that is gone");
        return 0;
}

int seal_check(const struct kvd_space *space, const struct kvd_pin *pin, uint32_t n,
               const struct kvd_block *blocks, uint32_t n_tokens) {
        if (pin->group == KVD_GROUP_KEYED)
                return client_fail(-EINVAL, "no tokens follow an object that is found by key");
        return seal_check_any(space, pin, n, blocks, n_tokens);
}

/* Advances to the next piece, as large as one request can be. */
static void next_piece(struct piece *p, uint32_t n, uint32_t n_tokens, uint32_t bt) {
        p->blocks += p->n_blocks;
        p->tokens += p->n_tokens;
        p->ids = p->ids ? p->ids + p->n_blocks : NULL;
        p->n_blocks = MIN(n, MIN(PIECE_BLOCKS, MAX(PIECE_TOKENS / bt, 1)));
        p->n_tokens = MIN(n_tokens, p->n_blocks * bt);
}

static int seal_pieces(struct piece *p, uint32_t n, uint32_t n_tokens) {
        const struct kvd_space *space = p->view->space;
        uint32_t done = 0, done_tokens = 0;
        int r;

        p->root = p->pin->salt;
        if (space->options.kind == KVD_BIDIRECTIONAL) {
                p->root = n_tokens;
                p->prefix = kvd_key_prefix(p->view->ix, p->tokens, n_tokens);
        }
        while (done < n) {
                next_piece(p, n - done, n_tokens - done_tokens,
                           kvd_full_tokens(&space->geometry, p->pin->group));
                r = seal_piece(p);
                if (r < 0)
                        return done ? (int)done : r;
                done += p->n_blocks;
                done_tokens += p->n_tokens;
        }
        return (int)n;
}

int seal_blocks(struct kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids,
                const struct seal_until *until) {
        struct piece p = {.view = blocks[0].view,
                          .pin = pin,
                          .blocks = blocks,
                          .tokens = tokens,
                          .ids = ids,
                          .until = until ? until->own : NULL,
                          .promises = until ? until->streams : NULL};

        return seal_pieces(&p, n, n_tokens);
}

int kvd_seal(struct kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
             const uint32_t *tokens, uint32_t n_tokens) {
        int r = seal_check(space, pin, n, blocks, n_tokens);

        return r < 0 ? r : seal_blocks(space, pin, n, blocks, tokens, n_tokens, NULL, NULL);
}

int kvd_seal_keep(struct kvd_space *space, struct kvd_pin *pin, uint32_t n,
                  struct kvd_block *blocks, const uint32_t *tokens, uint32_t n_tokens,
                  uint32_t *ids) {
        int r = seal_check(space, pin, n, blocks, n_tokens);

        return r < 0 ? r : seal_blocks(space, pin, n, blocks, tokens, n_tokens, ids, NULL);
}
