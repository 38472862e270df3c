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

#define UNNAMED 1024u /* blocks looked at for one that has a name */

/*
 * Names follow from each other, so that the tokens of a chain are sent from a block on whose name
 * is known. Returns the number of blocks behind it and before the request's tokens; NONE: there are
 * too many.
 */
static uint32_t unnamed(const struct remote *remote, const struct space *space,
                        const struct fetch_request *q, struct kvd_key *ret) {
        uint32_t bt = space_full_tokens(space, q->group);
        uint32_t most = MIN(kvd_fetch_most(bt) / bt, UNNAMED);
        uint32_t id = q->behind == KVD_ROOT ? NONE : kvd_ref_id(q->behind), n = 0;

        *ret = (struct kvd_key){0};
        for (; id != NONE && n < most; id = block_of(space, id)->parent, n++) {
                const struct kvd_key *name = remote_name_of(remote, space, id);

                if (!name)
                        continue;
                *ret = *name;
                return n;
        }
        return id == NONE ? n : NONE;
}

/* The tokens of the n blocks before the request's, then the request's. */
static void gather(struct pull *p, const struct fetch_request *q, uint32_t n) {
        const struct space *space = p->to.space;
        uint32_t bt = space_full_tokens(space, q->group), id = kvd_ref_id(q->behind);

        for (uint32_t i = n; i-- > 0; id = block_of(space, id)->parent)
                memcpy(p->tokens + i * bt, block_desc(space, id)->tokens, bt * sizeof *p->tokens);
        memcpy(p->tokens + n * bt, q->tokens, (p->n_tokens - n * bt) * sizeof *p->tokens);
}

static int begin(struct remote *remote, struct attachment *a, const struct fetch_request *q,
                 const struct chain_at *at, int *fd) {
        uint32_t bt = space_full_tokens(a->space, q->group), n = q->n_tokens, before, first;
        struct kvd_key behind;
        struct bringing *to;
        struct pull *p;
        int r;

        before = unnamed(remote, a->space, q, &behind);
        if (before == NONE)
                return 0;
        first = before + at->depth - bring_before(a->space, q);
        if (!space_finds_whole(a->space))
                n = MIN(before * bt + n, kvd_fetch_most(bt)) / bt * bt;
        if (n <= first * bt)
                return 0;
        r = bring_begin(&remote->pulls, sizeof *p + n * sizeof *p->tokens, a, q, at, &to);
        if (r < 0)
                return r;
        *fd = to->fd;
        p = container_of(to, struct pull, to);
        p->first = first;
        p->behind = behind;
        p->n_tokens = n;
        gather(p, q, before);
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
        return r < 0 ? r : (int64_t)MIN((uint64_t)at.depth * bt, bring_end_of(space, q));
}

/* ---- requests -------------------------------------------------------------------------------- */

static bool ask_for_names(struct remote *remote, struct pull *p) {
        struct store_remote_question *q = &remote->question;

        remote_begin_question(remote, STORE_REMOTE_FIND, p->to.space);
        q->group = p->to.chain.group;
        q->root = p->to.chain.root;
        q->first = p->first;
        q->behind = p->behind;
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
