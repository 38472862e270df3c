/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The state of the file tier: the file, its records of a space, and what is being erased. Requests
 * to the disk are in disk.c, the beginning and the end of the tier in life.c.
 */

#include "store/file/file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/place.h"
#include "ipc/base/wide.h"
#include "store/account.h"
#include "store/below/admit.h"

/* ---- state ----------------------------------------------------------------------------------- */

void store_on_disk(struct store *store, void (*called)(void *data, bool soon), void *data) {
        if (!store->file)
                return;
        store->file->below.wanted = called;
        store->file->below.data = data;
}

void file_want(struct file *file, bool soon) {
        if (file->disk.state != STORE_DISK_OFF)
                below_want(&file->below, soon);
}

void file_tell_below(struct space *space) {
        space_set_below(space, KVD_BELOW_FILE, file_for(space));
        space_set_below(space, KVD_BELOW_UNTOLD,
                        file_for(space) && file_space_of(space)->told != CATALOG_NOWHERE);
}

void file_changes(struct file *file) {
        for (struct space *space = NULL; (space = store_space_after(file->store, space));)
                file_tell_below(space);
        below_changes(&file->below);
}

bool store_disk_is_off(const struct store *store) {
        const struct file *file = store->file;

        return file && file->config.there &&
               (file->disk.state == STORE_DISK_OFF || file->disk.hangs);
}

const char *file_last_error(const struct file_count *count) {
        return !count->last_error ?
                       "" :
               count->last_error == -ECANCELED ?
                       "a process that works for the daemon ended, or could not do its part" :
                       strerror(-count->last_error);
}

static void get_counts(const struct file_disk *disk, struct store_disk_info *ret) {
        const struct file_count *count = &disk->count;

        ret->read_ns = disk->read_ns;
        ret->write_ns = disk->write_ns;
        ret->hits = count->hits;
        ret->misses = count->misses;
        ret->wrong = count->wrong;
        ret->errors = count->errors;
        ret->read_bytes = count->read_bytes;
        ret->written_bytes = count->written_bytes;
        ret->copies_written = count->copies_written;
        ret->copies_read = count->copies_read;
        ret->copies_lost = count->copies_lost;
        ret->last_error = file_last_error(count);
        if (count->why[0])
                memcpy(ret->why, count->why, sizeof ret->why);
}

/* Records are entered before they are written, but count only once they are written. */
static void get_written(const struct file *file, struct store_disk_info *ret) {
        const struct store_disk_question *q = &file->disk.question;
        bool writes = q->what == STORE_DISK_WRITE && !q->copies && q->n;

        ret->records = file->catalog.records;
        ret->used = file->catalog.bytes;
        if (!writes)
                return;
        ret->records -= q->n;
        ret->used -= (uint64_t)q->n *
                     file->catalog.extents[q->items[0].place / FILE_SLOTS].slot_bytes;
}

void store_disk_get_info(const struct store *store, struct store_disk_info *ret) {
        const struct file *file = store->file;
        const struct catalog *c;

        *ret = (struct store_disk_info){0};
        if (!file)
                return;
        c = &file->catalog;
        ret->state = file->disk.hangs ? STORE_DISK_HANGS : file->disk.state;
        ret->name = file->config.there ? "file" : "host";
        ret->fetches = file->below.n_fetches;
        ret->queue = file->below.queue;
        ret->bytes = file->config.bytes;
        ret->evicted = c->evicted;
        ret->copies = c->copies;
        get_written(file, ret);
        ret->age_ns = c->records ? catalog_age(c) : 0;
        ret->extents = c->n_extents;
        ret->scanned = file->disk.extent;
        get_counts(&file->disk, ret);
}

void store_disk_note(struct store *store, const char *why) {
        struct file_disk *disk = &store->file->disk;

        if (disk->state != STORE_DISK_OFF)
                snprintf(disk->count.why, sizeof disk->count.why, "%s", why);
}

/* ---- spaces ---------------------------------------------------------------------------------- */

struct file *file_for(const struct space *space) {
        struct file *file = space_store(space)->file;
        bool right = file && file->disk.state == STORE_DISK_ON && !file_space_of(space)->refused &&
                     (!file->host || kvd_places(space_index(space)));

        return right ? file : NULL;
}

void file_name_of(const struct space *space, struct file_name *ret) {
        memset(ret, 0, sizeof *ret);
        snprintf(ret->domain, sizeof ret->domain, "%s", space_domain(space)->config.name);
        snprintf(ret->space, sizeof ret->space, "%s", space_name(space));
        memcpy(&ret->geometry, space_geometry(space), sizeof ret->geometry);
        ret->kind = space_index(space)->kind;
}

static struct kvd_key id_of(const struct file *file, const struct file_name *name) {
        bool causal = name->kind == KVD_kind_causal;

        return kvd_wide_best()->hash(name, causal ? offsetof(struct file_name, kind) : sizeof *name,
                                     file->head.super.secret);
}

static bool is_number_of(const struct file *file, int number, struct kvd_key id) {
        const struct catalog_namespace *n = &file->catalog.spaces[number];

        return n->used && !n->dead && kvd_key_equal(n->id, id);
}

int file_space_number(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        struct file_name name;

        if (!fs->named) {
                file_name_of(space, &name);
                fs->id = id_of(file, &name);
                fs->named = true;
        }
        if (fs->number >= 0 && is_number_of(file, fs->number, fs->id))
                return fs->number;
        fs->number = catalog_space(&file->catalog, fs->id, false);
        if (fs->number >= 0) {
                account_add(space, KVD_COST_file_names, !fs->charged);
                fs->charged = true;
                file->owners[fs->number] = space;
                catalog_tell(&file->catalog, fs->number, space->ix);
                fs->told = file->catalog.spaces[fs->number].records ? 0 : CATALOG_NOWHERE;
                space_is_busy(space);
        }
        return fs->number;
}

int file_enter_space(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);

        if (!fs->charged)
                fs->charged = account_charge(space, KVD_COST_file_names, 1) == 0;
        return fs->charged ? catalog_space(&file->catalog, fs->id, true) : -1;
}

uint64_t file_root(const struct space *space, uint64_t root, const uint32_t *tokens) {
        return space_finds_whole(space) ? kvd_hint_root(tokens, (uint32_t)root) : root;
}

uint32_t file_record_behind(const struct file *file, struct kvd_label *label, uint32_t up,
                            const uint32_t *tokens) {
        const struct catalog *c = &file->catalog;
        uint32_t place;

        label->parent = up == CATALOG_NOWHERE ? 0 : c->entries[up].sequence;
        place = catalog_find(c, file_tag(file->head.super.secret, label, tokens));
        return place != CATALOG_NOWHERE && c->entries[place].state == CATALOG_THERE ?
                       place :
                       CATALOG_NOWHERE;
}

uint32_t file_record_of(const struct file *file, const struct space *space, uint32_t id) {
        const struct block_record *record = block_record(space, id);
        uint32_t place = record->place - 1;

        if (!record->place || file->catalog.entries[place].state == CATALOG_FREE ||
            catalog_is_off(&file->catalog) ||
            (uint32_t)file->catalog.entries[place].sequence != record->mark)
                return CATALOG_NOWHERE;
        return place;
}

void file_forget_stale(const struct file *file, struct space *space, uint32_t id) {
        if (block_record(space, id)->place && file_record_of(file, space, id) == CATALOG_NOWHERE)
                block_set_record(space, id, 0, admit_evicted(space, id), 0);
}

void file_note_record(struct space *space, uint32_t id, uint32_t place, uint64_t sequence) {
        block_set_record(space, id, place + 1, (uint32_t)sequence, file_handle(sequence));
}

/* ---- erasing --------------------------------------------------------------------------------- */

/*
 * Does the file have this superblock or a newer one? Without a file nothing is left to erase; a
 * file that is off is erased when it is used again.
 */
static bool is_told(const struct file *file, uint64_t serial) {
        return !file->config.there || file->disk.state == STORE_DISK_OFF ||
               file->disk.told >= serial;
}

static void forget_namespace(struct file *file, int number) {
        struct catalog_namespace *n = &file->catalog.spaces[number];

        if (!n->records && !n->copy_bytes)
                *n = (struct catalog_namespace){0};
        file->sweep = 0;
}

static void end_erasing(struct file *file, struct file_erasing *e) {
        if (e->begun)
                forget_namespace(file, e->number);
        *e = (struct file_erasing){0};
        file->n_erasing--;
}

/* If the catalog does not have the namespace, there is nothing to erase. */
static void begin_erasing(struct file *file, struct file_erasing *e) {
        struct kvd_key id = id_of(file, &e->name);

        e->number = catalog_space(&file->catalog, id, false);
        e->begun = e->number >= 0;
        if (!e->begun)
                return;
        file->catalog.spaces[e->number].dead = true;
        head_forget(&file->head, id);
        e->serial = file->head.super.serial;
        file_want(file, true);
}

void file_erase(struct file *file) {
        if (!file->head.super.serial || file->disk.state == STORE_DISK_OFF)
                return;
        for (uint32_t i = 0; file->n_erasing && i < ERASING; i++) {
                struct file_erasing *e = &file->erasing[i];

                if (e->wanted && !e->begun)
                        begin_erasing(file, e);
                if (e->wanted && is_told(file, e->serial))
                        end_erasing(file, e);
        }
}

bool store_disk_erasing(const struct store *store, const char *domain, const char *space) {
        const struct file *file = store->file;

        for (uint32_t i = 0; file && file->n_erasing && i < ERASING; i++)
                if (file->erasing[i].wanted && strcmp(file->erasing[i].name.domain, domain) == 0 &&
                    strcmp(file->erasing[i].name.space, space) == 0)
                        return true;
        return false;
}

#define ERASING_SHARE (ERASING / 4 * 3) /* maximum for one domain */

int store_disk_may_erase(struct store *store, const char *domain) {
        const struct file *file = store->file;
        uint32_t n = 0;

        for (uint32_t i = 0; file && file->n_erasing && i < ERASING; i++)
                n += file->erasing[i].wanted && strcmp(file->erasing[i].name.domain, domain) == 0;
        if (n < ERASING_SHARE && (!file || file->n_erasing < ERASING))
                return 0;
        return store_refuse(
                store, -EBUSY,
                "the file tier still has to forget %u deleted spaces, %u of domain '%s'; "
                "delete this one later",
                file->n_erasing, n, domain);
}

#define SWEEP_LOOKS 4096u

bool file_sweep_dead(struct file *file) {
        struct catalog *c = &file->catalog;
        uint32_t end = (uint32_t)MIN((uint64_t)file->sweep + SWEEP_LOOKS,
                                     (uint64_t)c->n_extents * FILE_SLOTS);

        for (; file->sweep < end; file->sweep++) {
                const struct catalog_entry *e = &c->entries[file->sweep];

                if (!c->extents[file->sweep / FILE_SLOTS].slot_bytes)
                        file->sweep |= FILE_SLOTS - 1;
                else if (e->state == CATALOG_THERE && !e->busy && c->spaces[e->space].dead)
                        catalog_drop(c, file->sweep);
        }
        return file->sweep < c->n_extents * FILE_SLOTS;
}
