/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An attachment is one client's use of one space. It has a pin page that only this client writes,
 * the blocks that it is filling and, under isolation = arena, the segments in which it may write.
 *
 *      ATTACHED ──connection lost──► ORPHANED ──process gone──► FOLDING ──idle──► (freed)
 *         └────────────said goodbye, or process gone──────────────┘
 *
 * Pins count until FOLDING. There, the times of last use that the client wrote are taken over into
 * the daemon's own, a piece at a time, so that what a short-lived process used does not look
 * unused.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"
#include "store/hooks.h"

/* ---- arenas ---------------------------------------------------------------------------------- */

int arena_new(struct space *space, struct attachment *writer, struct arena **ret) {
        struct arena *arena = sys->calloc(1, sizeof *arena);

        if (!arena)
                return -ENOMEM;
        arena->heap = sys->calloc(space->ix->capacity, sizeof *arena->heap);
        if (!arena->heap) {
                free(arena);
                return -ENOMEM;
        }
        arena->space = space;
        arena->writer = writer;
        arena->next = space->memory.arenas;
        space->memory.arenas = arena;
        *ret = arena;
        return 0;
}

/*
 * An arena whose writer is gone and whose segments have no memory can serve a new client as it is.
 */
static struct arena *vacant_arena(struct space *space) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);

        for (struct arena *arena = space->memory.arenas; arena; arena = arena->next) {
                bool vacant = !arena->writer;

                for (uint32_t i = 0; vacant && i < n; i++)
                        vacant = space->memory.segments[i].arena != arena ||
                                 space->memory.segments[i].n_ready == 0;
                if (vacant)
                        return arena;
        }
        return NULL;
}

static int choose_arena(struct attachment *a) {
        struct space *space = a->space;

        if (!space->ix->arena) {
                a->arena = space->memory.arenas;
                return 0;
        }
        a->arena = vacant_arena(space);
        if (!a->arena)
                return arena_new(space, a, &a->arena);
        a->arena->writer = a;
        return 0;
}

/* ---- pin page -------------------------------------------------------------------------------- */

/*
 * The daemon makes and seals it, so that its size is certain: a page that shrank would be SIGBUS
 * for the scan.
 */
static int make_page(struct attachment *a) {
        uint32_t capacity = a->space->ix->capacity;
        int r = shared_file_new("kvd-pins", kvd_pinpage_bytes(capacity), SHARED_MAPPED,
                                &a->pin_file);
        uint8_t *at = a->pin_file.at;

        if (r < 0)
                return r;
        a->page = a->pin_file.at;
        a->pins = (shm_u32 *)(at + KVD_PINS_OFF);
        a->touch = (shm_u32 *)(at + kvd_touch_off(capacity));
        a->use = (shm_u32 *)(at + kvd_use_off(capacity));
        a->page->magic = KVD_PINS_MAGIC;
        a->page->version = KVD_LAYOUT_VERSION;
        a->page->capacity = capacity;
        return 0;
}

void attachment_counters(const struct attachment *a, uint64_t ret[KVD_N_CLIENT_COUNTERS]) {
        for (uint32_t i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                ret[i] = atomic_load_explicit(&a->page->counters[i], memory_order_relaxed);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void bury(struct attachment *a) {
        a->space->attachments[a->seat] = NULL;
        shared_file_close(&a->pin_file);
        hooks_attachment_buried(a);
        free(a);
}

/*
 * Seats of clients that ended are free as well, if need be, before their times of use were taken
 * over.
 */
static uint32_t free_seat(struct space *space) {
        uint32_t max = space_store(space)->config.max_attachments;

        for (uint32_t i = 0; i < max; i++)
                if (!space->attachments[i])
                        return i;
        for (uint32_t i = 0; i < max; i++)
                if (space->attachments[i]->state == FOLDING &&
                    !hooks_attachment_lingers(space->attachments[i])) {
                        bury(space->attachments[i]);
                        return i;
                }
        return NONE;
}

static void enter(struct attachment *a) {
        struct space *space = a->space;

        space->attachments[a->seat] = a;
        space->n_attachments = MAX(space->n_attachments, a->seat + 1);
}

int attachment_new(struct space *space, void *owner, void (*gone)(struct attachment *),
                   struct attachment **ret) {
        uint32_t seat = free_seat(space);
        struct attachment *a;
        int r;

        if (seat == NONE)
                return store_refuse(space_store(space), -EUSERS,
                                    "space '%s' has %u clients already, the most there "
                                    "can be; end some",
                                    space->name, space_store(space)->config.max_attachments);
        a = sys->calloc(1, sizeof *a);
        if (!a)
                return store_refuse(space_store(space), -ENOMEM,
                                    "out of memory for a client of space '%s'", space->name);
        *a = (struct attachment){.space = space, .owner = owner, .gone = gone, .seat = seat, .pin_file = SHARED_FILE_NONE};
        r = make_page(a);
        if (r == 0)
                r = hooks_attachment_begins(a);
        if (r == 0)
                r = choose_arena(a);
        if (r < 0) {
                shared_file_close(&a->pin_file);
                hooks_attachment_buried(a);
                free(a);
                return store_refuse(space_store(space), r,
                                    "no memory for a pin page of space '%s': %s", space->name,
                                    strerror(-r));
        }
        enter(a);
        available_tell(a);
        *ret = a;
        return 0;
}

static void discard_filling(struct attachment *a) {
        struct space *space = a->space;

        while (a->filling.n) {
                uint32_t id = a->filling.first;

                block_fill_end(space, id);
                block_discard(space, id);
                space_count(space, KVD_SPACE_DISCARDED, 1);
        }
}

void attachment_orphan(struct attachment *a) {
        struct space *space = a->space;

        leases_drop(a, true);
        hooks_attachment_stops(a);
        for (uint32_t id = block_list_first(&a->filling); id != NONE; id = space->blocks[id].next)
                block_set_state(space, id, KVD_LIMBO, block_generation(space, id));
        a->state = ORPHANED;
}

struct attachment *attachment_free(struct attachment *a, bool died) {
        uint64_t counters[KVD_N_CLIENT_COUNTERS];

        if (!a)
                return NULL;
        leases_drop(a, died);
        hooks_attachment_stops(a);
        hooks_attachment_ends(a);
        discard_filling(a);
        attachment_counters(a, counters);
        for (uint32_t i = 0; i < KVD_N_CLIENT_COUNTERS; i++)
                a->space->past_counters[i] += counters[i];
        if (a->space->ix->arena)
                a->arena->writer = NULL;
        if (died)
                space_count(a->space, KVD_SPACE_CLIENTS_REAPED, 1);
        a->state = FOLDING;
        a->owner = NULL;
        return NULL;
}

#define FOLD_PIECE 65536u

static void fold_piece(struct attachment *a) {
        struct space *space = a->space;
        uint32_t end = MIN(a->fold + FOLD_PIECE, space_ids(space));

        for (; a->fold < end; a->fold++)
                if (space->blocks[a->fold].state == KVD_SEALED &&
                    atomic_load_explicit(&a->touch[a->fold], memory_order_relaxed))
                        block_warm(space, a->fold);
}

/* Idle work: takes over a piece of what ended clients used last. True: there may be more. */
bool attachment_fold(struct space *space) {
        for (uint32_t i = 0; i < space->n_attachments; i++) {
                struct attachment *a = space->attachments[i];

                if (!a || a->state != FOLDING || hooks_attachment_lingers(a))
                        continue;
                fold_piece(a);
                if (a->fold >= space_ids(space))
                        bury(a);
                return true;
        }
        return false;
}

/* ---- questions ------------------------------------------------------------------------------- */

void *attachment_owner(const struct attachment *a) {
        return a->owner;
}

struct space *attachment_space(const struct attachment *a) {
        return a->space;
}

int attachment_pin_fd(const struct attachment *a) {
        return a->pin_file.fd;
}

uint64_t attachment_pin_bytes(const struct attachment *a) {
        return kvd_pinpage_bytes(a->space->ix->capacity);
}

uint64_t attachment_filling(const struct attachment *a) {
        return a->filling.n;
}

uint64_t attachment_pinned(const struct attachment *a) {
        uint32_t n = space_ids(a->space);
        uint64_t pinned = 0;

        for (uint32_t i = 0; i < n; i++)
                pinned += atomic_load_explicit(&a->pins[i], memory_order_relaxed) != 0;
        return pinned;
}

#define PINS_PIECE 65536u /* counters read in one turn: 256 KiB */

uint32_t attachment_pins(const struct attachment *a, uint32_t *cursor, uint32_t *ret, uint32_t n) {
        uint32_t ids = space_ids(a->space), id = *cursor,
                 end = id + MIN(ids - MIN(id, ids), PINS_PIECE), found = 0;

        for (; id < end && found < n; id++)
                if (atomic_load_explicit(&a->pins[id], memory_order_relaxed))
                        ret[found++] = id;
        *cursor = id < ids ? id : 0;
        return found;
}
