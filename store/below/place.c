/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Exact copies are in host memory, in one memfd for each space. A place has memory from when a
 * worker writes it until it is erased (a hole is punched), but not while its copy is in a file.
 * Unused places are on a stack, so that taking and erasing one costs a few instructions. The memory
 * of all spaces, including their sketches, is limited by spill_bytes.
 */

#include "store/below/place.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>

#include "ipc/base/shared_file.h"
#include "ipc/base/summary.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/hooks.h"

/* ---- how many -------------------------------------------------------------------------------- */

/* a place costs address space and a few bytes, but memory only while it is used */
#define COPIES_PER_BLOCK 8u

/* Each place has a row of the summaries, in a file or not, and all rows are charged in advance. */
#define ROWS_PART 16u /* 1/16 of the overhead limit is for rows of copies in files */

/* Additional places for the copies that files can hold, since a copy keeps its place there. */
static uint64_t count_below(const struct store *store, const struct kvd_index *ix) {
        uint64_t rows = store->account.limit[KVD_COST_overhead] / ROWS_PART;

        return store->config.spill_bytes ? MIN(store->account.copies_below / ix->block_bytes,
                                               rows / kvd_summary_of(ix).row_bytes) :
                                           0;
}

static void lay_out(const struct space *space, uint64_t max_blocks, struct kvd_index *ix) {
        const struct store *store = space_store(space);
        uint64_t n = store->config.spill_bytes / ix->block_bytes + count_below(store, ix);

        n = MIN(max_blocks * COPIES_PER_BLOCK, n);
        ix->n_places = (uint32_t)MIN(n, UINT32_MAX / 4);
}

uint64_t places_free(const struct space *space) {
        return places_of(space)->n_free;
}

uint64_t places_used(const struct space *space) {
        return places_of(space)->n - places_of(space)->n_free;
}

uint64_t places_bytes(const struct space *space) {
        return (places_used(space) - places_of(space)->n_below) * space_block_bytes(space);
}

/* ---- budget ---------------------------------------------------------------------------------- */

static bool fits(const struct space *space, uint64_t bytes) {
        return bytes <= account_room(space_domain(space), KVD_COST_spill);
}

bool spill_charge(struct space *space, uint64_t bytes) {
        if (!fits(space, bytes))
                return false;
        account_add(space, KVD_COST_spill, bytes);
        places_of(space)->spill_bytes += bytes;
        return true;
}

void spill_discharge(struct space *space, uint64_t bytes) {
        account_discharge(space, KVD_COST_spill, bytes);
        places_of(space)->spill_bytes -= bytes;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int open_memory(uint64_t bytes) {
        struct shared_file file;
        int r = shared_file_new("kvd-spill", bytes, 0, &file);

        return r < 0 ? r : file.fd;
}

int space_copies_fd(struct space *space, uint64_t *bytes) {
        struct places *all = places_of(space);

        *bytes = ALIGN_UP(MAX(all->n * space_block_bytes(space), 1), sys_page_bytes());
        if (all->fd < 0)
                all->fd = open_memory(*bytes);
        if (all->fd < 0)
                return store_refuse(space_store(space), all->fd,
                                    "no memory for copies of space '%s'", space_name(space));
        return all->fd;
}

int place_memory(struct space *space, uint32_t place, uint64_t *offset) {
        uint64_t bytes;

        if (place == KVD_NOWHERE)
                return -ENOSPC;
        *offset = place * space_block_bytes(space);
        return space_copies_fd(space, &bytes);
}

/* Frees the memory of n places. */
static void free_memory(const struct space *space, uint32_t first, uint64_t n) {
        uint64_t bytes = space_block_bytes(space);

        if (places_of(space)->fd >= 0)
                sys->fallocate(places_of(space)->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                               (off_t)(first * bytes), (off_t)(n * bytes));
}

static void give_memory(struct space *space, uint32_t place) {
        free_memory(space, place, 1);
        spill_discharge(space, space_block_bytes(space));
}

/* ---- one place ------------------------------------------------------------------------------- */

/*
 * Entry i is the difference from the initial order, so that the zeros of calloc are the correct
 * initial stack.
 */
uint32_t place_free_at(const struct space *space, uint32_t i) {
        const struct places *all = places_of(space);

        return all->free[i] + (all->n - 1 - i);
}

bool place_available(const struct space *space) {
        return places_of(space)->n_free && fits(space, space_block_bytes(space));
}

uint32_t place_take(struct space *space) {
        struct places *all = places_of(space);
        uint32_t place;

        if (!all->n_free || !spill_charge(space, space_block_bytes(space)))
                return KVD_NOWHERE;
        place = place_free_at(space, --all->n_free);
        all->end = MAX(all->end, place + 1);
        space_changes(space);
        return place;
}

/* The copy is in a file. */
static void erase_below(struct space *space, struct place *p) {
        places_of(space)->drop(space, p->record);
        places_of(space)->n_below--;
        *p = (struct place){0};
}

/* Makes the place free. It has no memory any more. */
static void give_place(struct places *all, uint32_t place) {
        uint32_t i = all->n_free++;

        all->free[i] = place - (all->n - 1 - i);
}

void place_erase(struct space *space, uint32_t place) {
        struct place *p = place_moved(space, place);

        space_changes(space);
        if (p && p->state != PLACE_HERE && p->state != PLACE_BELOW) {
                p->erased = true;
                return;
        }
        if (p && p->state == PLACE_BELOW)
                erase_below(space, p);
        else
                give_memory(space, place);
        give_place(places_of(space), place);
}

/* ---- copies in files ------------------------------------------------------------------------- */

static uint64_t moved_bytes(const struct places *all) {
        return (uint64_t)all->n * sizeof(struct place);
}

/* Only pages that are written take memory. */
static struct place *make_moved(const struct places *all) {
        void *at = sys->mmap(NULL, moved_bytes(all), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        return at == MAP_FAILED ? NULL : at;
}

int place_goes(struct space *space, uint32_t place, uint32_t record,
               void (*drop)(struct space *space, uint32_t record)) {
        struct places *all = places_of(space);

        if (!all->moved)
                all->moved = make_moved(all);
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
        places_of(space)->n_below--;
        places_of(space)->moved[place].state = PLACE_COMES;
        space_changes(space);
        return true;
}

bool place_ends(struct space *space, uint32_t place, enum place_state state) {
        struct place *p = &places_of(space)->moved[place];
        bool erased = p->erased;

        if (state == PLACE_BELOW && p->state != PLACE_WANTED) {
                give_memory(space, place);
                places_of(space)->n_below++;
        }
        *p = (struct place){.record = state == PLACE_BELOW ? p->record : 0,
                            .state = (uint8_t)state};
        space_changes(space);
        if (erased)
                place_erase(space, place);
        return !erased;
}

/* ---- life ------------------------------------------------------------------------------------ */

static int begin(struct space *space) {
        struct places *all = space->parts.places = sys->calloc(1, sizeof *all);

        if (!all)
                return -ENOMEM;
        all->fd = -1;
        all->n = all->n_free = kvd_places(space_index(space));
        all->free = sys->calloc(MAX(all->n, 1), sizeof *all->free);
        return all->free ? 0 : -ENOMEM;
}

/* Erases some of a deleted space's copies in files. Those that move end by themselves. */
#define BURY_PLACES 4096u

static bool bury_below(struct space *space) {
        struct places *all = places_of(space);
        uint32_t end = (uint32_t)MIN((uint64_t)all->buried + BURY_PLACES, all->moved ? all->n : 0);

        for (; all->buried < end; all->buried++) {
                struct place *p = &all->moved[all->buried];

                if (p->state == PLACE_BELOW || p->state == PLACE_WANTED)
                        erase_below(space, p);
        }
        return all->moved && all->buried < all->n;
}

#define BURY_BYTES (UINT64_C(2) << 20)

/* Erasing many copies takes long, so it is done piece by piece, from the end. */
static bool bury_here(struct space *space) {
        struct places *all = places_of(space);
        uint32_t n = (uint32_t)MIN(all->end, DIV_UP(BURY_BYTES, space_block_bytes(space)));

        all->end -= n;
        if (n)
                free_memory(space, all->end, n);
        return n;
}

static bool bury(struct space *space) {
        return bury_below(space) || bury_here(space);
}

static void end(struct space *space) {
        struct places *all = places_of(space);

        if (!all)
                return;
        closep(&all->fd);
        free(all->free);
        if (all->moved)
                munmap(all->moved, moved_bytes(all));
        spill_discharge(space, all->spill_bytes);
        free(all);
}

static void usage(const struct space *space, struct space_usage *ret) {
        ret->copy_bytes = places_bytes(space);
        ret->sketch_bytes = places_of(space)->spill_bytes - ret->copy_bytes;
        ret->spill_slots = kvd_places(space_index(space));
}

const struct hooks place_hooks = {.lay_out = lay_out,
                                  .space_begins = begin,
                                  .space_buried = bury,
                                  .space_ends = end,
                                  .usage = usage};
