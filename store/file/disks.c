/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The disks of the file tier: which request each disk process gets next, and how its answers are
 * handled. Urgent requests come first: superblocks, which erase, then reads that clients wait for,
 * then writes, which are made ahead of need.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/cache/inside.h"
#include "store/file/file.h"
#include "store/tier/tier.h"

/* ---- on and off ------------------------------------------------------------------------------ */

/* The tier is not on before all files that may have records are scanned. */
static bool is_waited_for(const struct file *file, uint32_t i) {
        const struct file_disk *d = &file->disks[i];

        return (d->state == STORE_DISK_OPENING || d->state == STORE_DISK_SCANNING) && !d->hangs &&
               file->set.files[i].state == SET_FOUND;
}

static void try_on(struct file *file) {
        bool on = false;

        if (file->state != STORE_DISK_SCANNING)
                return;
        for (uint32_t i = 0; i < file->config.n_files; i++) {
                if (is_waited_for(file, i))
                        return;
                on = on || file->disks[i].state == STORE_DISK_ON;
        }
        if (on)
                file->state = STORE_DISK_ON;
        if (on)
                file_changes(file);
}

static void lose_question(struct file *file, uint32_t i) {
        if (file->disks[i].ready)
                store_disk_moved(file->store, i, NULL, NULL, 0);
}

void store_disk_off(struct store *store, const char *why) {
        struct file *file = store->file;

        if (file->state == STORE_DISK_OFF)
                return;
        snprintf(file->info.why, sizeof file->info.why, "%s", why);
        file->state = STORE_DISK_OFF;
        for (uint32_t i = 0; i < file->config.n_files; i++) {
                file->disks[i].state = STORE_DISK_OFF;
                file->disks[i].hangs = false;
                file->catalog.files[i].off = true;
                lose_question(file, i);
                file->copies->miss(file, i);
        }
        file_changes(file);
        fetches_end(file, NULL, NULL);
}

static bool is_any_used(const struct file *file) {
        for (uint32_t i = 0; i < file->config.n_files; i++)
                if (file->disks[i].state != STORE_DISK_OFF)
                        return true;
        return false;
}

static void look_at_set(struct file *file);

/* Its records are missed and dropped a piece at a time; blocks can be written to other files. */
void store_disk_file_off(struct store *store, uint32_t i, const char *why) {
        struct file *file = store->file;
        struct file_disk *d = &file->disks[i];

        if (d->state == STORE_DISK_OFF)
                return;
        snprintf(d->count.why, sizeof d->count.why, "%s", why);
        d->state = STORE_DISK_OFF;
        d->hangs = false;
        file->catalog.files[i].off = true;
        lose_question(file, i);
        if (!is_any_used(file)) {
                store_disk_off(store, why);
                return;
        }
        if (!file->set.files[i].seen) {
                set_see(&file->set, i, -EIO, NULL);
                look_at_set(file);
                return;
        }
        file->sweep = 0;
        fetches_miss(file, i, NULL);
        file->copies->miss(file, i);
        file_changes(file);
        file_erase(file);
        try_on(file);
        file_want(file, true);
}

static void file_off(struct file *file, uint32_t i, int error) {
        store_disk_file_off(file->store, i, set_why(error));
}

/* ---- opening --------------------------------------------------------------------------------- */

static int take_catalog(struct file *file) {
        struct catalog_size sizes[DISK_FILES] = {0};
        const struct file_super *s = &file->set.super;
        int r;

        for (uint32_t i = 0; i < file->set.n_files; i++) {
                const struct set_file *f = &file->set.files[i];

                if (!f->error)
                        sizes[i] = (struct catalog_size){f->extent_bytes,
                                                         file_extents(f->bytes, f->extent_bytes)};
        }
        r = catalog_open(&file->catalog, sizes, file->set.n_files);
        for (uint32_t i = 0; r == 0 && i < s->n_namespaces; i++) {
                int number = catalog_space(&file->catalog, s->namespaces[i].id, true);

                if (number >= 0)
                        file->catalog.spaces[number].epoch = s->namespaces[i].epoch;
                if (number >= 0)
                        file->catalog.spaces[number].serial = s->serial;
        }
        return r;
}

/* The upper 24 bits of a sequence are the number of the opening. */
static int judge(struct file *file) {
        int r = set_judge(&file->set, 0);

        if (r == 0 && file->set.super.opening >> 24)
                r = kvd_refuse(&file->set.why, -EPROTO, "what the file says makes no sense");
        if (r == 0)
                r = take_catalog(file);
        if (r == 0)
                r = host_opened(file);
        if (r < 0 && !file->set.why.line[0])
                kvd_refuse(&file->set.why, r, "cannot set up the tier below the pool: %s",
                           strerror(-r));
        return r;
}

static void look_at_set(struct file *file) {
        int r;

        if (!set_is_seen(&file->set))
                return;
        file->set.why.line[0] = 0;
        r = judge(file);
        for (uint32_t i = 0; i < file->set.n_files; i++)
                if (file->set.files[i].error)
                        file_off(file, i, file->set.files[i].error);
        if (r < 0) {
                store_disk_off(file->store, file->set.why.line);
                return;
        }
        file->sequence = file_sequence_of(file->set.super.opening);
        file->state = STORE_DISK_SCANNING;
        file_erase(file);
        file_want(file, true);
}

/* A new process has opened the file, which is known already. If it has changed, it is off. */
static void look_again(struct file *file, uint32_t i, int error, const void *copies) {
        int r = error ?: set_see_again(&file->set, i, copies);

        file->disks[i].open = r == 0;
        if (r < 0)
                file_off(file, i, r);
        else
                file_want(file, true);
}

void store_disk_looked(struct store *store, uint32_t i, int error, const void *copies,
                       uint64_t bytes) {
        struct file *file = store->file;

        if (!error && bytes != FILE_COPIES * DISK_SECTOR)
                error = -EPROTO;
        if (file->state == STORE_DISK_OFF || file->disks[i].state == STORE_DISK_OFF)
                return;
        if (file->set.files[i].seen) {
                look_again(file, i, error, copies);
                return;
        }
        file->disks[i].open = error == 0;
        set_see(&file->set, i, error, copies);
        look_at_set(file);
}

/* ---- requests -------------------------------------------------------------------------------- */

bool file_is_idle(const struct file *file, uint32_t i) {
        const struct file_disk *d = &file->disks[i];

        return d->state == STORE_DISK_ON && !d->hangs && d->open && !d->asked && !d->ready &&
               d->told == file->set.super.serial;
}

bool file_any_idle(const struct file *file) {
        for (uint32_t i = 0; i < file->config.n_files; i++)
                if (file_is_idle(file, i))
                        return true;
        return false;
}

void file_begin_question(struct file *file, uint32_t i, enum store_disk_ask what,
                         struct space *space) {
        struct store_disk_question *q = &file->disks[i].question;

        q->what = what;
        q->space = space;
        q->n = q->n_segments = 0;
        q->copies = false;
        q->checksums = file->host && what == STORE_DISK_READ;
}

/* The files below a pool on a GPU share STORE_CARRY_BYTES of host memory. */
static uint64_t most_bytes(const struct file *file) {
        return file->host ? STORE_CARRY_BYTES / file->config.n_files : KVD_DISK_BYTES;
}

bool file_question_is_full(const struct file *file, uint32_t i) {
        const struct store_disk_question *q = &file->disks[i].question;
        const struct kvd_index *ix = space_index(q->space);

        return q->n == KVD_DISK_ITEMS || q->n_segments == KVD_DISK_FILES ||
               (q->n + 1) * ix->geometry.block_tokens > KVD_DISK_TOKENS ||
               (q->n && (q->n + 1) * ix->block_bytes > most_bytes(file));
}

void file_question_add(struct file *file, uint32_t i, const struct store_disk_item *item) {
        struct store_disk_question *q = &file->disks[i].question;
        const struct kvd_index *ix = space_index(q->space);
        uint32_t segment = kvd_segment_of(ix, kvd_ref_id(item->block));
        bool new = true;

        for (uint32_t k = q->n; new &&k > 0; k--)
                new = kvd_segment_of(ix, kvd_ref_id(q->items[k - 1].block)) != segment;
        q->n_segments += new;
        q->items[q->n] = *item;
        if (!q->copies)
                host_add(file, i, &q->items[q->n]);
        q->n++;
}

void file_question_ready(struct file *file, uint32_t i) {
        struct file_disk *d = &file->disks[i];

        d->asked_ns = sys_now_ns();
        d->asked = host_asks_first(file, i);
        d->ready = !d->asked;
        if (d->ready)
                file_want(file, true);
}

void file_is_ready(struct file *file, uint32_t i) {
        file->disks[i].asked = false;
        file->disks[i].ready = true;
        file_want(file, true);
}

static void scan_next(struct file *file, uint32_t i) {
        struct file_disk *d = &file->disks[i];

        file_begin_question(file, i, STORE_DISK_SCAN, NULL);
        d->question.extent = d->extent;
        d->question.first = d->slot;
        d->ready = true;
}

static void plan(struct file *file, uint32_t i, bool *later) {
        struct file_disk *d = &file->disks[i];

        if (d->state == STORE_DISK_SCANNING)
                scan_next(file, i);
        if (d->state != STORE_DISK_ON || file->state != STORE_DISK_ON)
                return;
        *later |= file_sweep_dead(file);
        if (!d->copies_last)
                file->copies->next(file, i, later);
        d->copies_last &= d->ready; /* blocks have their turn now */
        if (d->reads_in_a_row >= BRING_IN_A_ROW) {
                d->reads_in_a_row = 0;
                demote_next(file, later);
        }
        if (fetch_next(file, later))
                demote_next(file, later);
        file->copies->next(file, i, later);
        if (!d->ready && !d->asked)
                *later |= host_shrinks(file, i);
}

static const struct store_disk_question *tell(struct file *file, uint32_t i) {
        struct file_disk *d = &file->disks[i];

        set_tell(&file->set, i, &file->super);
        file->tell = (struct store_disk_question){.what = STORE_DISK_SUPER,
                                                  .super = &file->super,
                                                  .super_bytes = sizeof file->super};
        d->telling = file->set.super.serial;
        d->asked = true;
        return &file->tell;
}

/* A request that is ready was made when the disk had the superblock that it needs. */
const struct store_disk_question *store_disk_next(struct store *store, uint32_t i, bool *later) {
        struct file *file = store->file;
        struct file_disk *d = &file->disks[i];

        *later = false;
        if (d->asked || !d->open || d->state == STORE_DISK_OFF || file->state == STORE_DISK_OPENING)
                return NULL;
        if (!d->ready && d->told == file->set.super.serial)
                plan(file, i, later);
        if (d->asked)
                return NULL;
        if (d->told != file->set.super.serial)
                return tell(file, i);
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
static void heard(struct file *file, uint32_t i) {
        if (!file->disks[i].hangs)
                return;
        file->disks[i].hangs = file->catalog.files[i].hangs = false;
        file_changes(file);
}

void store_disk_told(struct store *store, uint32_t i, int error) {
        struct file *file = store->file;
        struct file_disk *d = &file->disks[i];

        d->asked = false;
        if (error == -EAGAIN) {
                d->telling = 0;
                return;
        }
        if (error) {
                file_count_error(&d->count, error);
                file_off(file, i, error);
                return;
        }
        d->told = d->telling;
        d->telling = 0;
        file->set.files[i].told = true;
        if (d->state == STORE_DISK_OPENING)
                d->state = STORE_DISK_SCANNING;
        heard(file, i);
        file_erase(file);
        file_want(file, true); /* other disks may have waited for it */
}

/* Converts its place to one in the catalog. False: it is not in the extent that begins at begin. */
static bool take_found(struct catalog *c, uint64_t begin, const struct kvd_disk_found *found,
                       struct kvd_disk_found *ret) {
        uint64_t first = catalog_file(c, begin)->first * (uint64_t)FILE_SLOTS;

        *ret = *found;
        ret->place += first;
        return found->place < c->n_extents * (uint64_t)FILE_SLOTS &&
               ret->place / FILE_SLOTS == begin / FILE_SLOTS;
}

static void take_all_found(struct file *file, uint32_t i, uint32_t slot_bytes,
                           const struct kvd_disk_found *found, uint32_t n) {
        struct catalog *c = &file->catalog;
        uint64_t begin = (c->files[i].first + file->disks[i].extent) * (uint64_t)FILE_SLOTS;
        struct kvd_disk_found at;

        for (uint32_t k = 0; k < n; k++)
                if (take_found(c, begin, &found[k], &at))
                        catalog_found(c, slot_bytes, &at);
}

void store_disk_scanned(struct store *store, uint32_t i, int error, uint32_t slot_bytes,
                        const struct kvd_disk_found *found, uint32_t n) {
        struct file *file = store->file;
        const struct catalog_file *f = &file->catalog.files[i];
        struct file_disk *d = &file->disks[i];

        d->asked = false;
        file_count_error(&d->count, error);
        if (!error)
                take_all_found(file, i, slot_bytes, found, n);
        d->slot += KVD_DISK_FOUND;
        if (!error && d->slot < (slot_bytes ? file_slots(f->extent_bytes, slot_bytes) : 0))
                return;
        d->slot = 0;
        d->extent++;
        if (d->extent < f->n_extents || d->state != STORE_DISK_SCANNING)
                return;
        d->state = STORE_DISK_ON;
        file_changes(file);
        try_on(file);
}

#define MOST_FAILING 8u

/* A single bad extent does not matter. A file that keeps failing, or is mostly bad, is off. */
static void judge_disk(struct file *file, uint32_t i, int error) {
        const struct catalog_file *f = &file->catalog.files[i];
        struct file_count *count = &file->disks[i].count;

        count->failing = error ? count->failing + 1 : 0;
        if (error && (count->failing >= MOST_FAILING || f->n_bad > f->n_extents / 2))
                file_off(file, i, error);
}

/* A request counts as failed if all of its items failed. */
static void judge_answer(struct file *file, uint32_t i, const int32_t *errors, uint32_t n) {
        int error = 0;

        for (uint32_t k = 0; k < n; k++) {
                if (!errors[k] || errors[k] == -EBADMSG) {
                        judge_disk(file, i, 0);
                        return;
                }
                error = errors[k];
        }
        if (error)
                judge_disk(file, i, error);
}

static void settle(struct file *file, uint32_t i, const int32_t *errors, uint32_t n) {
        struct file_disk *d = &file->disks[i];
        bool reads = d->question.what == STORE_DISK_READ;

        d->asked = d->ready = false;
        *(reads ? &d->read_ns : &d->write_ns) += sys_now_ns() - d->asked_ns;
        if (d->question.copies)
                file->copies->done(file, i, errors, n);
        else if (reads)
                fetch_done(file, i, errors, n);
        else
                demote_done(file, i, errors, n);
}

void file_settle(struct file *file, uint32_t i, const int32_t *errors, uint32_t n) {
        settle(file, i, errors, n);
        file->disks[i].question.n = 0;
}

static void moved(struct file *file, uint32_t i, const int32_t *errors, const uint64_t *checksums,
                  uint32_t n) {
        uint32_t asked = MIN(n, file->disks[i].question.n);

        if (!host_asks_then(file, i, errors, checksums, n))
                file_settle(file, i, errors, n);
        judge_answer(file, i, errors, asked);
}

void store_disk_moved(struct store *store, uint32_t i, const int32_t *errors,
                      const uint64_t *checksums, uint32_t n) {
        heard(store->file, i);
        moved(store->file, i, errors, checksums, n);
}

/* ---- no answer ------------------------------------------------------------------------------- */

void store_disk_slow(struct store *store, uint32_t i) {
        struct file *file = store->file;
        struct file_disk *d = &file->disks[i];

        if (d->state != STORE_DISK_ON || d->hangs)
                return;
        d->hangs = file->catalog.files[i].hangs = true;
        fetches_miss(file, i, d->reading);
        file_changes(file);
}

/* A file that was never opened is off, so that the others can be judged without it. */
void store_disk_hangs(struct store *store, uint32_t i) {
        struct file *file = store->file;

        if (!file->set.files[i].seen) {
                store_disk_looked(store, i, -ETIMEDOUT, NULL, 0);
                return;
        }
        if (file->disks[i].state == STORE_DISK_OFF)
                return;
        file->disks[i].hangs = file->catalog.files[i].hangs = true;
        fetches_miss(file, i, NULL);
        file->copies->miss(file, i);
        file_changes(file);
        try_on(file);
        file_want(file, true);
}

void store_disk_lost(struct store *store, uint32_t i) {
        struct file *file = store->file;
        struct file_disk *d = &file->disks[i];

        d->open = false;
        d->told = 0;
        if (!d->asked || host_has_question(file, i))
                return;
        file_count_error(&d->count, -ECANCELED);
        if (d->telling)
                d->telling = d->asked = 0;
        else if (d->question.what == STORE_DISK_SCAN)
                store_disk_scanned(store, i, -EIO, 0, NULL, 0);
        else
                moved(file, i, NULL, NULL, 0);
        file_want(file, true);
}

/* ---- where the data of a request is ---------------------------------------------------------- */

uint64_t store_disk_place(const struct store *store, uint64_t place) {
        const struct catalog *c = &store->file->catalog;

        return place - c->files[catalog_file_of(c, place)].first * (uint64_t)FILE_SLOTS;
}

int store_disk_memory(struct store *store, uint32_t i, uint32_t item, uint64_t *offset) {
        const struct store_disk_question *q = &store->file->disks[i].question;

        if (q->copies)
                return place_memory(q->space, q->items[item].copy, offset);
        return carry_memory(host_carry(store->file, i), item, q->space, q->items[item].block,
                            offset);
}
