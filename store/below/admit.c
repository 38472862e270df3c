/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which blocks are worth writing to a tier below the pool: those deep in their chain, which are the
 * most expensive to recompute, and those that a client used again after no client had them pinned.
 * A block that is used only once causes no write to disk or network.
 */

#include "ipc/base/enums.h"
#include "store/cache/inside.h"
#include "store/below/admit.h"

bool admit_can_be_written(const struct space *space, uint32_t id) {
        const struct block *b = block_of(space, id);

        return b->state == KVD_SEALED && !b->private && !b->pending && !b->poisoned;
}

bool admit_can_return(const struct space *space, uint32_t id) {
        const struct kvd_desc *desc = block_desc(space, id);
        uint32_t bt = space_full_tokens(space, desc->group);

        return space_finds_whole(space) ? kvd_fetch_takes(desc->root, bt) : desc->n_tokens == bt;
}

bool admit_can_lead(const struct space *space, uint32_t id) {
        const struct kvd_desc *desc = block_desc(space, id);

        return admit_can_be_written(space, id) && admit_can_return(space, id) &&
               (!space_finds_whole(space) ||
                !tokens_at(space, desc->group, desc->root, desc->depth + 1));
}

#define EVICTED (UINT32_C(1) << 31) /* of a mark: the block's record was evicted after that use */

static uint32_t last_use(const struct space *space, uint32_t id) {
        return ((uint32_t)block_last_use(space, id) & ~EVICTED) | 1;
}

uint32_t admit_evicted(const struct space *space, uint32_t id) {
        return last_use(space, id) | EVICTED;
}

void admit_give_up(struct space *space, uint32_t id) {
        if (!block_record(space, id)->place)
                block_set_record(space, id, 0, admit_evicted(space, id), 0);
}

/* Remembers the block's last use when it is first found unpinned; a later use is its second. */
static bool used_again(struct space *space, uint32_t id, uint32_t *reads) {
        uint32_t *mark = &block_record(space, id)->mark, last;

        *reads -= MIN(*reads, space_seats(space));
        if (!*mark && block_pinned(space, id, NULL))
                return false;
        last = last_use(space, id);
        if (!*mark)
                *mark = last;
        return (*mark & ~EVICTED) != last;
}

bool admit_block(struct space *space, uint32_t id, uint32_t depth, bool evicts, uint32_t *reads) {
        const struct kvd_desc *desc = block_desc(space, id);
        const struct block_record *record = block_record(space, id);
        uint64_t end = (uint64_t)desc->depth * space_full_tokens(space, desc->group) +
                       desc->n_tokens;

        return record->place || (end >= depth && !(evicts && record->mark & EVICTED)) ||
               used_again(space, id, reads);
}
