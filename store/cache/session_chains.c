/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The chains that sessions name (session.c), as lists: those of a session, and those that end at a
 * block. The first one at a block knows how many of them there are of each keep, so that one comes
 * or goes in the same time, however many sessions share the block.
 */

#include <string.h>

#include "store/cache/inside.h"

static struct session_chain *entry(struct space *space, uint32_t at) {
        return &space->leaves.sessions.chains[at];
}

static uint32_t take_entry(struct sessions *all) {
        uint32_t at = all->unused;

        all->n_chains++;
        if (at == NONE)
                return all->n_used++;
        all->unused = all->chains[at].more;
        return at;
}

static void give_entry(struct sessions *all, uint32_t at) {
        all->n_chains--;
        all->chains[at].block = NONE;
        all->chains[at].more = all->unused;
        all->unused = at;
}

uint32_t sessions_keep(const struct space *space, uint32_t id) {
        uint32_t first = space->blocks[id].session, keep = first ? KVD_keep_max : 0;

        while (keep && !session_chain(space, first - 1)->n[keep])
                keep--;
        return keep;
}

/* The first entry at a block has the numbers of all of them. */
static void enter_block(struct space *space, uint32_t at, uint32_t id) {
        struct session_chain *c = entry(space, at), *next;
        struct block *b = &space->blocks[id];

        c->block = id;
        c->prev = NONE;
        c->next = b->session - 1;
        memset(c->n, 0, sizeof c->n);
        if (b->session) {
                next = entry(space, c->next);
                next->prev = at;
                memcpy(c->n, next->n, sizeof c->n);
        }
        b->session = at + 1;
        c->n[chain_session(space, c)->keep]++;
}

static void leave_block(struct space *space, uint32_t at) {
        struct session_chain *c = entry(space, at);
        struct block *b = &space->blocks[c->block];

        entry(space, b->session - 1)->n[chain_session(space, c)->keep]--;
        if (c->next != NONE)
                entry(space, c->next)->prev = c->prev;
        if (c->prev != NONE) {
                entry(space, c->prev)->next = c->next;
                return;
        }
        b->session = c->next + 1;
        if (c->next != NONE)
                memcpy(entry(space, c->next)->n, c->n, sizeof c->n);
}

void session_add_chain(struct space *space, struct session *s, uint32_t id) {
        uint32_t at = take_entry(&space->leaves.sessions);

        entry(space, at)->session = (uint16_t)(s - space->leaves.sessions.at);
        entry(space, at)->more = s->first;
        s->first = at;
        s->n_chains++;
        enter_block(space, at, id);
}

uint32_t session_take_chain(struct space *space, struct session *s) {
        uint32_t at = s->first, id = entry(space, at)->block;

        s->first = entry(space, at)->more;
        s->n_chains--;
        if (id != NONE)
                leave_block(space, at);
        give_entry(&space->leaves.sessions, at);
        return id;
}

uint32_t sessions_shrink(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];
        uint32_t n = 0;

        for (uint32_t at = b->session - 1, next; at != NONE; at = next, n++) {
                next = entry(space, at)->next;
                entry(space, at)->block = NONE;
                if (b->parent != NONE)
                        enter_block(space, at, b->parent);
        }
        b->session = 0;
        if (n && b->parent != NONE)
                space->blocks[b->parent].precious |= b->precious;
        return n;
}
