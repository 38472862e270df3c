/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What fetches of all tiers have in common: what they come behind is held, what came is sealed
 * behind it, and whoever asked is told by a descriptor at the end.
 */

#include <errno.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "store/file/bring.h"

#include <sys/eventfd.h>

#define WALK 4096u /* resident blocks of a chain that one request goes along */

static struct chain_at begin_of(const struct space *space, const struct fetch_request *q) {
        return chain_begin(space, q->group, q->salt, q->tokens, q->n_tokens);
}

/* Of q's tokens, those before the end of the next block. */
static uint64_t next_end(const struct space *space, const struct chain_at *at) {
        return (uint64_t)at->depth * space->ix->geometry.block_tokens +
               tokens_at(space, at->root, at->depth);
}

struct chain_at bring_walk(const struct space *space, const struct fetch_request *q) {
        struct chain_at begin = begin_of(space, q), at = begin;
        uint32_t bt = space->ix->geometry.block_tokens;

        while (at.depth < WALK && next_end(space, &at) <= q->n_tokens &&
               chain_step(space, &at, q->tokens + (uint64_t)at.depth * bt))
                ;
        return space_finds_whole(space) && tokens_at(space, at.root, at.depth) ? begin : at;
}

bool bring_is_needless(const struct bringing *b, const uint32_t *tokens) {
        const struct fetch_request q = {.group = b->chain.group,
                                        .n_tokens = (uint32_t)b->chain.root,
                                        .tokens = tokens};

        return !b->last && space_finds_whole(b->space) && bring_walk(b->space, &q).depth;
}

int bring_begin(struct bringing *b, struct kvd_list *list, struct attachment *a,
                const struct fetch_request *q, const struct chain_at *at, int *fd) {
        b->fd = sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (b->fd < 0)
                return store_refuse(space_store(a->space), -errno, "no descriptor for a fetch");
        *fd = b->fd;
        b->begun_ns = sys_now_ns();
        b->space = a->space;
        b->attachment = a;
        b->chain = begin_of(a->space, q);
        b->last = at->leaf;
        if (b->last)
                block_hold(b->space, kvd_ref_id(b->last));
        kvd_list_insert(list, NULL, &b->waiting);
        return 0;
}

/* With what clients say that their calls took. */
static void count_latency(struct bringing *b) {
        uint64_t *words = b->space->account.past_counters, ns = sys_now_ns() - b->begun_ns;

        words[kvd_latency_sum(KVD_LATENCY_FETCH)] += ns;
        words[kvd_latency_bucket(KVD_LATENCY_FETCH, ns)]++;
}

/* A descriptor that is readable already need not be told. */
void bring_tell(struct bringing *b) {
        uint64_t one = 1;

        if (b->fd >= 0 && b->space)
                count_latency(b);
        if (b->fd >= 0)
                (void)!write(b->fd, &one, sizeof one);
        closep(&b->fd);
        b->fd = -1;
}

/* What came of a prefix that did not come whole is of no use. */
static bool is_useless(const struct bringing *b) {
        const struct kvd_desc *last = kvd_index_desc(b->space->ix, kvd_ref_id(b->last));

        return space_finds_whole(b->space) && tokens_at(b->space, last->root, last->depth + 1);
}

void bring_end(struct bringing *b) {
        kvd_list_remove(&b->waiting);
        if (b->space && b->last) {
                block_let_go(b->space, kvd_ref_id(b->last));
                if (is_useless(b))
                        block_condemn(b->space, kvd_ref_id(b->last));
        }
        bring_tell(b);
        b->space = NULL;
}

kvd_ref bring_settle(struct bringing *b, kvd_ref block, const uint32_t *tokens, bool filled) {
        struct arrival arrival = {.block = block,
                                  .parent = b->last,
                                  .chain = &b->chain,
                                  .tokens = tokens};
        kvd_ref there;

        block_let_go(b->space, kvd_ref_id(block));
        if (!filled || bring_is_needless(b, tokens)) {
                block_discard(b->space, kvd_ref_id(block));
                return 0;
        }
        there = block_arrives(b->space, &arrival);
        if (!there)
                return 0;
        if (b->last)
                block_let_go(b->space, kvd_ref_id(b->last));
        b->last = there;
        block_hold(b->space, kvd_ref_id(there));
        return there;
}
