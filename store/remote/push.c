/* SPDX-License-Identifier: Apache-2.0 */

/*
 * When blocks are written to the servers: a hand goes round a space's blocks, and picks those that
 * are admitted as for the file, with what they are behind. What another machine has put there
 * already is found by the remote process, and costs no transfer.
 */

#include "store/cache/inside.h"
#include "store/file/admit.h"
#include "store/remote/inside.h"

#define LOOKS 2048u /* blocks looked at in one call */
#define PATH 1024u  /* blocks before one that are written along with it */

/* behind: item of the question that it is behind, plus 1. */
static void plan(struct remote *remote, struct space *space, uint32_t id, uint32_t behind) {
        const struct kvd_desc *desc = kvd_index_desc(space->ix, id);
        struct store_remote_item item = {.item = {.root = desc->root,
                                                  .behind = behind,
                                                  .group = desc->group,
                                                  .n_tokens = desc->n_tokens},
                                         .block = block_ref(space, id),
                                         .tokens = desc->tokens};
        uint32_t parent = space->blocks[id].parent;

        if (!behind && parent != NONE)
                item.item.parent = *remote_name_of(remote, space, parent);
        remote_question_add(remote, &item);
}

/* The block that is in the question already; 0: it is not; else which, plus 1. */
static uint32_t planned(const struct remote *remote, const struct space *space, uint32_t id) {
        const struct store_remote_question *q = &remote->question;

        for (uint32_t i = 0; i < q->n; i++)
                if (q->items[i].block == block_ref(space, id))
                        return i + 1;
        return 0;
}

/* The block, and before it whatever is not there. */
static void plan_path(struct remote *remote, struct space *space, uint32_t id, uint32_t *looks) {
        uint32_t path[PATH], n = 0, behind = 0;

        while (id != NONE && !remote_name_of(remote, space, id) &&
               !(behind = planned(remote, space, id))) {
                if (n == PATH || !admit_can_be_written(&space->blocks[id]))
                        return;
                path[n++] = id;
                id = space->blocks[id].parent;
        }
        *looks += n;
        while (n && !remote_question_is_full(remote) && remote_has_room(remote)) {
                plan(remote, space, path[--n], behind);
                behind = remote->question.n;
        }
}

static void look_at(struct remote *remote, struct space *space, uint32_t *looks, uint32_t *reads) {
        struct remote_space *rs = space->parts.remote;
        uint32_t id = rs->hand;

        rs->hand = id + 1 < space_ids(space) ? id + 1 : 0;
        rs->looked++;
        if (admit_can_be_written(&space->blocks[id]) && !remote_name_of(remote, space, id) &&
            !planned(remote, space, id) && admit_block(space, id, remote->config.depth, reads))
                plan_path(remote, space, id, looks);
}

static bool sweep(struct remote *remote, struct space *space) {
        struct remote_space *rs = space->parts.remote;
        uint32_t reads = KVD_PIN_READS;

        remote_begin_question(remote, STORE_REMOTE_PUT, space);
        for (uint32_t looks = 0; looks < LOOKS && reads && !remote_question_is_full(remote);
             looks++) {
                if (rs->looked >= space_ids(space)) {
                        rs->unswept = false;
                        break;
                }
                look_at(remote, space, &looks, &reads);
        }
        return remote->question.n > 0;
}

bool push_next(struct remote *remote, bool *later) {
        uint32_t n = MIN(store_spaces(remote->store), 64);

        for (uint32_t i = 0; i < n; i++) {
                struct space *space = store_next_space(remote->store, remote->turn);

                if (!space)
                        space = store_next_space(remote->store, 0);
                remote->turn = space_number(space) + 1;
                if (remote_for(space) != remote || !space->parts.remote->unswept)
                        continue;
                *later = true;
                if (sweep(remote, space))
                        return true;
        }
        return false;
}

void push_done(struct remote *remote, const struct kvd_key *names, const int32_t *errors,
               uint32_t n) {
        struct store_remote_question *q = &remote->question;

        for (uint32_t i = 0; i < q->n; i++) {
                bool written = i < n && errors[i] == 0;

                remote->info.errors += !written;
                if (!q->space)
                        continue;
                block_let_go(q->space, kvd_ref_id(q->items[i].block));
                if (!written)
                        continue;
                remote_note(remote, q->space, kvd_ref_id(q->items[i].block), names[i]);
                remote->info.written_bytes += q->space->ix->block_bytes;
        }
}
