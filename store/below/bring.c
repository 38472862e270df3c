/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Requests for fetches, and their answers. A fetch asks for the next blocks of its chain, as many
 * as a request takes, and seals those that come. It ends early at a block that is wrong, cannot be
 * read, or finds no room. The client then looks up what is there.
 */

#include "store/below/bring.h"

#include "store/cache/inside.h"

#define AT_ONCE 64u /* fetches that one call looks at, */
#define WALK 128u   /* each of which counts once more for so many blocks */

/* ---- requests -------------------------------------------------------------------------------- */

/* False: the tier does not have the block any more, or there is no room for it. */
static bool add_block(struct below *b, const struct fetch *f, uint32_t i, uint32_t *reads) {
        kvd_ref to = b->ops->may_read(b, f, i) ? room_take(f->space, f->attachment->arena, reads) :
                                                 0;

        if (!to)
                return false;
        below_hold(b, f->space, to);
        b->ops->add_read(b, f, i, to);
        return true;
}

static bool ask_for_blocks(struct below *b, struct fetch *f, uint32_t *reads) {
        b->ops->begin_read(b, f->space);
        while (f->at + b->n_blocks < f->n && !b->ops->is_full(b) &&
               add_block(b, f, f->at + b->n_blocks, reads))
                ;
        if (!b->n_blocks)
                return false;
        b->reading = f;
        if (b->ops->end_read)
                b->ops->end_read(b);
        return true;
}

/* True: there is a request. */
static bool ask(struct below *b, struct fetch *f, uint32_t *reads) {
        if (f->found)
                return ask_for_blocks(b, f, reads);
        b->reading = f;
        b->ops->ask_names(b, f);
        return true;
}

bool bring_next(struct below *b, bool *later) {
        uint32_t reads = KVD_PIN_READS, looks = 0;

        while (looks < AT_ONCE && reads) {
                struct fetch *f = kvd_list_first(&b->fetches, struct fetch, waiting);

                if (!f)
                        return false;
                if (f->found && !b->ops->may_begin(b, f->space))
                        break;
                looks += 1 + f->n / WALK;
                if (!fetch_is_needless(f) && ask(b, f, &reads))
                        return true;
                if (reads)
                        fetch_end(f);
        }
        if (reads && looks >= AT_ONCE)
                below_want(b, true); /* there may be others */
        *later = true;               /* also if the search for room has not ended */
        return false;
}

/* ---- answers --------------------------------------------------------------------------------- */

/*
 * Seals the block as the next one of the fetch if it was filled, and frees it otherwise. False: the
 * fetch cannot go on. Another block may have the content already; the next one follows that one.
 */
static bool settle(struct fetch *f, kvd_ref block, bool filled) {
        const uint32_t *tokens = fetch_tokens(f, f->at);
        struct arrival arrival = {.block = block,
                                  .parent = f->last,
                                  .chain = &f->chain,
                                  .tokens = tokens};
        kvd_ref there;

        block_let_go(f->space, kvd_ref_id(block));
        if (!filled || fetch_is_needless(f)) {
                block_discard(f->space, kvd_ref_id(block));
                return false;
        }
        there = block_arrives(f->space, &arrival);
        if (!there)
                return false;
        if (f->last)
                block_let_go(f->space, kvd_ref_id(f->last));
        f->last = there;
        block_hold(f->space, kvd_ref_id(there));
        f->at++;
        f->from->ops->note(f->from, f->space, kvd_ref_id(there), f->names[f->at]);
        return true;
}

/* A part of a bidirectional prefix is of no use, so nothing is sealed if a block is missing. */
static bool is_useful(const struct below *b, const struct fetch *f, const int32_t *errors,
                      uint32_t n) {
        for (uint32_t i = 0; space_finds_whole(f->space) && i < b->n_blocks; i++)
                if (i >= n || errors[i])
                        return false;
        return true;
}

void bring_done(struct below *b, const int32_t *errors, uint32_t n) {
        struct fetch *f = STEAL(b->reading);
        bool goes_on = f && is_useful(b, f, errors, n);

        for (uint32_t i = 0; i < b->n_blocks; i++) {
                int error = i < n ? errors[i] : -ECANCELED;

                if (f)
                        goes_on = settle(f, b->blocks[i], goes_on && !error);
                b->ops->was_read(b, i, error);
        }
        b->n_blocks = 0;
        if (f && (!goes_on || f->at == f->n || !f->attachment))
                fetch_end(f);
}
