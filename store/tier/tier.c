/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This file knows which places of exact copies are used, and which tier each belongs to. The free
 * places of each tier of a space are on a stack, so that taking and erasing one costs a few
 * instructions. The tier itself decides whether there is room, and handles the memory. While the
 * bytes of a copy are in a file, its place in tier memory has no memory.
 */

#include "store/tier/tier.h"

#include <assert.h>
#include <errno.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"
#include "store/cache/cache.h"
#include "store/hooks.h"

static const struct tier *const tiers[KVD_N_TIERS] = {
#define KVD_TIER(id, what) [KVD_TIER_##id] = &tier_##id,
#include "ipc/base/tiers.def"
};

/* ---- a space's places ------------------------------------------------------------------------ */

static void lay_out(const struct space *space, uint64_t max_blocks, struct kvd_index *ix) {
        uint64_t end = 0;

        for (uint32_t t = 0; t < KVD_N_TIERS; t++) {
                end = MIN(end + tiers[t]->count(space, ix, max_blocks), UINT32_MAX / 4);
                ix->tier_end[t] = (uint32_t)end;
        }
}

#define BURY_BYTES (UINT64_C(2) << 20)

/* Erasing many copies takes long, so it is done piece by piece, from the end. */
static bool bury_piece(const struct space *space, uint32_t tier, struct tier_places *p) {
        uint64_t bytes = space_block_bytes(space);
        uint32_t n = (uint32_t)MIN(p->end, DIV_UP(BURY_BYTES, bytes));

        if (!n)
                return false;
        p->end -= n;
        tiers[tier]->erase(p->fd, p->end * bytes, n * bytes);
        return true;
}

int space_tier_fd(struct space *space, uint32_t tier, uint64_t *bytes) {
        struct tier_places *p = &tiers_of(space)->places[tier];

        *bytes = ALIGN_UP(MAX(p->n * space_block_bytes(space), 1), sys_page_bytes());
        if (p->fd < 0)
                p->fd = tiers[tier]->open(space, *bytes);
        if (p->fd < 0)
                return store_refuse(space_store(space), p->fd, "no %s for copies of space '%s'",
                                    tiers[tier]->what, space_name(space));
        return p->fd;
}

/* ---- one place ------------------------------------------------------------------------------- */

/*
 * Entry i is the difference from the initial order, so that the zeros of calloc are the correct
 * initial stack.
 */
static uint32_t number_at(const struct tier_places *p, uint32_t i) {
        return p->free[i] + (p->n - 1 - i);
}

static bool has_room(const struct space *space, uint32_t tier) {
        return tiers_of(space)->places[tier].n_free && tiers[tier]->has_room(space);
}

uint64_t places_free(const struct space *space) {
        uint64_t n = 0;

        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                n += tiers_of(space)->places[t].n_free;
        return n;
}

bool place_available(const struct space *space) {
        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                if (has_room(space, t))
                        return true;
        return false;
}

uint32_t place_take(struct space *space) {
        uint32_t tier = 0, number;
        struct tier_places *p;

        while (tier < KVD_N_TIERS && !has_room(space, tier))
                tier++;
        if (tier == KVD_N_TIERS)
                return KVD_NOWHERE;
        p = &tiers_of(space)->places[tier];
        number = number_at(p, --p->n_free);
        p->end = MAX(p->end, number + 1);
        space_changes(space);
        tiers[tier]->charge(space, 1);
        return kvd_tier_first(space_index(space), tier) + number;
}

/* Makes the place free. It has no memory any more. */
static void give_number(struct space *space, uint32_t tier, uint32_t number) {
        struct tier_places *p = &tiers_of(space)->places[tier];
        uint32_t i = p->n_free++;

        p->free[i] = number - (p->n - 1 - i);
}

static void give_memory(struct space *space, uint32_t tier, uint32_t number) {
        assert(tier < ARRAY_SIZE(tiers));
        tiers[tier]->erase(tiers_of(space)->places[tier].fd, number * space_block_bytes(space),
                           space_block_bytes(space));
        tiers[tier]->charge(space, -1);
}

/* The copy is in a file. */
static void erase_below(struct space *space, struct place *p) {
        tiers_of(space)->drop(space, p->record);
        tiers_of(space)->n_below--;
        *p = (struct place){0};
}

void place_erase(struct space *space, uint32_t place) {
        uint32_t tier = kvd_place_tier(space_index(space), place);
        uint32_t number = place - kvd_tier_first(space_index(space), tier);
        struct place *p = place_moved(space, place);

        space_changes(space);
        if (p && p->state != PLACE_HERE && p->state != PLACE_BELOW) {
                p->erased = true;
                return;
        }
        if (p && p->state == PLACE_BELOW)
                erase_below(space, p);
        else
                give_memory(space, tier, number);
        give_number(space, tier, number);
}

int place_memory(struct space *space, uint32_t place, uint64_t *offset) {
        uint32_t tier;
        uint64_t bytes;

        if (place == KVD_NOWHERE)
                return -ENOSPC;
        tier = kvd_place_tier(space_index(space), place);
        *offset = (place - kvd_tier_first(space_index(space), tier)) * space_block_bytes(space);
        return space_tier_fd(space, tier, &bytes);
}

uint64_t places_used(const struct space *space, uint32_t tier) {
        return tiers_of(space)->places[tier].n - tiers_of(space)->places[tier].n_free;
}

uint32_t place_free_at(const struct space *space, uint32_t tier, uint32_t i) {
        return kvd_tier_first(space_index(space), tier) +
               number_at(&tiers_of(space)->places[tier], i);
}

/* ---- copies in files ------------------------------------------------------------------------- */

static uint64_t moved_bytes(const struct space *space) {
        return (uint64_t)tiers_of(space)->places[KVD_TIER_memory].n * sizeof(struct place);
}

/* Only pages that are written take memory. */
static struct place *make_moved(const struct space *space) {
        void *at = sys->mmap(NULL, moved_bytes(space), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        return at == MAP_FAILED ? NULL : at;
}

int place_goes(struct space *space, uint32_t place, uint32_t record,
               void (*drop)(struct space *space, uint32_t record)) {
        struct tiers *all = tiers_of(space);

        if (!all->moved)
                all->moved = make_moved(space);
        if (!all->moved)
                return -ENOMEM;
        all->drop = drop;
        all->moved[place] = (struct place){.record = record, .state = PLACE_GOES};
        space_changes(space);
        return 0;
}

bool place_comes(struct space *space, uint32_t place) {
        if (!spill_charge(space, space_block_bytes(space)))
                return false;
        tiers_of(space)->n_below--;
        tiers_of(space)->moved[place].state = PLACE_COMES;
        space_changes(space);
        return true;
}

bool place_ends(struct space *space, uint32_t place, enum place_state state) {
        struct place *p = &tiers_of(space)->moved[place];
        bool erased = p->erased;

        if (state == PLACE_BELOW && p->state != PLACE_WANTED) {
                give_memory(space, KVD_TIER_memory, place);
                tiers_of(space)->n_below++;
        }
        *p = (struct place){.record = state == PLACE_BELOW ? p->record : 0,
                            .state = (uint8_t)state};
        space_changes(space);
        if (erased)
                place_erase(space, place);
        return !erased;
}

/* Erases some of a deleted space's copies in files. Those that are being moved end by themselves. */
#define BURY_PLACES 4096u

static bool bury_below(struct space *space) {
        struct tiers *all = tiers_of(space);
        uint32_t end = (uint32_t)MIN((uint64_t)all->buried + BURY_PLACES,
                                     all->moved ? all->places[KVD_TIER_memory].n : 0);

        for (; all->buried < end; all->buried++) {
                struct place *p = &all->moved[all->buried];

                if (p->state == PLACE_BELOW || p->state == PLACE_WANTED)
                        erase_below(space, p);
        }
        return all->moved && all->buried < all->places[KVD_TIER_memory].n;
}

/* ---- life ------------------------------------------------------------------------------------ */

static int begin(struct space *space) {
        struct tiers *all = space->parts.tiers = sys->calloc(1, sizeof *all);

        if (!all)
                return -ENOMEM;
        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                all->places[t].fd = -1;
        for (uint32_t t = 0; t < KVD_N_TIERS; t++) {
                struct tier_places *p = &all->places[t];

                p->n = p->n_free = space_index(space)->tier_end[t] -
                                   kvd_tier_first(space_index(space), t);
                p->free = sys->calloc(MAX(p->n, 1), sizeof *p->free);
                if (!p->free)
                        return -ENOMEM;
        }
        return 0;
}

static bool bury(struct space *space) {
        if (bury_below(space))
                return true;
        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                if (bury_piece(space, t, &tiers_of(space)->places[t]))
                        return true;
        return false;
}

static void end(struct space *space) {
        struct tiers *all = tiers_of(space);

        if (!all)
                return;
        for (uint32_t t = 0; t < KVD_N_TIERS; t++) {
                closep(&all->places[t].fd);
                free(all->places[t].free);
        }
        if (all->moved)
                munmap(all->moved, moved_bytes(space));
        spill_discharge(space, all->spill_bytes);
        free(all);
}

uint64_t tiers_copy_bytes(const struct space *space) {
        return (places_used(space, KVD_TIER_memory) - tiers_of(space)->n_below) *
               space_block_bytes(space);
}

static void usage(const struct space *space, struct space_usage *ret) {
        ret->copy_bytes = tiers_copy_bytes(space);
        ret->sketch_bytes = tiers_of(space)->spill_bytes - ret->copy_bytes;
        ret->spill_slots = kvd_places(space_index(space));
}

const struct hooks tier_hooks = {.lay_out = lay_out,
                                 .space_begins = begin,
                                 .space_buried = bury,
                                 .space_ends = end,
                                 .usage = usage};
