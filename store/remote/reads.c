/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What fetches (store/below/bring.h) ask the servers: first how much of the chain they have, then
 * its blocks.
 */

#include <errno.h>
#include <string.h>

#include "store/below/bring.h"
#include "store/cache/inside.h"
#include "store/remote/inside.h"

static struct kvd_key key_of(struct below_name name) {
        return (struct kvd_key){.lo = name.word[0], .hi = name.word[1]};
}

static struct below_name name_of(struct kvd_key key) {
        return (struct below_name){{key.lo, key.hi}};
}

/* ---- how much they have ---------------------------------------------------------------------- */

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

bool remote_find(struct below *b, struct space *space, const struct fetch_request *q,
                 const struct chain_at *at, struct below_found *ret) {
        uint32_t bt = space_full_tokens(space, q->group), before;
        struct remote *remote = remote_for(space);
        struct kvd_key behind;

        before = remote ? unnamed(remote, space, q, &behind) : NONE;
        if (before == NONE)
                return false;
        *ret = (struct below_found){.first = before + at->depth - bring_before(space, q),
                                    .n_tokens = q->n_tokens,
                                    .before = name_of(behind)};
        if (!space_finds_whole(space))
                ret->n_tokens = MIN(before * bt + q->n_tokens, kvd_fetch_most(bt)) / bt * bt;
        if (ret->n_tokens <= ret->first * bt)
                return false;
        ret->n = DIV_UP(ret->n_tokens, bt) - ret->first;
        if (!space_finds_whole(space))
                ret->n = MIN(ret->n, KVD_FETCH_BLOCKS);
        return true;
}

void remote_ask_names(struct below *b, struct fetch *f) {
        struct remote *remote = remote_of(b);
        struct store_remote_question *q = &remote->question;

        remote_begin_question(remote, STORE_REMOTE_FIND, f->space);
        q->group = f->chain.group;
        q->root = f->chain.root;
        q->first = f->first;
        q->behind = key_of(f->names[0]);
        q->tokens = f->tokens;
        q->n_tokens = f->n_tokens;
}

void remote_named(struct remote *remote, const struct kvd_key *names, uint32_t n) {
        struct fetch *f = STEAL(remote->below.reading);
        uint32_t wanted;

        if (!f)
                return;
        wanted = f->n;
        f->n = MIN(n ? n - 1 : 0, wanted);
        remote->info.misses += f->n < wanted;
        if (f->n < wanted && space_finds_whole(f->space))
                f->n = 0;
        for (uint32_t i = 0; i <= f->n && n; i++)
                f->names[i] = name_of(names[i]);
        f->found = true;
        if (!f->n || !f->attachment)
                fetch_end(f);
}

/* ---- requests -------------------------------------------------------------------------------- */

void remote_begin_read(struct below *b, struct space *space) {
        remote_begin_question(remote_of(b), STORE_REMOTE_GET, space);
}

bool remote_may_read(struct below *b, const struct fetch *f, uint32_t i) {
        return remote_has_room(remote_of(b));
}

void remote_add_read(struct below *b, const struct fetch *f, uint32_t i, kvd_ref to) {
        struct store_remote_item item = {.item = {.parent = key_of(f->names[i]),
                                                  .name = key_of(f->names[i + 1]),
                                                  .root = f->chain.root,
                                                  .group = f->chain.group,
                                                  .n_tokens = fetch_n_tokens(f, i)},
                                         .block = to,
                                         .tokens = fetch_tokens(f, i)};

        remote_question_add(remote_of(b), &item);
}

void remote_was_read(struct below *b, uint32_t i, int error) {
        struct remote *remote = remote_of(b);

        remote->info.hits += !error;
        remote->info.misses += error != 0;
        remote->info.wrong += error == -EBADMSG;
        if (error && error != -EBADMSG && error != -ENOENT)
                remote_failed(remote, error);
        if (!error && remote->question.space)
                remote->info.read_bytes += space_block_bytes(remote->question.space);
}

void remote_note_name(struct below *b, struct space *space, uint32_t id, struct below_name name) {
        if (remote_counts(remote_of(b), space, id))
                remote_note(remote_of(b), space, id, key_of(name));
}
