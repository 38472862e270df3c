/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which clients use which groups of blocks (KVD_GROUP_IDS). A client sets a bit in its page before it
 * first pins a block of a group, and never clears it. The daemon remembers the bits that it has seen,
 * so a look reads one word for each of the other clients. These words stay in the processor's caches.
 * The pins of a client that does not use the group are not read, so their pages stay holes.
 */

#include "ipc/base/sys.h"
#include "store/cache/inside.h"

int users_open(struct space *space, uint32_t seats) {
        struct users *u = &space->leaves.users;

        u->words = DIV_UP(seats, 64);
        u->groups = sys->calloc(seats, sizeof *u->groups);
        u->pages = sys->calloc(seats, sizeof *u->pages);
        u->present = sys->calloc(u->words, sizeof *u->present);
        u->pinning = sys->calloc(u->words, sizeof *u->pinning);
        u->known = sys->calloc((size_t)DIV_UP(space->ix->capacity, KVD_GROUP_IDS) * u->words,
                               sizeof *u->known);
        return u->groups && u->pages && u->present && u->pinning && u->known ? 0 : -ENOMEM;
}

void users_close(struct space *space) {
        struct users *u = &space->leaves.users;

        free(u->groups);
        free(u->pages);
        free(u->present);
        free(u->pinning);
        free(u->known);
}

static uint64_t *known_of(const struct space *space, uint32_t id) {
        return space->leaves.users.known + (size_t)(id / KVD_GROUP_IDS) * space->leaves.users.words;
}

void users_enter(const struct attachment *a) {
        struct users *u = &a->space->leaves.users;

        u->groups[a->seat] = a->groups;
        u->pages[a->seat] = a->words;
        u->present[a->seat / 64] |= UINT64_C(1) << a->seat % 64;
        u->pinning[a->seat / 64] |= UINT64_C(1) << a->seat % 64;
}

void users_fold(const struct attachment *a) {
        a->space->leaves.users.pinning[a->seat / 64] &= ~(UINT64_C(1) << a->seat % 64);
}

void users_leave(const struct attachment *a) {
        struct users *u = &a->space->leaves.users;
        uint32_t ids = a->space->ix->capacity;

        u->present[a->seat / 64] &= ~(UINT64_C(1) << a->seat % 64);
        for (uint64_t id = 0; id < ids; id += KVD_GROUP_IDS)
                known_of(a->space, (uint32_t)id)[a->seat / 64] &= ~(UINT64_C(1) << a->seat % 64);
}

static bool group_used(shm_u64 *groups, uint32_t id) {
        shm_u64 *word = kvd_group_word(groups, id);

        return atomic_load_explicit(word, memory_order_seq_cst) & kvd_group_bit(id);
}

bool users_look(const struct space *space, uint32_t id) {
        const struct users *u = &space->leaves.users;
        uint64_t *known = known_of(space, id);
        bool news = false;

        for (uint32_t i = 0; i < DIV_UP(space->n_attachments, 64); i++)
                for (uint64_t rest = u->present[i] & ~known[i]; rest; rest &= rest - 1)
                        if (group_used(u->groups[i * 64 + (uint32_t)__builtin_ctzll(rest)], id)) {
                                known[i] |= rest & -rest;
                                news = true;
                        }
        return news;
}

/* ---- their words ----------------------------------------------------------------------------- */

static bool has_pin(const struct users *u, uint32_t seat, uint32_t id) {
        return atomic_load_explicit(&u->pages[seat][id].pins, memory_order_seq_cst) != 0;
}

static bool counts(const struct users *u, const uint64_t *known, uint32_t seat) {
        return (known[seat / 64] & u->pinning[seat / 64]) >> seat % 64 & 1;
}

bool users_pin(const struct space *space, uint32_t id, uint16_t *seat, uint32_t *reads) {
        const struct users *u = &space->leaves.users;
        const uint64_t *known = known_of(space, id);
        uint32_t n = 1, at = *seat;
        bool found = counts(u, known, at) && has_pin(u, at, id);

        for (uint32_t i = 0; !found && i < DIV_UP(space->n_attachments, 64); i++)
                for (uint64_t rest = known[i] & u->pinning[i]; !found && rest; rest &= rest - 1) {
                        at = i * 64 + (uint32_t)__builtin_ctzll(rest);
                        found = has_pin(u, at, id);
                        n++;
                }
        if (found)
                *seat = (uint16_t)at;
        *reads -= MIN(*reads, n);
        return found;
}

uint32_t users_pins(const struct space *space, uint32_t id) {
        const struct users *u = &space->leaves.users;
        const uint64_t *known = known_of(space, id);
        uint32_t n = 0;

        for (uint32_t i = 0; i < DIV_UP(space->n_attachments, 64); i++)
                for (uint64_t rest = known[i] & u->pinning[i]; rest; rest &= rest - 1)
                        n += has_pin(u, i * 64 + (uint32_t)__builtin_ctzll(rest), id);
        return n;
}

uint64_t users_last_touch(const struct space *space, uint32_t id, uint64_t last) {
        const struct users *u = &space->leaves.users;
        const uint64_t *known = known_of(space, id);

        for (uint32_t i = 0; i < DIV_UP(space->n_attachments, 64); i++)
                for (uint64_t rest = known[i]; rest; rest &= rest - 1) {
                        uint32_t seat = i * 64 + (uint32_t)__builtin_ctzll(rest);

                        last = MAX(last, time_of_touch(space, &u->pages[seat][id]));
                }
        return last;
}

uint32_t users_fetch(const struct space *space, uint32_t id) {
        const struct users *u = &space->leaves.users;
        const uint64_t *known = known_of(space, id);
        uint32_t n = 0;

        for (uint32_t i = 0; i < DIV_UP(space->n_attachments, 64); i++)
                for (uint64_t rest = known[i]; rest; rest &= rest - 1, n++)
                        __builtin_prefetch(&u->pages[i * 64 + (uint32_t)__builtin_ctzll(rest)][id]);
        return n;
}

struct attachment *users_next(const struct space *space, uint32_t id, const struct attachment *a) {
        const uint64_t *known = known_of(space, id);
        uint32_t seat = a ? a->seat + 1 : 0;

        for (uint32_t i = seat / 64; i < DIV_UP(space->n_attachments, 64); i++) {
                uint64_t rest = known[i] & (i == seat / 64 ? UINT64_MAX << seat % 64 : UINT64_MAX);

                if (rest)
                        return space->attachments[i * 64 + (uint32_t)__builtin_ctzll(rest)];
        }
        return NULL;
}
