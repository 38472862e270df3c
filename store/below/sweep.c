/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The sweep chooses what is written to a tier below the pool. A hand goes round a space's blocks
 * and picks those that are admitted (admit.c), together with the blocks before them that the tier
 * lacks. A bidirectional prefix is picked by its last block.
 */

#include <errno.h>
#include <string.h>

#include "store/below/admit.h"
#include "store/below/below.h"
#include "store/cache/inside.h"

#define SPACES 64u       /* spaces that one call looks at */
#define LOOKS 2048u      /* blocks looked at in one call */
#define ALL_LOOKS 16384u /* the same while all blocks are written: their uses do not matter */
#define PATH 1024u       /* maximum length of a path: a block and those before it */

void sweep_again(struct below_space *bs) {
        bs->unswept = true;
        bs->looked = 0;
}

void sweep_go_on(const struct space *space, struct below_space *bs) {
        bs->path = 0;
        bs->hand = bs->hand + 1 < space_ids(space) ? bs->hand + 1 : 0;
        bs->looked++;
}

int sweep_add_path(struct below *b, struct space *space) {
        int r = 0;

        for (uint32_t n = b->path; n && r == 0; n--)
                r = b->ops->is_full(b) ? -EAGAIN : b->ops->add_write(b, space, b->path_at[n - 1]);
        return r;
}

/*
 * Adds the block and those before it that the tier lacks. A path that is too long, or has a block
 * that cannot be written now, is passed over.
 */
static int add_chain(struct below *b, struct space *space, uint32_t id, uint32_t *looks) {
        for (; id != NONE && !b->ops->has(b, space, id); id = block_of(space, id)->parent) {
                if (b->path == PATH || !admit_can_be_written(space, id))
                        return -EPERM;
                b->path_at[b->path++] = id;
                ++*looks;
        }
        return sweep_add_path(b, space);
}

/* Adds the prefix that ends with the block. It is passed over as a chain is. */
static int add_prefix(struct below *b, struct space *space, uint32_t id, uint32_t *looks) {
        uint32_t bt = space_block_tokens(space);

        for (; id != NONE; id = block_of(space, id)->parent) {
                const struct kvd_desc *desc = block_desc(space, id);

                if (!b->ops->knows_by_tokens && b->ops->has(b, space, id))
                        break;
                if (b->path == KVD_WHOLE_BLOCKS || !admit_can_be_written(space, id))
                        return -EPERM;
                b->path_at[b->path++] = id;
                ++*looks;
                memcpy(b->prefix + desc->depth * bt, desc->tokens,
                       desc->n_tokens * sizeof *desc->tokens);
        }
        return b->ops->add_prefix(b, space);
}

/*
 * Adds the block's path. If the request does not take all of it, the next one goes on with what is
 * left, unless that is not less: other spaces' blocks take the place of this path's then. A path
 * for which there is no room is written at its next use, since a part of it may evict others.
 */
static int add(struct below *b, struct space *space, struct below_space *bs, uint32_t *looks) {
        uint32_t id = bs->hand;
        bool is_stuck;
        int r;

        b->path = 0;
        r = (space_finds_whole(space) ? add_prefix : add_chain)(b, space, id, looks);
        is_stuck = r == -EAGAIN && bs->path && b->path >= bs->path;
        if (b->ops->evicts && (is_stuck || (r == -ENOSPC && !bs->all)))
                admit_give_up(space, id);
        r = is_stuck ? -ENOSPC : r;
        bs->path = r == -EAGAIN ? b->path : 0;
        bs->left += bs->all && r == -ENOSPC;
        return r;
}

/* False: the request ends here, and the next one continues with the same block. */
static bool look_at(struct below *b, struct space *space, struct below_space *bs, uint32_t *looks,
                    uint32_t *reads) {
        uint32_t id = bs->hand;

        if (b->ops->passes)
                b->ops->passes(b, space, id);
        if (admit_can_lead(space, id) && !b->ops->has(b, space, id) &&
            (bs->all || admit_block(space, id, b->depth, b->ops->evicts, reads)) &&
            add(b, space, bs, looks) == -EAGAIN)
                return false;
        sweep_go_on(space, bs);
        return true;
}

/* A round in which all blocks are written is followed by a normal one. */
static void end_round(struct below *b, struct space *space, struct below_space *bs) {
        if (b->ops->end_round)
                b->ops->end_round(b, space, bs->all);
        bs->unswept = bs->all;
        bs->all = false;
        bs->looked = 0;
}

/* A round ends when its last request has been answered. */
static bool sweep(struct below *b, struct space *space, struct below_space *bs) {
        uint32_t reads = KVD_PIN_READS, most = bs->all ? ALL_LOOKS : LOOKS;
        bool any;

        for (uint32_t looks = 0;
             looks < most && reads && bs->looked < space_ids(space) && !b->ops->is_full(b); looks++)
                if (!look_at(b, space, bs, &looks, &reads))
                        break;
        any = b->ops->end_write(b);
        if (!any && bs->looked >= space_ids(space))
                end_round(b, space, bs);
        return any;
}

bool sweep_next(struct below *b, bool *later) {
        uint32_t n = MIN(store_spaces(b->store), SPACES);

        for (uint32_t i = 0; i < n; i++) {
                struct space *space = store_space_in_turn(b->store, &b->turn);
                struct below_space *bs = below_space_of(b, space);
                int r;

                if (!bs || !bs->unswept)
                        continue;
                *later = true;
                r = b->ops->begin_write(b, space);
                if (r == -EAGAIN) {
                        b->turn = space_number(space);
                        return false;
                }
                if (r > 0 && sweep(b, space, bs))
                        return true;
        }
        return false;
}
