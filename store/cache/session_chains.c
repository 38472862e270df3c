/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The chains that sessions name (session.c), as lists: those of a session, and those that end at a
 * block. Chains of one session end at different blocks, so that it costs a block at most one entry.
 */

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
        all->chains[at].more = all->unused;
        all->unused = at;
}

static void enter_block(struct space *space, uint32_t at, uint32_t id) {
        struct session_chain *c = entry(space, at);
        struct block *b = &space->blocks[id];

        c->block = id;
        c->prev = NONE;
        c->next = b->session - 1;
        if (c->next != NONE)
                entry(space, c->next)->prev = at;
        b->session = at + 1;
}

static void leave_block(struct space *space, uint32_t at) {
        struct session_chain *c = entry(space, at);

        if (c->next != NONE)
                entry(space, c->next)->prev = c->prev;
        if (c->prev != NONE)
                entry(space, c->prev)->next = c->next;
        else
                space->blocks[c->block].session = c->next + 1;
        c->block = NONE;
}

bool session_add_chain(struct space *space, struct session *s, uint32_t id) {
        uint32_t first = space->blocks[id].session, at;

        if (first && chain_session(space, session_chain(space, first - 1)) == s)
                return false;
        at = take_entry(&space->leaves.sessions);
        entry(space, at)->session = (uint16_t)(s - space->leaves.sessions.at);
        entry(space, at)->more = s->first;
        s->first = at;
        s->n_chains++;
        enter_block(space, at, id);
        return true;
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

/* ---- blocks that leave ----------------------------------------------------------------------- */

/* A bit for each session. */
struct set {
        uint64_t bits[STORE_MAX_SESSIONS / 64];
};

/* Sessions that end at the block. Returns their number. */
static uint32_t sessions_at(const struct space *space, uint32_t id, struct set *ret) {
        uint32_t at = id == NONE ? NONE : space->blocks[id].session - 1, n = 0;

        *ret = (struct set){0};
        for (; at != NONE; at = session_chain(space, at)->next, n++) {
                uint32_t session = session_chain(space, at)->session;

                ret->bits[session / 64] |= UINT64_C(1) << session % 64;
        }
        return n;
}

/* To NONE if another chain of the same session ends there already. */
static void move_chain(struct space *space, uint32_t at, uint32_t to, const struct set *there,
                       session_moves moves) {
        uint32_t session = entry(space, at)->session, id = entry(space, at)->block;

        if (there->bits[session / 64] >> session % 64 & 1)
                to = NONE;
        if (moves)
                moves(space, &space->leaves.sessions.at[session], id, to);
        leave_block(space, at);
        if (to != NONE)
                enter_block(space, at, to);
}

uint32_t sessions_move(struct space *space, uint32_t id, uint32_t to, session_moves moves) {
        struct block *b = &space->blocks[id];
        struct set there;
        uint32_t n;

        if (!b->session)
                return 0;
        n = sessions_at(space, to, &there);
        for (; b->session; n++)
                move_chain(space, b->session - 1, to, &there, moves);
        return n;
}
