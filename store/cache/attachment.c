/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An attachment is one client's use of one space. It has a pin page that only this client writes,
 * the blocks that it is filling and, under isolation = arena, the segments in which it may write.
 *
 *      ATTACHED ──connection lost──► ORPHANED ──process gone──► FOLDING ──idle──► (freed)
 *         └────────────said goodbye, or process gone──────────────┘
 *
 * Pins count until FOLDING. The daemon cleans up in pieces: it seals the last posts, closes the
 * sequences, frees the blocks that were being filled, and copies the client's times of last use
 * into its own stamps, so that blocks that a short-lived process used do not look unused.
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"
#include "store/hooks.h"
#include "store/keep_inside.h"

/* ---- arenas ---------------------------------------------------------------------------------- */

int arena_new(struct space *space, struct attachment *writer, struct arena **ret) {
        uint64_t bytes = arena_bytes(space->ix);
        struct arena *arena;
        int r = account_charge(space, KVD_COST_overhead, bytes);

        if (r < 0)
                return r;
        arena = sys->calloc(1, sizeof *arena);
        if (arena)
                arena->heap = sys->calloc(space->ix->capacity, sizeof *arena->heap);
        if (!arena || !arena->heap) {
                free(arena);
                account_discharge(space, KVD_COST_overhead, bytes);
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

void attachment_map(struct attachment *a) {
        uint32_t capacity = a->space->ix->capacity;
        uint8_t *at = a->pin_file.at;

        a->page = a->pin_file.at;
        a->words = (struct kvd_pin_words *)(at + KVD_PINS_OFF);
        a->use = (shm_u32 *)(at + kvd_use_off(capacity));
        a->groups = (shm_u64 *)(at + kvd_groups_off(capacity));
}

/*
 * The daemon makes the page and seals its size: if a client could shrink it, the scan of the pins
 * would get SIGBUS.
 */
static int make_page(struct attachment *a) {
        uint32_t capacity = a->space->ix->capacity;
        int r = shared_file_new("kvd-pins", kvd_pinpage_bytes(a->space->ix), SHARED_MAPPED,
                                &a->pin_file);

        if (r < 0)
                return r;
        attachment_map(a);
        a->page->magic = KVD_PINS_MAGIC;
        a->page->version = KVD_LAYOUT_VERSION;
        a->page->capacity = capacity;
        atomic_store(&a->page->epoch, a->space->ix->life);
        return 0;
}

/* ---- counts ---------------------------------------------------------------------------------- */

uint32_t space_users(const struct space *space) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < space->n_attachments; i++)
                n += space->attachments[i] && space->attachments[i]->state != FOLDING;
        return n;
}

/* There can be no more posts than blocks that the client is filling, or than places in the ring. */
uint32_t attachment_posts(const struct attachment *a) {
        uint64_t n = atomic_load_explicit(&a->page->posted, memory_order_seq_cst) - a->posts_taken;

        uint32_t most = MIN(kvd_posts(space_block_tokens(a->space)), a->filling.n);

        return (uint32_t)MIN(n, most);
}

/* ---- life ------------------------------------------------------------------------------------ */

/* Its page counts in full: the client may fill every byte of it. */
static int charge(struct space *space) {
        int r = account_charge(space, KVD_COST_files, 1);

        if (r < 0)
                return r;
        r = account_charge(space, KVD_COST_overhead, kvd_pinpage_bytes(space->ix));
        if (r < 0)
                account_discharge(space, KVD_COST_files, 1);
        return r;
}

void attachment_charge(struct space *space) {
        account_add(space, KVD_COST_files, 1);
        account_add(space, KVD_COST_overhead, kvd_pinpage_bytes(space->ix));
}

static void discharge(struct space *space) {
        account_discharge(space, KVD_COST_files, 1);
        account_discharge(space, KVD_COST_overhead, kvd_pinpage_bytes(space->ix));
}

/* Works also for an attachment that was never entered. */
void attachment_unmake(struct attachment *a) {
        if (a->tenant && a->state != FOLDING)
                a->tenant->n_live--;
        if (a->tenant)
                tenant_leave(a->space, a->tenant);
        shared_file_close(&a->pin_file);
        a->space->account.inherited.n -= a->process >= 0;
        closep(&a->process);
        hooks_attachment_buried(a);
        discharge(a->space);
        free(a);
}

static void bury(struct attachment *a) {
        users_leave(a);
        a->space->attachments[a->seat] = NULL;
        attachment_unmake(a);
}

/* Its seat is not given to another client before a stream has written its semaphores. */
static bool is_waking(const struct attachment *a) {
        return a->waking.in && space_store(a->space)->wakes.on;
}

static bool has_ended(const struct attachment *a) {
        return a->state == FOLDING && !a->posts_left && !a->stopping && !a->filling.n &&
               !is_waking(a);
}

static uint32_t free_seat(struct space *space) {
        uint32_t max = space_store(space)->config.max_attachments + space->account.inherited.n;

        for (uint32_t i = 0; i < max; i++)
                if (!space->attachments[i])
                        return i;
        return NONE;
}

/* Frees an attachment that has ended, though its times of use were not copied. False: none. */
static bool bury_one(struct space *space) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));)
                if (has_ended(a)) {
                        bury(a);
                        return true;
                }
        return false;
}

void attachment_near(struct attachment *a, uint32_t node) {
        a->home = pages_home(space_store(a->space), node);
}

void attachment_enter(struct attachment *a) {
        struct space *space = a->space;

        space->attachments[a->seat] = a;
        users_enter(a);
        space->n_attachments = MAX(space->n_attachments, a->seat + 1);
}

static int attachment_make(struct attachment *a, uint64_t process) {
        struct space *space = a->space;
        uint32_t most = tenant_most(space_store(space)->config.max_attachments);
        int r;

        a->tenant = tenant_join(space, process);
        if (a->tenant && a->tenant->n_live > most)
                return store_refuse(
                        space_store(space), -EUSERS,
                        "this process already uses space '%s' %u times, the maximum; close some",
                        space->name, most);
        r = a->tenant ? make_page(a) : -ENOMEM;
        if (r == 0)
                r = hooks_attachment_begins(a);
        if (r == 0)
                r = choose_arena(a);
        return r == 0 ? 0 :
                        store_refuse(space_store(space), r,
                                     "no memory for a pin page of space '%s': %s", space->name,
                                     strerror(-r));
}

static int refuse_seat(struct space *space) {
        return store_refuse(space_store(space), -EUSERS,
                            "space '%s' already has %u clients, the maximum; end some", space->name,
                            space_store(space)->config.max_attachments);
}

int attachment_new(struct space *space, void *owner, uint64_t process,
                   void (*gone)(struct attachment *), struct attachment **ret) {
        struct attachment *a;
        uint32_t seat;
        int r;

        do {
                seat = free_seat(space);
                r = seat == NONE ? refuse_seat(space) : charge(space);
        } while (r < 0 && bury_one(space));
        if (r < 0)
                return r;
        a = sys->calloc(1, sizeof *a);
        if (!a) {
                discharge(space);
                return store_refuse(space_store(space), -ENOMEM,
                                    "out of memory for a client of space '%s'", space->name);
        }
        *a = (struct attachment){.space = space,
                                 .owner = owner,
                                 .gone = gone,
                                 .seat = seat,
                                 .pin_file = SHARED_FILE_NONE,
                                 .process = -1};
        r = attachment_make(a, process);
        if (r < 0) {
                attachment_unmake(a);
                return r;
        }
        attachment_enter(a);
        available_tell(a);
        *ret = a;
        return 0;
}

/* ---- its end --------------------------------------------------------------------------------- */

/*
 * A client may leave much behind, in many spaces at once. The first blocks are cleaned up at once,
 * and the rest in pieces as idle work.
 */
#define AT_ONCE 64u /* blocks of one attachment */
#define PIECE 1024u

bool attachment_is_inherited(const struct attachment *a) {
        return a && a->process >= 0 && a->state == ORPHANED;
}

/*
 * It is not known which client of the previous daemon fills a block, so the block stays in limbo
 * until all of them have ended. One of them has it, and passes it to another when it ends.
 */
bool block_inherit(struct space *space, uint32_t id) {
        for (struct attachment *a = NULL;
             space->account.inherited.n && (a = space_next_attachment(space, a));) {
                if (!attachment_is_inherited(a))
                        continue;
                space->blocks[id].owner = a->seat;
                block_list_append(space, &a->filling, id);
                a->tenant->n_filling++;
                block_set_state(space, id, KVD_LIMBO, block_generation(space, id));
                return true;
        }
        return false;
}

static void discard(struct attachment *a, uint32_t n) {
        struct space *space = a->space;

        for (; n && a->filling.n; n--) {
                uint32_t id = a->filling.first;

                block_fill_end(space, id);
                if (a->process >= 0 && block_inherit(space, id))
                        continue;
                block_discard(space, id);
                space_count(space, KVD_SPACE_DISCARDED, 1);
        }
}

void block_to_limbo(struct attachment *a, uint32_t id) {
        block_list_remove(a->space, &a->filling, id);
        block_list_append(a->space, &a->filling, id);
        block_set_state(a->space, id, KVD_LIMBO, block_generation(a->space, id));
}

static bool last_is_in_limbo(const struct attachment *a) {
        return a->filling.n && a->space->blocks[a->filling.last].state == KVD_LIMBO;
}

void attachment_withhold(struct attachment *a, bool on) {
        a->withholds = on;
        if (!on && last_is_in_limbo(a))
                space_is_busy(a->space);
}

/* Frees up to n blocks that were released while that was withheld. */
static bool give_withheld(struct attachment *a, uint32_t n) {
        bool some = !a->withholds && last_is_in_limbo(a);

        for (; n && !a->withholds && last_is_in_limbo(a); n--) {
                uint32_t id = a->filling.last;

                block_fill_end(a->space, id);
                block_discard(a->space, id);
        }
        return some;
}

/* Moves blocks to limbo: these are at the end of the list. False: all are in limbo. */
static bool to_limbo(struct attachment *a, uint32_t n) {
        struct space *space = a->space;

        for (; n && a->filling.n && space->blocks[a->filling.first].state == KVD_FILLING; n--)
                block_to_limbo(a, a->filling.first);
        return a->filling.n && space->blocks[a->filling.first].state == KVD_FILLING;
}

/* Cleans up to n blocks. False: nothing to do here, or posts must be taken first. */
static bool clear_up(struct attachment *a, uint32_t n) {
        if (a->posts_left)
                return false;
        if (a->stopping) {
                a->stopping = hooks_attachment_stops(a);
                return true;
        }
        if (a->state == ATTACHED)
                return give_withheld(a, n);
        if (a->state == ORPHANED)
                return to_limbo(a, n);
        if (a->state != FOLDING || !a->filling.n || !space_lives(a->space))
                return false;
        discard(a, n);
        return true;
}

static void begin_to_clear_up(struct attachment *a) {
        a->stopping = true;
        clear_up(a, AT_ONCE);
        clear_up(a, AT_ONCE);
        space_is_busy(a->space);
}

void attachment_orphan(struct attachment *a) {
        a->posts_left = attachment_posts(a);
        leases_drop(a, true);
        a->state = ORPHANED;
        begin_to_clear_up(a);
}

static void end(struct attachment *a, bool died) {
        drop_attachment(a);
        leases_drop(a, died);
        hooks_attachment_ends(a);
        counters_add(a, a->space->account.past_counters);
        if (a->arena->writer == a)
                a->arena->writer = NULL;
        if (died)
                space_count(a->space, KVD_SPACE_CLIENTS_REAPED, 1);
        a->tenant->n_live--;
        a->state = FOLDING;
        users_fold(a);
        a->owner = NULL;
        a->space->memory.tidy = 0;
}

struct attachment *attachment_free(struct attachment *a, bool died) {
        if (!a)
                return NULL;
        if (a->state == ATTACHED)
                a->posts_left = attachment_posts(a);
        end(a, died);
        begin_to_clear_up(a);
        return NULL;
}

/*
 * The space is being deleted: its blocks are freed with it, and requests to workers are withdrawn.
 * Or it is left to the next daemon, and so is all that the attachments have.
 */
void attachments_end(struct space *space) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));) {
                a->posts_left = 0;
                if (a->state == FOLDING)
                        continue;
                if (a->gone)
                        a->gone(a);
                while (!space->memory.left && hooks_attachment_stops(a))
                        ;
                end(a, false);
                a->stopping = true; /* the rest is done when the space is buried */
        }
}

/* Called when an allocation finds no free block. */
bool attachments_give(struct space *space) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));) {
                if (a->state != FOLDING || a->posts_left || a->stopping || !a->filling.n)
                        continue;
                discard(a, AT_ONCE);
                return true;
        }
        return false;
}

/* ---- what was written ------------------------------------------------------------------------ */

/* Skips groups that the client never used. */
uint32_t attachment_words_from(const struct attachment *a, uint32_t id) {
        uint32_t capacity = a->space->ix->capacity, first = id / KVD_GROUP_IDS;

        for (uint32_t word = first / 64; word * UINT64_C(64) * KVD_GROUP_IDS < capacity; word++) {
                uint64_t bits = atomic_load_explicit(&a->groups[word], memory_order_relaxed);

                if (word == first / 64)
                        bits &= UINT64_MAX << first % 64;
                if (bits) {
                        first = word * 64 + (uint32_t)__builtin_ctzll(bits);
                        return MIN(MAX(id, first * KVD_GROUP_IDS), capacity);
                }
        }
        return capacity;
}

/* ---- folding --------------------------------------------------------------------------------- */

#define FOLD_LOOKS 16384u /* maximum number of touch words read in one call */
#define FOLD_WARMS 512u   /* ... and of those that are not 0 */

static bool fold_piece(struct attachment *a) {
        struct space *space = a->space;
        uint32_t ids = space_ids(space), warms = FOLD_WARMS / (1 + evict_effort(space)), end;

        if (!space_lives(space) || a->fold >= ids)
                return false;
        a->fold = attachment_words_from(a, a->fold);
        end = MIN(a->fold + FOLD_LOOKS, ids);
        for (; a->fold < end && warms; a->fold++) {
                if (a->fold % KVD_GROUP_IDS == 0)
                        a->fold = attachment_words_from(a, a->fold);
                if (a->fold < end && space->blocks[a->fold].state == KVD_SEALED &&
                    atomic_load_explicit(&a->words[a->fold].touch, memory_order_relaxed)) {
                        block_warm(a, a->fold);
                        warms--;
                }
        }
        return true;
}

#define GIVE_BACK (UINT64_C(2) << 20) /* bytes of a pin page freed in one call */

static bool give_back_piece(struct attachment *a) {
        uint64_t n = MIN(a->pin_file.bytes - a->given_back, GIVE_BACK);

        if (a->pin_file.bytes <= GIVE_BACK || !n || a->space->memory.left)
                return false;
        sys->fallocate(a->pin_file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                       (off_t)a->given_back, (off_t)n);
        a->given_back += n;
        return true;
}

/*
 * Idle work: cleans up after a client that ended, and copies some of its times of last use. True:
 * there may be more.
 */
bool attachment_fold(struct space *space) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));) {
                if (clear_up(a, PIECE))
                        return true;
                if (!has_ended(a) && (space_lives(space) || is_waking(a)))
                        continue;
                if (!fold_piece(a) && !give_back_piece(a))
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
        return kvd_pinpage_bytes(a->space->ix);
}

uint64_t attachment_filling(const struct attachment *a) {
        return a->filling.n;
}

uint64_t attachment_holds(const struct attachment *a) {
        uint64_t held = atomic_load_explicit(&a->page->held, memory_order_relaxed);

        return a->filling.n + MIN(held, a->space->ix->capacity);
}

uint64_t attachment_pinned(const struct attachment *a) {
        return a->pinned;
}

#define PINS_PIECE 16384u /* words read in one turn: 128 KiB */

uint32_t attachment_pins(const struct attachment *a, uint32_t *cursor, uint32_t *ret, uint32_t n) {
        uint32_t ids = space_ids(a->space), id = MIN(attachment_words_from(a, *cursor), ids),
                 end = id + MIN(ids - id, PINS_PIECE), found = 0;

        for (; id < end && found < n; id++) {
                if (id % KVD_GROUP_IDS == 0)
                        id = attachment_words_from(a, id);
                if (id < end && atomic_load_explicit(&a->words[id].pins, memory_order_relaxed))
                        ret[found++] = id;
        }
        *cursor = id < ids ? id : 0;
        return found;
}
