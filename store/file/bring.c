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

int bring_begin(struct bringing *b, struct kvd_list *list, struct attachment *a,
                const struct chain_at *at, int *fd) {
        b->fd = sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (b->fd < 0)
                return store_refuse(space_store(a->space), -errno, "no descriptor for a fetch");
        *fd = b->fd;
        b->begun_ns = sys_now_ns();
        b->space = a->space;
        b->attachment = a;
        b->group = at->group;
        b->root = at->root;
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

void bring_end(struct bringing *b) {
        kvd_list_remove(&b->waiting);
        if (b->space && b->last)
                block_let_go(b->space, kvd_ref_id(b->last));
        bring_tell(b);
        b->space = NULL;
}

kvd_ref bring_settle(struct bringing *b, kvd_ref block, const uint32_t *tokens, bool filled) {
        struct arrival arrival = {.block = block,
                                  .parent = b->last,
                                  .group = b->group,
                                  .root = b->root,
                                  .n_tokens = b->space->ix->geometry.block_tokens,
                                  .tokens = tokens};
        kvd_ref there;

        block_let_go(b->space, kvd_ref_id(block));
        if (!filled) {
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
