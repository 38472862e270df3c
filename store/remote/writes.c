/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the sweep (store/below/sweep.c) writes to the servers. The remote process finds out which
 * blocks another machine has written already, and does not transfer those.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/below/admit.h"
#include "store/cache/inside.h"
#include "store/remote/inside.h"

#define FIRST_PAUSE_NS UINT64_C(100000000)
#define MOST_PAUSE_NS UINT64_C(10000000000)

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Number of the block's item in the request, plus 1; 0: it is not in the request. */
static uint32_t planned(const struct remote *remote, const struct space *space, uint32_t id) {
        const struct store_remote_question *q = &remote->question;

        for (uint32_t i = 0; i < q->n; i++)
                if (q->items[i].block == block_ref(space, id))
                        return i + 1;
        return 0;
}

bool remote_has(const struct below *b, const struct space *space, uint32_t id) {
        const struct remote *remote = remote_of(b);

        return remote_name_of(remote, space, id) || planned(remote, space, id);
}

static void add(struct remote *remote, struct space *space, uint32_t id) {
        const struct kvd_desc *desc = block_desc(space, id);
        uint32_t parent = block_of(space, id)->parent;
        uint32_t behind = parent == NONE ? 0 : planned(remote, space, parent);
        struct store_remote_item item = {.item = {.root = desc->root,
                                                  .behind = behind,
                                                  .group = desc->group,
                                                  .n_tokens = desc->n_tokens},
                                         .block = block_ref(space, id),
                                         .tokens = desc->tokens};

        if (!behind && parent != NONE)
                item.item.parent = *remote_name_of(remote, space, parent);
        else if (!behind && space_finds_whole(space))
                item.item.parent = remote_space_of(space)->prefix;
        below_hold(&remote->below, space, block_ref(space, id));
        remote_question_add(remote, &item);
}

int remote_add_write(struct below *b, struct space *space, uint32_t id) {
        struct remote *remote = remote_of(b);

        if (!remote_has_room(remote))
                return remote->question.n ? -EAGAIN : -ENOSPC;
        add(remote, space, id);
        return 0;
}

/* ---- bidirectional prefixes ------------------------------------------------------------------ */

/*
 * The name of a bidirectional prefix depends on all of its tokens, and only the remote process can
 * compute it. Turns the request into a FIND, which also tells which blocks are on the servers.
 */
static void look_for(struct remote *remote, struct space *space, uint32_t last) {
        const struct kvd_desc *desc = block_desc(space, last);
        struct store_remote_question *q = &remote->question;

        q->what = STORE_REMOTE_FIND;
        q->group = desc->group;
        q->root = desc->root;
        q->first = 0;
        q->tokens = remote->below.prefix;
        q->n_tokens = (uint32_t)desc->root;
        remote->looking = block_ref(space, last);
}

/* The servers are asked first, unless the first block is, or will be, on them, or its name is known. */
int remote_add_prefix(struct below *b, struct space *space) {
        struct remote *remote = remote_of(b);
        uint32_t first = b->path ? b->path_at[b->path - 1] : NONE;

        if (first == NONE || block_of(space, first)->parent != NONE ||
            remote_space_of(space)->first == block_ref(space, first))
                return sweep_add_path(b, space);
        if (remote->question.n)
                return -EAGAIN;
        look_for(remote, space, b->path_at[0]);
        return 0;
}

/* names: of the prefix, then of its blocks on the servers. The missing blocks are written next. */
void remote_prefix_found(struct remote *remote, const struct kvd_key *names, uint32_t n) {
        struct space *space = remote->question.space;
        kvd_ref last = remote->looking;
        struct remote_space *rs;

        remote->looking = 0;
        if (!space || !n || !block_current(space, last))
                return;
        rs = remote_space_of(space);
        for (uint32_t id = kvd_ref_id(last); id != NONE; id = block_of(space, id)->parent) {
                uint32_t at = block_desc(space, id)->depth + 1;

                if (at < n)
                        remote_note(remote, space, id, names[at]);
                rs->first = block_ref(space, id);
        }
        rs->prefix = names[0];
        rs->below.hand = kvd_ref_id(last);
        rs->below.looked -= MIN(rs->below.looked, 1);
}

/* ---- requests -------------------------------------------------------------------------------- */

int remote_begin_write(struct below *b, struct space *space) {
        struct remote *remote = remote_of(b);

        if (remote->push_pause_ns && sys_now_ns() < remote->push_at_ns)
                return -EAGAIN;
        if (!remote_may_begin(b, space))
                return -EAGAIN;
        remote_begin_question(remote, STORE_REMOTE_PUT, space);
        return 1;
}

bool remote_end_write(struct below *b) {
        return remote_of(b)->question.n || remote_of(b)->looking;
}

/* ---- answers --------------------------------------------------------------------------------- */

/* Backs off while servers refuse blocks. */
static void pause_after(struct remote *remote, uint32_t written, uint32_t n) {
        if (written == n)
                remote->push_pause_ns = 0;
        else if (written)
                remote->push_pause_ns = FIRST_PAUSE_NS;
        else
                remote->push_pause_ns = MIN(MAX(remote->push_pause_ns * 2, FIRST_PAUSE_NS),
                                            MOST_PAUSE_NS);
        remote->push_at_ns = sys_now_ns() + remote->push_pause_ns;
}

bool remote_counts(const struct remote *remote, const struct space *space, uint32_t id) {
        uint32_t parent = block_of(space, id)->parent;

        return !space_finds_whole(space) || parent == NONE || remote_name_of(remote, space, parent);
}

void remote_written(struct remote *remote, const struct kvd_key *names, const int32_t *errors,
                    uint32_t n) {
        struct store_remote_question *q = &remote->question;
        uint32_t all = 0, noted = 0;

        below_let_go(&remote->below);
        for (uint32_t i = 0; i < q->n; i++) {
                int error = i < n ? errors[i] : -ECANCELED;
                uint32_t id = kvd_ref_id(q->items[i].block);

                all += !error;
                if (error)
                        remote_failed(remote, error);
                if (error || !q->space || !remote_counts(remote, q->space, id))
                        continue;
                remote_note(remote, q->space, id, names[i]);
                noted++;
                remote->info.written_bytes += space_block_bytes(q->space);
        }
        pause_after(remote, all == q->n ? all : noted, q->n);
        if (!q->space || noted == q->n)
                return;
        if (!noted || space_finds_whole(q->space)) /* others first: it may be refused again */
                sweep_go_on(q->space, &remote_space_of(q->space)->below);
        sweep_again(&remote_space_of(q->space)->below);
}
