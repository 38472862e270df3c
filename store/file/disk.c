/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The disk of the file tier: which request its process gets next, and how its answers are handled.
 * Urgent requests come first: superblocks, which erase, then reads that clients wait for,
 * then writes, which are made ahead of need.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/below/bring.h"
#include "store/below/place.h"
#include "store/cache/inside.h"
#include "store/file/file.h"

/* ---- on and off ------------------------------------------------------------------------------ */

static void lose_question(struct file *file) {
        if (file->disk.ready)
                store_disk_moved(file->store, NULL, NULL, 0);
}

void store_disk_off(struct store *store, const char *why) {
        struct file *file = store->file;
        struct file_disk *d = &file->disk;

        if (d->state == STORE_DISK_OFF)
                return;
        snprintf(d->count.why, sizeof d->count.why, "%s", why);
        d->state = STORE_DISK_OFF;
        d->hangs = false;
        file->catalog.off = true;
        lose_question(file);
        file->copies->miss(file);
        file_changes(file);
        fetches_miss(&file->below, NULL);
}

static void off(struct file *file, int error) {
        store_disk_off(file->store, head_why(error));
}

/* ---- opening --------------------------------------------------------------------------------- */

static int take_catalog(struct file *file) {
        const struct file_super *s = &file->head.super;
        uint64_t extent_bytes = file->head.extent_bytes;
        int r = catalog_open(&file->catalog, extent_bytes,
                             file_extents(file->head.bytes, extent_bytes));

        for (uint32_t i = 0; r == 0 && i < s->n_namespaces; i++) {
                int number = catalog_space(&file->catalog, s->namespaces[i].id, true);

                if (number >= 0)
                        file->catalog.spaces[number].epoch = s->namespaces[i].epoch;
        }
        return r;
}

/* The upper 24 bits of a sequence are the number of the opening. */
static int judge(struct file *file) {
        int r = head_judge(&file->head, 0);

        if (r == 0 && file->head.super.opening >> 24)
                r = kvd_refuse(&file->head.why, -EPROTO, "what the file says makes no sense");
        if (r == 0)
                r = take_catalog(file);
        if (r == 0)
                r = host_opened(file);
        if (r < 0 && !file->head.why.line[0])
                kvd_refuse(&file->head.why, r, "cannot set up the tier below the pool: %s",
                           strerror(-r));
        return r;
}

/* A new process has opened the file, which is known already. If it has changed, it is off. */
static void look_again(struct file *file, int error, const void *copies) {
        int r = error ?: head_see_again(&file->head, copies);

        file->disk.open = r == 0;
        if (r < 0)
                off(file, r);
        else
                file_want(file, true);
}

void store_disk_looked(struct store *store, int error, const void *copies, uint64_t bytes) {
        struct file *file = store->file;

        if (!error && bytes != FILE_COPIES * DISK_SECTOR)
                error = -EPROTO;
        if (file->disk.state == STORE_DISK_OFF)
                return;
        if (file->head.seen) {
                look_again(file, error, copies);
                return;
        }
        file->disk.open = error == 0;
        head_see(&file->head, error, copies);
        if (judge(file) < 0) {
                store_disk_off(store, file->head.why.line);
                return;
        }
        file->sequence = file_sequence_of(file->head.super.opening);
        file_erase(file);
        file_want(file, true);
}

/* ---- requests -------------------------------------------------------------------------------- */

/* It has the superblock, so that records of every namespace may be written. */
bool file_is_idle(const struct file *file) {
        const struct file_disk *d = &file->disk;

        return d->state == STORE_DISK_ON && !d->hangs && d->open && !d->asked && !d->ready &&
               d->told == file->head.super.serial;
}

void file_begin_question(struct file *file, enum store_disk_ask what, struct space *space) {
        struct store_disk_question *q = &file->disk.question;

        q->what = what;
        q->space = space;
        q->n = q->n_segments = 0;
        q->copies = false;
        q->checksums = file->host && what == STORE_DISK_READ;
}

bool file_question_is_full(const struct file *file) {
        const struct store_disk_question *q = &file->disk.question;
        const struct kvd_index *ix = space_index(q->space);

        return q->n == KVD_DISK_ITEMS || q->n_segments == KVD_DISK_FILES ||
               (q->n + 1) * ix->geometry.block_tokens > KVD_DISK_TOKENS ||
               (q->n &&
                (q->n + 1) * ix->block_bytes > (file->host ? STORE_CARRY_BYTES : KVD_DISK_BYTES));
}

void file_question_add(struct file *file, const struct store_disk_item *item) {
        struct store_disk_question *q = &file->disk.question;
        const struct kvd_index *ix = space_index(q->space);
        uint32_t segment = kvd_segment_of(ix, kvd_ref_id(item->block));
        bool new = true;

        for (uint32_t k = q->n; new &&k > 0; k--)
                new = kvd_segment_of(ix, kvd_ref_id(q->items[k - 1].block)) != segment;
        q->n_segments += new;
        q->items[q->n] = *item;
        if (!q->copies)
                host_add(file, &q->items[q->n]);
        q->n++;
}

void file_question_ready(struct file *file) {
        struct file_disk *d = &file->disk;

        d->asked_ns = sys_now_ns();
        d->asked = host_asks_first(file);
        d->ready = !d->asked;
        if (d->ready)
                file_want(file, true);
}

void file_is_ready(struct file *file) {
        file->disk.asked = false;
        file->disk.ready = true;
        file_want(file, true);
}

static void scan_next(struct file *file) {
        struct file_disk *d = &file->disk;

        file_begin_question(file, STORE_DISK_SCAN, NULL);
        d->question.extent = d->extent;
        d->question.first = d->slot;
        d->ready = true;
}

static void plan(struct file *file, bool *later) {
        struct file_disk *d = &file->disk;

        if (d->state == STORE_DISK_SCANNING)
                scan_next(file);
        if (d->state != STORE_DISK_ON)
                return;
        *later |= file_sweep_dead(file);
        if (!d->copies_last)
                file->copies->next(file, later);
        d->copies_last &= d->ready; /* blocks have their turn now */
        if (file_is_idle(file))
                below_next(&file->below, later);
        file->copies->next(file, later);
        if (!d->ready && !d->asked)
                *later |= host_shrinks(file);
}

static const struct store_disk_question *tell(struct file *file) {
        struct file_disk *d = &file->disk;

        head_tell(&file->head, &file->super);
        file->tell = (struct store_disk_question){.what = STORE_DISK_SUPER,
                                                  .super = &file->super,
                                                  .super_bytes = sizeof file->super};
        d->telling = file->head.super.serial;
        d->asked = true;
        return &file->tell;
}

/* A request that is ready was made when the disk had the superblock that it needs. */
const struct store_disk_question *store_disk_next(struct store *store, bool *later) {
        struct file *file = store->file;
        struct file_disk *d = &file->disk;

        *later = false;
        if (d->asked || !d->open || d->state == STORE_DISK_OFF)
                return NULL;
        if (!d->ready && d->told == file->head.super.serial)
                plan(file, later);
        if (d->asked)
                return NULL;
        if (d->told != file->head.super.serial)
                return tell(file);
        if (!d->ready)
                return NULL;
        d->ready = false;
        d->asked = true;
        if (!file->host)
                d->asked_ns = sys_now_ns();
        return &d->question;
}

/* ---- answers --------------------------------------------------------------------------------- */

/* The process answered, so it does not hang (any more). */
static void heard(struct file *file) {
        if (!file->disk.hangs)
                return;
        file->disk.hangs = file->catalog.hangs = false;
        file_changes(file);
}

void store_disk_told(struct store *store, int error) {
        struct file *file = store->file;
        struct file_disk *d = &file->disk;

        d->asked = false;
        if (error == -EAGAIN) {
                d->telling = 0;
                return;
        }
        if (error) {
                file_count_error(&d->count, error);
                off(file, error);
                return;
        }
        d->told = d->telling;
        d->telling = 0;
        file->head.told = true;
        if (d->state == STORE_DISK_OPENING)
                d->state = STORE_DISK_SCANNING;
        heard(file);
        file_erase(file);
        file_want(file, true);
}

/* The process answers for an extent; records that are said to lie elsewhere are ignored. */
static void take_all_found(struct file *file, uint32_t slot_bytes,
                           const struct kvd_disk_found *found, uint32_t n) {
        for (uint32_t k = 0; k < n; k++)
                if (found[k].place / FILE_SLOTS == file->disk.extent)
                        catalog_found(&file->catalog, slot_bytes, &found[k]);
}

void store_disk_scanned(struct store *store, int error, uint32_t slot_bytes,
                        const struct kvd_disk_found *found, uint32_t n) {
        struct file *file = store->file;
        const struct catalog *c = &file->catalog;
        struct file_disk *d = &file->disk;

        d->asked = false;
        file_count_error(&d->count, error);
        if (!error)
                take_all_found(file, slot_bytes, found, n);
        d->slot += KVD_DISK_FOUND;
        if (!error && d->slot < (slot_bytes ? file_slots(c->extent_bytes, slot_bytes) : 0))
                return;
        d->slot = 0;
        d->extent++;
        if (d->extent < c->n_extents || d->state != STORE_DISK_SCANNING)
                return;
        d->state = STORE_DISK_ON;
        file_changes(file);
}

#define MOST_FAILING 8u

/* A single bad extent does not matter. A file that keeps failing, or is mostly bad, is off. */
static void judge_disk(struct file *file, int error) {
        const struct catalog *c = &file->catalog;
        struct file_count *count = &file->disk.count;

        count->failing = error ? count->failing + 1 : 0;
        if (error && (count->failing >= MOST_FAILING || c->n_bad > c->n_extents / 2))
                off(file, error);
}

/* A request counts as failed if all of its items failed. */
static void judge_answer(struct file *file, const int32_t *errors, uint32_t n) {
        int error = 0;

        for (uint32_t k = 0; k < n; k++) {
                if (!errors[k] || errors[k] == -EBADMSG) {
                        judge_disk(file, 0);
                        return;
                }
                error = errors[k];
        }
        if (error)
                judge_disk(file, error);
}

static void settle(struct file *file, const int32_t *errors, uint32_t n) {
        struct file_disk *d = &file->disk;
        bool reads = d->question.what == STORE_DISK_READ;

        d->asked = d->ready = false;
        *(reads ? &d->read_ns : &d->write_ns) += sys_now_ns() - d->asked_ns;
        if (d->question.copies)
                file->copies->done(file, errors, n);
        else if (reads)
                bring_done(&file->below, errors, n);
        else
                file_written(file, errors, n);
}

void file_settle(struct file *file, const int32_t *errors, uint32_t n) {
        settle(file, errors, n);
        file->disk.question.n = 0;
}

static void moved(struct file *file, const int32_t *errors, const uint64_t *checksums, uint32_t n) {
        uint32_t asked = MIN(n, file->disk.question.n);

        if (!host_asks_then(file, errors, checksums, n))
                file_settle(file, errors, n);
        judge_answer(file, errors, asked);
}

void store_disk_moved(struct store *store, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n) {
        heard(store->file);
        moved(store->file, errors, checksums, n);
}

/* ---- no answer ------------------------------------------------------------------------------- */

void store_disk_slow(struct store *store) {
        struct file *file = store->file;
        struct file_disk *d = &file->disk;

        if (d->state != STORE_DISK_ON || d->hangs)
                return;
        d->hangs = file->catalog.hangs = true;
        fetches_miss(&file->below, file->below.reading);
        file_changes(file);
}

/* A file that was never opened is off. */
void store_disk_hangs(struct store *store) {
        struct file *file = store->file;

        if (!file->head.seen) {
                store_disk_looked(store, -ETIMEDOUT, NULL, 0);
                return;
        }
        if (file->disk.state == STORE_DISK_OFF)
                return;
        file->disk.hangs = file->catalog.hangs = true;
        fetches_miss(&file->below, NULL);
        file->copies->miss(file);
        file_changes(file);
        file_want(file, true);
}

void store_disk_lost(struct store *store) {
        struct file *file = store->file;
        struct file_disk *d = &file->disk;

        d->open = false;
        d->told = 0;
        if (!d->asked || host_has_question(file))
                return;
        file_count_error(&d->count, -ECANCELED);
        if (d->telling)
                d->telling = d->asked = 0;
        else if (d->question.what == STORE_DISK_SCAN)
                store_disk_scanned(store, -EIO, 0, NULL, 0);
        else
                moved(file, NULL, NULL, 0);
        file_want(file, true);
}

/* ---- where the data of a request is ---------------------------------------------------------- */

int store_disk_memory(struct store *store, uint32_t item, uint64_t *offset) {
        const struct store_disk_question *q = &store->file->disk.question;

        if (q->copies)
                return place_memory(q->space, q->items[item].copy, offset);
        return carry_memory(store->file->below.carry, item, q->space, q->items[item].block, offset);
}
