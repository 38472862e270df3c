/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writing blocks to the servers. A hand goes round a space's blocks and picks those that are
 * admitted, as for the file, together with the blocks before them. The remote process finds out
 * which blocks another machine has written already, and does not transfer those.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/cache/inside.h"
#include "store/file/admit.h"
#include "store/remote/inside.h"

#define LOOKS 2048u /* blocks looked at in one call */
#define PATH 1024u  /* maximum length of a path: a block and those before it */
#define FIRST_PAUSE_NS UINT64_C(100000000)
#define MOST_PAUSE_NS UINT64_C(10000000000)

/* behind: number of its parent's item in the request, plus 1; 0 if none. */
static void plan(struct remote *remote, struct space *space, uint32_t id, uint32_t behind) {
        const struct kvd_desc *desc = block_desc(space, id);
        const struct remote_space *rs = remote_space_of(space);
        struct store_remote_item item = {.item = {.root = desc->root,
                                                  .behind = behind,
                                                  .group = desc->group,
                                                  .n_tokens = desc->n_tokens},
                                         .block = block_ref(space, id),
                                         .tokens = desc->tokens};
        uint32_t parent = block_of(space, id)->parent;

        if (!behind && parent != NONE)
                item.item.parent = *remote_name_of(remote, space, parent);
        else if (!behind && space_finds_whole(space))
                item.item.parent = rs->prefix;
        remote_question_add(remote, &item);
}

/* Number of the block's item in the request, plus 1; 0: it is not in the request. */
static uint32_t planned(const struct remote *remote, const struct space *space, uint32_t id) {
        const struct store_remote_question *q = &remote->question;

        for (uint32_t i = 0; i < q->n; i++)
                if (q->items[i].block == block_ref(space, id))
                        return i + 1;
        return 0;
}

/*
 * The name of a bidirectional prefix depends on all of its tokens, and only the remote process can
 * compute it. Turns the request into a FIND, which also tells which blocks are on the servers.
 * False: the request has items already.
 */
static bool look_for(struct remote *remote, struct space *space, uint32_t last) {
        const struct kvd_desc *desc = block_desc(space, last);
        struct store_remote_question *q = &remote->question;
        uint32_t bt = space_block_tokens(space);

        if (q->n)
                return false;
        q->what = STORE_REMOTE_FIND;
        q->group = desc->group;
        q->root = desc->root;
        q->first = 0;
        q->tokens = remote->prefix;
        q->n_tokens = (uint32_t)desc->root;
        remote->looking = block_ref(space, last);
        for (uint32_t id = last; id != NONE; id = block_of(space, id)->parent) {
                desc = block_desc(space, id);
                memcpy(remote->prefix + desc->depth * bt, desc->tokens,
                       desc->n_tokens * sizeof *desc->tokens);
        }
        return true;
}

/* names: of the prefix, then of its blocks on the servers. The missing blocks are written next. */
void push_found(struct remote *remote, const struct kvd_key *names, uint32_t n) {
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
        rs->hand = kvd_ref_id(last);
        rs->looked -= MIN(rs->looked, 1);
}

/* A bidirectional prefix is written via its last block, which is revisited until all are stored. */
static bool is_left(const struct remote *remote, const struct space *space, uint32_t n) {
        return n && space_finds_whole(space) && remote->question.n;
}

/* Adds the block, and before it those that the servers lack. False: it needs another request. */
static bool plan_path(struct remote *remote, struct space *space, uint32_t id, uint32_t *looks) {
        uint32_t path[PATH], n = 0, behind = 0, last = id;

        while (id != NONE && !remote_name_of(remote, space, id) &&
               !(behind = planned(remote, space, id))) {
                if (n == PATH || !admit_can_be_written(space, id))
                        return true;
                path[n++] = id;
                id = block_of(space, id)->parent;
        }
        *looks += n;
        if (id == NONE && n && space_finds_whole(space) &&
            remote_space_of(space)->first != block_ref(space, path[n - 1]))
                return look_for(remote, space, last);
        while (n && !remote_question_is_full(remote) && remote_has_room(remote)) {
                plan(remote, space, path[--n], behind);
                behind = remote->question.n;
        }
        return !is_left(remote, space, n);
}

static void go_on(struct space *space) {
        struct remote_space *rs = remote_space_of(space);

        rs->hand = rs->hand + 1 < space_ids(space) ? rs->hand + 1 : 0;
        rs->looked++;
}

/* False: the request ends here, and the next one continues with the same block. */
static bool look_at(struct remote *remote, struct space *space, uint32_t *looks, uint32_t *reads) {
        uint32_t id = remote_space_of(space)->hand;

        if (admit_can_lead(space, id) && !remote_name_of(remote, space, id) &&
            !planned(remote, space, id) && admit_block(space, id, remote->config.depth, reads) &&
            !plan_path(remote, space, id, looks))
                return false;
        go_on(space);
        return true;
}

static bool sweep(struct remote *remote, struct space *space) {
        struct remote_space *rs = remote_space_of(space);
        uint32_t reads = KVD_PIN_READS;

        remote_begin_question(remote, STORE_REMOTE_PUT, space);
        for (uint32_t looks = 0;
             looks < LOOKS && reads && !remote->looking && !remote_question_is_full(remote);
             looks++) {
                if (rs->looked >= space_ids(space)) {
                        rs->unswept = false;
                        break;
                }
                if (!look_at(remote, space, &looks, &reads))
                        break;
        }
        return remote->question.n > 0 || remote->looking;
}

bool push_next(struct remote *remote, bool *later) {
        uint32_t n = MIN(store_spaces(remote->store), 64);

        if (remote->push_pause_ns && sys_now_ns() < remote->push_at_ns) {
                *later = true;
                return false;
        }
        for (uint32_t i = 0; i < n; i++) {
                struct space *space = store_space_in_turn(remote->store, &remote->turn);

                if (remote_for(space) != remote || !remote_space_of(space)->unswept)
                        continue;
                *later = true;
                if (!remote_may_begin(remote, space)) {
                        remote->turn = space_number(space);
                        return false;
                }
                if (sweep(remote, space))
                        return true;
        }
        return false;
}

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

void push_done(struct remote *remote, const struct kvd_key *names, const int32_t *errors,
               uint32_t n) {
        struct store_remote_question *q = &remote->question;
        uint32_t all = 0;

        for (uint32_t i = 0; i < q->n; i++) {
                int error = i < n ? errors[i] : -ECANCELED;
                bool written = !error;

                all += written;
                if (error)
                        remote_failed(remote, error);
                if (!q->space)
                        continue;
                block_let_go(q->space, kvd_ref_id(q->items[i].block));
                if (!written)
                        continue;
                remote_note(remote, q->space, kvd_ref_id(q->items[i].block), names[i]);
                remote->info.written_bytes += space_block_bytes(q->space);
        }
        pause_after(remote, all, q->n);
        if (!q->space || all == q->n)
                return;
        if (space_finds_whole(q->space))
                go_on(q->space); /* do not retry it at once */
        remote_space_of(q->space)->unswept = true;
        remote_space_of(q->space)->looked = 0;
}
