/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fetching chains from the servers. A fetch first asks how much of the chain they have, and only
 * then makes room for it. It gets a bounded number of blocks at a time, which continue the chain,
 * and ends early at a block that is wrong or finds no room.
 */

#include <errno.h>
#include <string.h>

#include "store/cache/inside.h"
#include "store/file/bring.h"
#include "store/remote/inside.h"

/* ---- its end --------------------------------------------------------------------------------- */

static void pull_end(struct remote *remote, struct pull *p) {
        if (p == remote->pulling)
                remote->pulling = NULL;
        remote->info.queue--;
        bring_end(&p->to);
}

/*
 * Ends the fetches of a client, or of a deleted space (a is NULL). A client's fetch that has an
 * outstanding request ends with the answer.
 */
void pulls_end(struct remote *remote, const struct space *space, const struct attachment *a) {
        struct kvd_list_node *next;

        for (struct kvd_list_node *node = remote->pulls.first; node; node = next) {
                struct pull *p = container_of(node, struct pull, to.waiting);

                next = node->next;
                if (p->to.space != space || (a && p->to.attachment != a))
                        continue;
                if (a && p == remote->pulling)
                        p->to.attachment = NULL;
                else
                        pull_end(remote, p);
        }
}

/* wait: a fetch with an outstanding request tells its client now, but ends with the answer. */
void pulls_end_all(struct remote *remote, bool wait) {
        struct kvd_list_node *next;

        for (struct kvd_list_node *node = remote->pulls.first; node; node = next) {
                struct pull *p = container_of(node, struct pull, to.waiting);

                next = node->next;
                p->to.attachment = NULL;
                if (wait && p == remote->pulling)
                        bring_tell(&p->to);
                else
                        pull_end(remote, p);
        }
}

/* ---- its beginning --------------------------------------------------------------------------- */

static int begin(struct remote *remote, struct attachment *a, const struct fetch_request *q,
                 const struct chain_at *at, int *fd) {
        uint32_t bt = space_full_tokens(a->space, q->group);
        uint32_t n = space_finds_whole(a->space) ? q->n_tokens :
                                                   MIN(q->n_tokens, kvd_fetch_most(bt)) / bt * bt;
        struct bringing *to;
        struct pull *p;
        int r = bring_begin(&remote->pulls, sizeof *p + n * sizeof *p->tokens, a, q, at, &to);

        if (r < 0)
                return r;
        *fd = to->fd;
        p = container_of(to, struct pull, to);
        p->first = at->depth;
        p->n_tokens = n;
        memcpy(p->tokens, q->tokens, n * sizeof *p->tokens);
        remote->info.fetches++;
        remote->info.queue++;
        remote_want(remote, true);
        return 0;
}

int64_t space_fetch_remote(struct attachment *a, const struct fetch_request *q, int *fd) {
        struct space *space = a->space;
        struct remote *remote = remote_for(space);
        struct chain_at at = bring_walk(space, q);
        uint32_t bt = space_full_tokens(space, q->group);
        int r = 0;

        *fd = -1;
        if (remote && bring_reaches(space, q, &at))
                r = begin(remote, a, q, &at, fd);
        return r < 0 ? r : (int64_t)MIN((uint64_t)at.depth * bt, q->n_tokens);
}

/* ---- requests -------------------------------------------------------------------------------- */

static bool ask_for_names(struct remote *remote, struct pull *p) {
        struct store_remote_question *q = &remote->question;

        remote_begin_question(remote, STORE_REMOTE_FIND, p->to.space);
        q->group = p->to.chain.group;
        q->root = p->to.chain.root;
        q->first = p->first;
        q->tokens = p->tokens;
        q->n_tokens = p->n_tokens;
        return true;
}

/* False: there is no room for the block. */
static bool add_block(struct remote *remote, struct pull *p, uint32_t *reads) {
        struct store_remote_question *q = &remote->question;
        uint32_t group = p->to.chain.group, bt = space_full_tokens(p->to.space, group);
        uint32_t i = p->at + q->n;
        uint64_t root = p->to.chain.root;
        kvd_ref to = remote_has_room(remote) ?
                             room_take(p->to.space, p->to.attachment->arena, reads) :
                             0;

        if (!to)
                return false;
        remote_question_add(remote,
                            &(struct store_remote_item){.item = {.parent = p->names[i],
                                                                 .name = p->names[i + 1],
                                                                 .root = root,
                                                                 .group = group,
                                                                 .n_tokens = tokens_at(p->to.space,
                                                                                       group, root,
                                                                                       p->first +
                                                                                               i)},
                                                        .block = to,
                                                        .tokens = p->tokens + (p->first + i) * bt});
        return true;
}

static bool ask_for_blocks(struct remote *remote, struct pull *p, uint32_t *reads) {
        struct store_remote_question *q = &remote->question;

        remote_begin_question(remote, STORE_REMOTE_GET, p->to.space);
        while (p->at + q->n < p->n && !remote_question_is_full(remote) &&
               add_block(remote, p, reads))
                ;
        return q->n > 0;
}

bool pull_next(struct remote *remote, bool *later) {
        uint32_t reads = KVD_PIN_READS;
        struct pull *p;

        while ((p = kvd_list_first(&remote->pulls, struct pull, to.waiting)) && reads) {
                if (p->found && !remote_may_begin(remote, p->to.space))
                        return false;
                if (!bring_is_needless(&p->to, p->tokens) &&
                    (p->found ? ask_for_blocks(remote, p, &reads) : ask_for_names(remote, p))) {
                        remote->pulling = p;
                        return true;
                }
                if (!reads) {
                        *later = true; /* the search for room has not ended */
                        return false;
                }
                pull_end(remote, p);
        }
        return false;
}

void pull_found(struct remote *remote, const struct kvd_key *names, uint32_t n) {
        struct pull *p = remote->pulling;
        uint32_t wanted;

        remote->pulling = NULL;
        if (!p)
                return;
        wanted = DIV_UP(p->n_tokens, space_full_tokens(p->to.space, p->to.chain.group)) - p->first;
        p->n = MIN(n ? n - 1 : 0, MIN(wanted, KVD_REMOTE_FOUND));
        if (p->n < wanted && space_finds_whole(p->to.space))
                p->n = 0;
        if (n)
                memcpy(p->names, names, (p->n + 1) * sizeof *names);
        p->found = true;
        if (p->n < MIN(wanted, KVD_REMOTE_FOUND))
                remote->info.misses++;
        if (!p->n || !p->to.attachment)
                pull_end(remote, p);
}

static void count(struct remote *remote, int error) {
        const struct store_remote_question *q = &remote->question;

        remote->info.hits += !error;
        remote->info.misses += error != 0;
        remote->info.wrong += error == -EBADMSG;
        if (error && error != -EBADMSG && error != -ENOENT)
                remote_failed(remote, error);
        if (!error && q->space)
                remote->info.read_bytes += space_block_bytes(q->space);
}

void pull_done(struct remote *remote, const int32_t *errors, uint32_t n) {
        struct store_remote_question *q = &remote->question;
        struct pull *p = remote->pulling;
        bool goes_on = true;

        remote->pulling = NULL;
        for (uint32_t i = 0; i < q->n; i++) {
                int error = i < n ? errors[i] : -ECANCELED;
                kvd_ref there = 0;

                count(remote, error);
                if (!p)
                        continue;
                there = bring_settle(&p->to, q->items[i].block, q->items[i].tokens,
                                     goes_on && !error);
                goes_on = there != 0;
                p->at += goes_on;
                if (there)
                        remote_note(remote, p->to.space, kvd_ref_id(there), q->items[i].item.name);
        }
        if (p && (!goes_on || p->at == p->n || !p->to.attachment))
                pull_end(remote, p);
}
