/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The file tier's life: what the disk process is asked next, and what becomes of its answers. What
 * is urgent comes first: erasing, then what somebody waits for, then what is written ahead.
 */

#include "store/file/file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/hash.h"
#include "ipc/base/sys.h"
#include "ipc/base/tier.h"
#include "store/cache/memory.h"
#include "store/hooks.h"

/* ---- life ------------------------------------------------------------------------------------ */

static int make_fetches(struct file *file) {
        file->all_fetches = sys->calloc(FETCHES, sizeof *file->all_fetches);
        if (!file->all_fetches)
                return store_refuse(file->store, -ENOMEM, "out of memory for the file");
        for (uint32_t i = 0; i < FETCHES; i++) {
                file->all_fetches[i].file = file;
                file->all_fetches[i].to.fd = -1;
        }
        return 0;
}

int store_disk_begin(struct store *store, const struct store_disk_config *config) {
        bool on_gpu = store->config.backend != KVD_BACKEND_HOST;
        struct file *file;
        int r;

        if (!config->n_files && !config->host)
                return 0;
        if (config->host && !on_gpu)
                return store_refuse(store, -EOPNOTSUPP,
                                    "host_tier is for pools on a GPU; unset it");
        file = store->file = sys->calloc(1, sizeof *file);
        if (!file)
                return store_refuse(store, -ENOMEM, "out of memory for the file");
        file->store = store;
        file->config = *config;
        file->state = STORE_DISK_OPENING;
        r = make_fetches(file);
        return r < 0 || !on_gpu ? r : host_begin(file);
}

/* The files themselves stay as they are. */
static void store_ends(struct store *store) {
        struct file *file = STEAL(store->file);

        if (!file)
                return;
        file->host = host_free(file->host);
        catalog_close(&file->catalog);
        for (uint32_t i = 0; file->all_fetches && i < FETCHES; i++)
                closep(&file->all_fetches[i].to.fd);
        free(file->all_fetches);
        free(file);
}

void store_on_disk(struct store *store, void (*called)(void *data, bool soon), void *data) {
        if (!store->file)
                return;
        store->file->wanted = called;
        store->file->data = data;
}

void file_want(struct file *file, bool soon) {
        if (file->wanted && file->state != STORE_DISK_OFF)
                file->wanted(file->data, soon);
}

/* Clients ask for what is below while it can come. */
static void tell_below(struct space *space) {
        space_set_below(space, KVD_BELOW_FILE, file_for(space));
        space_set_below(space, KVD_BELOW_UNTOLD,
                        file_for(space) && file_space_of(space)->told != CATALOG_NOWHERE);
}

/* It has come, or gone: what was put off is looked at. */
static void look_at_all(struct file *file) {
        for (uint32_t number = 0;; number++) {
                struct space *space = store_next_space(file->store, number);

                if (!space)
                        return;
                number = space_number(space);
                file_space_of(space)->changes = UINT64_MAX; /* a file may have gone */
                tell_below(space);
                space_is_busy(space);
        }
}

void store_disk_off(struct store *store, const char *why) {
        struct file *file = store->file;

        if (file->state == STORE_DISK_OFF)
                return;
        snprintf(file->info.why, sizeof file->info.why, "%s", why);
        file->state = STORE_DISK_OFF;
        look_at_all(file);
        fetches_end_all(file, file->asked);
        if (file->ready)
                store_disk_moved(store, NULL, NULL, 0);
}

/* What it had is missed, and goes to others; its records are dropped a piece at a time. */
static void file_off(struct file *file, uint32_t number, int error) {
        struct catalog_file *f = &file->catalog.files[number];
        struct file_count *count = &file->counts[number];

        if (f->off)
                return;
        f->off = true;
        snprintf(count->why, sizeof count->why, "%s", volume_file_why(error));
        if (store_disk_files_off(file->store) == file->config.n_files) {
                store_disk_off(file->store, count->why);
                return;
        }
        file->sweep = 0;
        look_at_all(file);
}

void store_disk_files(struct store *store, const struct kvd_disk_file *files, uint32_t n) {
        for (uint32_t i = 0; i < MIN(n, store->file->catalog.n_files); i++)
                if (files[i].error)
                        file_off(store->file, i, files[i].error);
}

static int take_catalog(struct file *file, const struct store_disk_opened *o) {
        int r = catalog_open(&file->catalog, o->files, o->n_files);

        for (uint32_t i = 0; r == 0 && i < MIN(o->n_namespaces, FILE_NAMESPACES); i++) {
                int number = catalog_space(&file->catalog, o->namespaces[i].id, true);

                if (number >= 0)
                        file->catalog.spaces[number].epoch = o->namespaces[i].epoch;
        }
        return r;
}

/* By another process: what is where is known already. A file that has changed is off. */
static int opened_again(struct file *file, const struct store_disk_opened *o) {
        if (memcmp(file->secret, o->secret, sizeof file->secret) != 0)
                return -ESTALE;
        for (uint32_t i = 0; i < o->n_files; i++)
                if (o->files[i].state != VOLUME_FOUND ||
                    o->files[i].extents != file->catalog.files[i].n_extents)
                        file_off(file, i, o->files[i].error ?: -ESTALE);
        file->sequence = MAX(file->sequence, file_sequence_of(o->opening));
        return 0;
}

static bool makes_sense(const struct file *file, const struct store_disk_opened *o) {
        uint64_t extents = 0;

        for (uint32_t i = 0; i < MIN(o->n_files, file->config.n_files); i++) {
                const struct kvd_disk_file *f = &o->files[i];

                extents += f->extents;
                if (f->extents > file->config.bytes[i] / DISK_SECTOR ||
                    (f->extents && f->extent_bytes <= DISK_SECTOR))
                        return false;
        }
        return o->n_files == file->config.n_files && extents <= UINT32_MAX / FILE_SLOTS &&
               o->opening < UINT64_C(1) << 24;
}

int store_disk_opened(struct store *store, const struct store_disk_opened *o) {
        struct file *file = store->file;
        int r;

        if (!makes_sense(file, o))
                return -EPROTO;
        if (file->state != STORE_DISK_OPENING)
                return opened_again(file, o);
        memcpy(file->secret, o->secret, sizeof file->secret);
        file->sequence = file_sequence_of(o->opening);
        r = take_catalog(file, o);
        if (r == 0)
                file->state = STORE_DISK_SCANNING;
        return r < 0 ? r : host_opened(file);
}

enum store_disk_state store_disk_state(const struct store *store) {
        const struct file *file = store->file;

        return !file                                       ? STORE_DISK_NONE :
               file->hangs && file->state == STORE_DISK_ON ? STORE_DISK_HANGS :
                                                             file->state;
}

uint32_t store_disk_n_files(const struct store *store) {
        return store->file ? store->file->config.n_files : 0;
}

uint32_t store_disk_files_off(const struct store *store) {
        uint32_t n = 0;

        if (store_disk_state(store) == STORE_DISK_OFF)
                return store->file->config.n_files;
        for (uint32_t i = 0; store->file && i < store->file->config.n_files; i++)
                n += store->file->catalog.files[i].off;
        return n;
}

static void get_counts(const struct file_count *count, struct store_disk_info *ret) {
        ret->hits = count->hits;
        ret->misses = count->misses;
        ret->wrong = count->wrong;
        ret->errors += count->errors;
        ret->read_bytes = count->read_bytes;
        ret->written_bytes = count->written_bytes;
        if (count->why[0])
                memcpy(ret->why, count->why, sizeof ret->why);
}

void store_disk_get_info(const struct store *store, uint32_t number, struct store_disk_info *ret) {
        const struct file *file = store->file;
        const struct catalog_file *f;

        *ret = (struct store_disk_info){0};
        if (!file || number >= file->config.n_files)
                return;
        f = &file->catalog.files[number];
        *ret = file->info;
        ret->state = f->off ? STORE_DISK_OFF : store_disk_state(store);
        memcpy(ret->name, file->config.names[number], sizeof ret->name);
        ret->bytes = file->config.bytes[number];
        ret->used = f->bytes;
        ret->records = f->records;
        ret->evicted = f->evicted;
        ret->age_ns = f->records ? catalog_age(&file->catalog) : 0;
        ret->extents = f->n_extents;
        ret->scanned = MIN(file->scan.extent - MIN(file->scan.extent, f->first), f->n_extents);
        get_counts(&file->counts[number], ret);
}

/* ---- spaces ---------------------------------------------------------------------------------- */

/* A hint for each block that the whole file has room for: all of it may be one space's. */
static void lay_out(const struct space *space, uint64_t max_blocks, struct kvd_index *ix) {
        const struct file *file = space_store(space)->file;

        if (file && ix->kind == KVD_kind_causal)
                ix->hint_slots = kvd_table_slots(file_bytes(file) /
                                                 file_slot_bytes(ix->block_bytes));
}

static int space_begins(struct space *space) {
        struct file_space *fs = space->parts.file = sys->calloc(1, sizeof *fs);

        if (!fs)
                return -ENOMEM;
        fs->number = -1;
        tell_below(space);
        return 0;
}

static void space_ends(struct space *space) {
        free(space->parts.file);
}

struct file *file_for(const struct space *space) {
        struct file *file = space_store(space)->file;
        bool right = file && file->state == STORE_DISK_ON && !file->hangs && space->ix->kind == KVD_kind_causal &&
                     !file_space_of(space)->refused && (!file->host || kvd_places(space->ix));

        return right ? file : NULL;
}

/* By its names and its geometry: blocks of another one are of no use to it. */
static void name_of(const struct space *space, struct file_name *ret) {
        memset(ret, 0, sizeof *ret);
        snprintf(ret->domain, sizeof ret->domain, "%s", space->domain->config.name);
        snprintf(ret->space, sizeof ret->space, "%s", space->name);
        memcpy(&ret->geometry, &space->ix->geometry, sizeof ret->geometry);
}

static struct kvd_key id_of(const struct file *file, const struct file_name *name) {
        return kvd_hash_best()(name, sizeof *name, file->secret);
}

static bool is_number_of(const struct file *file, int number, struct kvd_key id) {
        const struct catalog_namespace *n = &file->catalog.spaces[number];

        return n->used && !n->dead && kvd_key_equal(n->id, id);
}

int file_space_number(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        struct file_name name;

        if (!fs->named) {
                name_of(space, &name);
                fs->id = id_of(file, &name);
                fs->named = true;
        }
        if (fs->number >= 0 && is_number_of(file, fs->number, fs->id))
                return fs->number;
        fs->number = catalog_space(&file->catalog, fs->id, false);
        if (fs->number >= 0) {
                host_owns(file, fs->number, space);
                catalog_tell(&file->catalog, fs->number, space->ix);
                fs->told = file->catalog.spaces[fs->number].records ? 0 : CATALOG_NOWHERE;
                space_is_busy(space);
        }
        return fs->number;
}

uint32_t file_record_of(const struct file *file, const struct space *space, uint32_t id) {
        const struct block *b = &space->blocks[id];
        uint32_t place = b->record - 1;

        if (!b->record || file->catalog.entries[place].state == CATALOG_FREE ||
            catalog_is_off(&file->catalog, place) ||
            (uint32_t)file->catalog.entries[place].sequence != b->record_mark)
                return CATALOG_NOWHERE;
        return place;
}

void file_forget_stale(const struct file *file, struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        if (b->record && file_record_of(file, space, id) == CATALOG_NOWHERE)
                block_set_record(space, id, 0, 0, 0);
}

void file_note_record(struct space *space, uint32_t id, uint32_t place, uint64_t sequence) {
        block_set_record(space, id, place + 1, (uint32_t)sequence, file_handle(sequence));
}

/* What has changed is looked at when the disk has time. */
static void note_changes(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        uint64_t changes = carry_changes(host_carry(file), space);

        if (fs->changes == changes)
                return;
        fs->changes = changes;
        if (fs->all != ALL_UNDER_WAY)
                fs->looked = 0; /* that round comes to its end whatever changes */
        if (!fs->unswept)
                file_want(file, false);
        fs->unswept = true;
}

/* Its clients learn what the file had before. */
static bool tell_some(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        int number = file_space_number(file, space);

        if (fs->told == CATALOG_NOWHERE)
                return false;
        fs->told = number < 0 ? CATALOG_NOWHERE :
                                catalog_tell_some(&file->catalog, number, fs->told);
        tell_below(space);
        return fs->told != CATALOG_NOWHERE;
}

static bool idle(struct space *space) {
        struct file *file = file_for(space);

        if (!file)
                return false;
        note_changes(file, space);
        return tell_some(file, space);
}

static void attachment_ends(struct attachment *a) {
        if (space_store(a->space)->file)
                fetches_end(space_store(a->space)->file, a->space, a);
}

/* ---- erasing --------------------------------------------------------------------------------- */

static struct file_erasing *unused_erasing(struct file *file) {
        for (uint32_t i = 0; i < ERASING; i++)
                if (!file->erasing[i].wanted)
                        return &file->erasing[i];
        return NULL;
}

/*
 * The space was deleted, and the file is to forget it. What it has of it is found when the file is
 * open.
 */
static void space_leaves(struct space *space) {
        struct file *file = space_store(space)->file;
        struct file_erasing *e;

        if (!file)
                return;
        fetches_end(file, space, NULL);
        if (file_space_of(space)->number >= 0)
                catalog_tell(&file->catalog, file_space_of(space)->number, NULL);
        if (file->question.space == space)
                file->question.space = NULL;
        host_space_leaves(file, space);
        e = unused_erasing(file);
        if (!e) {
                store_disk_off(file->store, "too many spaces were deleted at once");
                return;
        }
        e->wanted = true;
        name_of(space, &e->name);
        file->n_erasing++;
        file_want(file, true);
}

bool store_disk_erasing(const struct store *store, const char *domain, const char *space) {
        const struct file *file = store->file;

        for (uint32_t i = 0; file && file->n_erasing && i < ERASING; i++)
                if (file->erasing[i].wanted && strcmp(file->erasing[i].name.domain, domain) == 0 &&
                    strcmp(file->erasing[i].name.space, space) == 0)
                        return true;
        return false;
}

/* What the file does not know it need not forget. */
static bool forget_one(struct file *file, struct file_erasing *e) {
        struct kvd_key id = id_of(file, &e->name);
        int number = e->begun ? e->number : catalog_space(&file->catalog, id, false);

        if (number < 0) {
                e->wanted = false;
                file->n_erasing--;
                return false;
        }
        file->catalog.spaces[number].dead = true;
        e->begun = true;
        e->number = number;
        file->naming = (int)(e - file->erasing);
        file->question.what = STORE_DISK_FORGET;
        file->question.id = id;
        return true;
}

static bool forget_next(struct file *file) {
        for (uint32_t i = 0; file->n_erasing && i < ERASING; i++)
                if (file->erasing[i].wanted && forget_one(file, &file->erasing[i]))
                        return true;
        return false;
}

#define SWEEP_LOOKS 4096u

/* Records of what was erased make room, a piece at a time. */
static bool sweep_dead(struct file *file) {
        struct catalog *c = &file->catalog;
        uint32_t end = (uint32_t)MIN((uint64_t)file->sweep + SWEEP_LOOKS,
                                     (uint64_t)c->n_extents * FILE_SLOTS);

        for (; file->sweep < end; file->sweep++) {
                const struct catalog_entry *e = &c->entries[file->sweep];

                if (!c->extents[file->sweep / FILE_SLOTS].slot_bytes)
                        file->sweep |= FILE_SLOTS - 1;
                else if (e->state == CATALOG_THERE && !e->busy &&
                         (c->spaces[e->space].dead || catalog_is_off(c, file->sweep)))
                        catalog_drop(c, file->sweep);
        }
        return file->sweep < c->n_extents * FILE_SLOTS;
}

void store_disk_forgotten(struct store *store, int error) {
        struct file *file = store->file;
        struct file_erasing *e = &file->erasing[file->naming];
        struct catalog_namespace *n = &file->catalog.spaces[e->number];

        file->asked = false;
        if (error) {
                store_disk_off(store, "what was deleted cannot be erased");
                return;
        }
        *e = (struct file_erasing){0};
        file->n_erasing--;
        file->sweep = 0;
        if (!n->records)
                *n = (struct catalog_namespace){0};
}

/* ---- questions ------------------------------------------------------------------------------- */

void file_begin_question(struct file *file, enum store_disk_ask what, struct space *space) {
        file->question.what = what;
        file->question.space = space;
        file->question.n = file->question.n_segments = 0;
        file->question.checksums = file->host && what == STORE_DISK_READ;
}

bool file_question_is_full(const struct file *file) {
        const struct kvd_index *ix = file->question.space->ix;
        uint32_t n = file->question.n;
        uint64_t most = file->host ? STORE_CARRY_BYTES : KVD_DISK_BYTES;

        return n == KVD_DISK_ITEMS || file->question.n_segments == KVD_DISK_FILES ||
               (n + 1) * ix->geometry.block_tokens > KVD_DISK_TOKENS ||
               (n && (n + 1) * ix->block_bytes > most);
}

void file_question_add(struct file *file, const struct store_disk_item *item) {
        struct store_disk_question *q = &file->question;
        const struct kvd_index *ix = q->space->ix;
        uint32_t segment = kvd_segment_of(ix, kvd_ref_id(item->block));
        bool new = true;

        for (uint32_t i = q->n; new && i > 0; i--)
                new = kvd_segment_of(ix, kvd_ref_id(q->items[i - 1].block)) != segment;
        q->n_segments += new;
        q->items[q->n] = *item;
        host_add(file, &q->items[q->n]);
        q->n++;
}

static bool scan_next(struct file *file) {
        file->question.file = file->catalog.extents[file->scan.extent].file;
        file->question.extent = file->scan.extent - file->catalog.files[file->question.file].first;
        file->question.first = file->scan.slot;
        return true;
}

static bool next(struct file *file, bool *later) {
        if (file->state == STORE_DISK_SCANNING)
                return forget_next(file) || scan_next(file);
        if (file->state != STORE_DISK_ON)
                return false;
        *later |= sweep_dead(file);
        return forget_next(file) || fetch_next(file, later) || demote_next(file, later);
}

/* NULL: there is none, or a worker has it first. */
static const struct store_disk_question *make_question(struct file *file, bool *later) {
        file_begin_question(file, STORE_DISK_SCAN, NULL);
        file->asked = next(file, later);
        file->asked_ns = sys_now_ns();
        if (!file->asked)
                *later |= host_shrinks(file);
        return file->asked && !host_asks_first(file) ? &file->question : NULL;
}

const struct store_disk_question *store_disk_next(struct store *store, bool *later) {
        struct file *file = store->file;

        *later = false;
        if (file->asked)
                return NULL;
        if (!file->ready)
                return make_question(file, later);
        file->ready = false;
        file->asked = true;
        return &file->question;
}

void file_is_ready(struct file *file) {
        file->asked = false;
        file->ready = true;
        file_want(file, true);
}

static void all_scanned(struct file *file) {
        file->state = STORE_DISK_ON;
        look_at_all(file);
}

/* With its place among all files'. False: that is not in the extent that begins there. */
static bool take_found(struct catalog *c, uint64_t begin, const struct kvd_disk_found *found,
                       struct kvd_disk_found *ret) {
        uint64_t first = catalog_file(c, begin)->first * (uint64_t)FILE_SLOTS;

        *ret = *found;
        ret->place += first;
        return found->place < c->n_extents * (uint64_t)FILE_SLOTS &&
               ret->place / FILE_SLOTS == begin / FILE_SLOTS;
}

void store_disk_scanned(struct store *store, int error, uint32_t slot_bytes,
                        const struct kvd_disk_found *found, uint32_t n) {
        struct file *file = store->file;
        struct catalog *c = &file->catalog;
        uint64_t place = (uint64_t)file->scan.extent * FILE_SLOTS;
        struct kvd_disk_found at;
        uint64_t bytes = catalog_file(c, place)->extent_bytes;
        uint32_t slots = slot_bytes ? file_slots(bytes, slot_bytes) : 0;

        file->asked = false;
        file_count(file, place)->errors += error != 0;
        for (uint32_t i = 0; !error && i < n; i++)
                if (take_found(c, place, &found[i], &at))
                        catalog_found(c, slot_bytes, &at);
        file->scan.slot += KVD_DISK_FOUND;
        if (!error && file->scan.slot < slots)
                return;
        file->scan.slot = 0;
        file->scan.extent++;
        if (file->scan.extent >= c->n_extents)
                all_scanned(file);
}

void store_disk_named(struct store *store, int error, uint64_t epoch) {
        struct file *file = store->file;
        struct catalog_namespace *n = &file->catalog.spaces[file->naming];

        file->asked = false;
        file->info.errors += error != 0;
        if (!error)
                n->epoch = epoch;
        else if (!n->dead)
                *n = (struct catalog_namespace){0};
        if (!error || !file->question.space)
                return;
        file_space_of(file->question.space)->refused = true;
        tell_below(file->question.space);
}

#define MOST_FAILING 8u

/* Where one extent is bad, others are not; a file that takes nothing any more is left alone. */
static void judge_file(struct file *file, uint32_t number, int error) {
        const struct catalog_file *f = &file->catalog.files[number];
        struct file_count *count = &file->counts[number];

        count->failing = error ? count->failing + 1 : 0;
        if (error && (count->failing >= MOST_FAILING || f->n_bad > f->n_extents / 2))
                file_off(file, number, error);
}

/* A file fails if all does that it was asked for. */
static void judge_disk(struct file *file, const int32_t *errors, uint32_t n) {
        const struct store_disk_item *items = file->question.items;
        bool asked[DISK_FILES] = {false}, did[DISK_FILES] = {false};
        int error[DISK_FILES] = {0};

        for (uint32_t i = 0; i < MIN(n, file->question.n); i++) {
                size_t number = (size_t)(file_count(file, items[i].place) - file->counts);

                asked[number] = true;
                if (!errors[i] || errors[i] == -EBADMSG)
                        did[number] = true;
                else
                        error[number] = errors[i];
        }
        for (uint32_t i = 0; i < file->catalog.n_files; i++)
                if (asked[i])
                        judge_file(file, i, did[i] ? 0 : error[i]);
}

static void settle(struct file *file, const int32_t *errors, uint32_t n) {
        bool reads = file->question.what == STORE_DISK_READ;

        file->asked = file->ready = false;
        *(reads ? &file->info.read_ns : &file->info.write_ns) += sys_now_ns() - file->asked_ns;
        if (reads)
                fetch_done(file, errors, n);
        else
                demote_done(file, errors, n);
}

void file_settle(struct file *file, const int32_t *errors, uint32_t n) {
        settle(file, errors, n);
        file->question.n = 0;
}

void store_disk_moved(struct store *store, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n) {
        struct file *file = store->file;
        bool goes_on = host_asks_then(file, errors, checksums, n);

        if (!goes_on)
                settle(file, errors, n);
        judge_disk(file, errors, n);
        if (!goes_on)
                file->question.n = 0;
}

void store_disk_hangs(struct store *store) {
        store->file->hangs = true;
        look_at_all(store->file);
        fetches_end_all(store->file, true);
}

void store_disk_lost(struct store *store) {
        struct file *file = store->file;

        if (file->hangs) {
                file->hangs = false;
                look_at_all(file);
        }
        if (!file->asked || host_has_question(file))
                return;
        file->info.errors++;
        switch (file->question.what) {
        case STORE_DISK_SCAN:
                store_disk_scanned(store, -EIO, 0, NULL, 0);
                break;
        case STORE_DISK_NAMESPACE:
        case STORE_DISK_FORGET:
                file->asked = false; /* it is asked again */
                break;
        case STORE_DISK_READ:
        case STORE_DISK_WRITE:
                store_disk_moved(store, NULL, NULL, 0);
                break;
        }
}

uint64_t store_disk_place(const struct store *store, uint64_t place, uint32_t *file) {
        const struct catalog *c = &store->file->catalog;

        *file = c->extents[place / FILE_SLOTS].file;
        return place - c->files[*file].first * (uint64_t)FILE_SLOTS;
}

int store_disk_memory(struct store *store, uint32_t item, uint64_t *offset) {
        const struct store_disk_question *q = &store->file->question;

        return carry_memory(host_carry(store->file), item, q->space, q->items[item].block, offset);
}

const struct hooks file_hooks = {
        .lay_out = lay_out, .space_begins = space_begins, .idle = idle,
        .space_leaves = space_leaves,
        .space_ends = space_ends, .store_ends = store_ends, .attachment_ends = attachment_ends};
