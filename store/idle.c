/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Deferred work, and work of timers. A call does a bounded piece for one space, or for a few spaces
 * if the pieces are small, and returns whether there is more. Spaces take turns, so that no request
 * waits long, however many spaces there are.
 */

#include "store/cache/cache.h"
#include "store/cache/memory.h"
#include "store/hooks.h"

/* ---- idle work ------------------------------------------------------------------------------- */

#define SWEEP 256u /* garbage blocks looked at in one call if the space has one client */

void space_wants_idle(struct space *space) {
        space_is_busy(space);
}

void space_be_quiet(struct space *space, bool quiet) {
        space->listed.quiet = quiet;
}

static bool space_idle(struct space *space) {
        if (!space_take_over(space))
                return true;
        return hooks_idle(space) || garbage_sweep(space, SWEEP / (1 + space_seats(space) / 8)) ||
               posts_take_left(space) || attachment_fold(space) || evict_restamp(space) ||
               space_trim(space) || space_tidy(space) || space_fill_ahead(space) ||
               available_look(space);
}

/*
 * Does a piece for the space that waits longest, and puts it at the end of the list if there is
 * more.
 */
static void next_space_idle(struct space_lists *lists) {
        struct space *space = kvd_list_first(&lists->busy, struct space, listed.busy);
        bool more = space && space_idle(space);

        if (!space)
                return;
        kvd_list_remove(&space->listed.busy);
        if (more)
                space_is_busy(space);
}

uint64_t store_buried(const struct store *store) {
        return store->spaces.buried;
}

/* Alternates between memory to free or spaces to bury, and live spaces. */
bool store_idle(struct store *store) {
        struct space_lists *lists = &store->spaces;

        if (lists->turn++ % 2 == 0 && (store->memory->idle(store) || store_bury(store)))
                return true;
        next_space_idle(lists);
        return lists->busy.first || store->memory->idle(store) || store_bury(store);
}

/* ---- timers ---------------------------------------------------------------------------------- */

#define ROUND_SPACES 256u /* spaces and clients per call */
#define ROUND_CLIENTS 512u

/* Does a piece of a round through all spaces. look returns its amount of work, in clients. */
static enum store_again go_round(struct store *store, struct round *round,
                                 uint32_t (*look)(struct space *)) {
        struct space *space = store_next_space(store, round->next);
        uint32_t done = 0;

        for (uint32_t i = 0; space && i < ROUND_SPACES && done < ROUND_CLIENTS; i++) {
                done += look(space);
                round->next = space_number(space) + 1;
                space = store_next_space(store, round->next);
        }
        round->found += done;
        if (space)
                return STORE_SOON;
        done = round->found;
        *round = (struct round){0};
        return done ? STORE_LATER : STORE_DONE;
}

static uint32_t look_at_pins(struct space *space) {
        uint32_t ended = space_is_incomplete(space) ? 1 : inherited_look(space);

        sessions_expire(space);
        return ended + available_round(space);
}

enum store_again store_look_at_pins(struct store *store) {
        return go_round(store, &store->spaces.pins, look_at_pins);
}

static uint32_t look_at_semaphores(struct space *space) {
        return semaphores_look(space) ? ROUND_CLIENTS : 0;
}

enum store_again store_look_at_semaphores(struct store *store) {
        return go_round(store, &store->spaces.semaphores, look_at_semaphores);
}
