/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of exact copies: one memfd per space, a slot per block. A slot has memory from when a worker writes it until
 * it is freed (a hole is punched). What all spaces use of it, sketches included, is bounded by spill_bytes. Copies of
 * blocks that are resident again are kept while nobody needs the room.
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"
#include "store/sequence/sequence.h"

/* ---- budget ----------------------------------------------------------------------------------------------------- */

bool spill_charge(struct space *space, uint64_t bytes) {
        struct store *store = space_store(space);

        if (store->spill_used + bytes > store->config.spill_bytes)
                return false;
        store->spill_used += bytes;
        space->spill_bytes += bytes;
        return true;
}

void spill_discharge(struct space *space, uint64_t bytes) {
        space_store(space)->spill_used -= bytes;
        space->spill_bytes -= bytes;
}

static void make_room(struct space *space);

static bool has_room(const struct space *space) {
        const struct store *store = space_store(space);

        return space->n_free_spills && store->spill_used + space->ix->block_bytes <= store->config.spill_bytes;
}

/* ---- slots ------------------------------------------------------------------------------------------------------ */

/* Entry i says by how much it differs from the order at first, so that what calloc gives is right as it is. */
bool spill_has_room(struct space *space) {
        if (!has_room(space))
                make_room(space);
        return has_room(space);
}

uint32_t spill_alloc(struct space *space) {
        uint32_t i, slot;

        if (!spill_has_room(space) || !spill_charge(space, space->ix->block_bytes))
                return NONE;
        i = --space->n_free_spills;
        slot = space->free_spills[i] + (space->ix->spill_slots - 1 - i);
        space->spill_end = MAX(space->spill_end, slot + 1);
        return slot;
}

static void punch(struct space *space, uint64_t from, uint64_t n) {
        if (space->spill_fd >= 0)
                sys->fallocate(space->spill_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from, (off_t)n);
}

void spill_free(struct space *space, uint32_t slot) {
        uint64_t bytes = space->ix->block_bytes;
        uint32_t i = space->n_free_spills++;

        space->free_spills[i] = slot - (space->ix->spill_slots - 1 - i);
        punch(space, slot * bytes, bytes);
        spill_discharge(space, bytes);
}

uint32_t spill_free_at(const struct space *space, uint32_t i) {
        return space->free_spills[i] + (space->ix->spill_slots - 1 - i);
}

/* ---- copies of what is resident again ---------------------------------------------------------------------------- */

static bool is_clean(const struct entry *e) {
        return e->ref && e->spill != NONE && e->busy == IDLE && !(e->flags & KVD_ENTRY_APPROX);
}

#define RECLAIM_LOOKS 8192u /* entries of one call: about half a millisecond */
#define RECLAIM_COPIES 64u

/*
 * Gives up copies of entries that are resident again, a bounded number a call, and goes on where the last call stopped.
 * A whole round that finds none clears has_clean, until spill_clean says that there may be some.
 */
static void reclaim(struct space *space) {
        uint32_t given = 0, looks;

        for (looks = 0; looks < RECLAIM_LOOKS && given < RECLAIM_COPIES; looks++) {
                struct sequence *q = space->sequences[space->clean_sequence % KVD_MAX_SEQUENCES];

                if (!q || space->clean_entry >= q->n_entries) {
                        space->clean_sequence++;
                        space->clean_entry = 0;
                        continue;
                }
                if (is_clean(&q->entries[space->clean_entry])) {
                        entry_free_spill(q, &q->entries[space->clean_entry]);
                        given++;
                }
                space->clean_entry++;
        }
        space->clean_looks = given ? 0 : space->clean_looks + looks;
        if (space->clean_looks > space->n_entries + KVD_MAX_SEQUENCES)
                space->has_clean = false;
}

void spill_clean(struct space *space) {
        space->has_clean = true;
        space->clean_looks = 0;
}

/* The space's own first; what all spaces may use is all spaces' to give. */
static void make_room(struct space *space) {
        if (space->has_clean)
                reclaim(space);
        for (struct domain *d = space_store(space)->domains; d && space->n_free_spills; d = d->next)
                for (struct space *s = d->spaces; s; s = s->next) {
                        if (has_room(space))
                                return;
                        if (s != space && s->has_clean)
                                reclaim(s);
                }
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

int space_spill_fd(struct space *space, uint64_t *bytes) {
        _cleanup_(closep) int fd = -1;

        *bytes = ALIGN_UP(MAX(space->ix->spill_slots * space->ix->block_bytes, 1), 4096);
        if (space->spill_fd >= 0)
                return space->spill_fd;
        fd = sys->memfd_create("kvd-spill", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (fd < 0 || sys->fchmod(fd, 0600) < 0 || sys->ftruncate(fd, (off_t)*bytes) < 0 ||
            sys->add_seals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
                return store_refuse(space_store(space), -errno, "no memory for copies of space '%s'", space->name);
        space->spill_fd = STEAL_FD(fd);
        return space->spill_fd;
}

#define BURY_BYTES (UINT64_C(8) << 20)

/* A large memfd is not freed in an instant: piece by piece, from the end. */
bool spill_bury(struct space *space) {
        uint64_t end = space->spill_end * space->ix->block_bytes;
        uint64_t from = end > BURY_BYTES ? end - BURY_BYTES : 0;

        if (space->spill_fd < 0 || !space->spill_end)
                return false;
        space->spill_end = (uint32_t)(from / space->ix->block_bytes);
        from = space->spill_end * space->ix->block_bytes;
        punch(space, from, end - from);
        return true;
}

void spill_close(struct space *space) {
        closep(&space->spill_fd);
        closep(&space->summary_fd);
        closep(&space->summary_fd_ro);
        if (space->domain)
                spill_discharge(space, space->spill_bytes);
}
