/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The beginning and the end of the file tier, and the hooks by which the cache tells it that spaces
 * and clients come and go.
 */

#include <errno.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/place.h"
#include "ipc/base/sys.h"
#include "store/cache/memory.h"
#include "store/file/file.h"
#include "store/hooks.h"

static struct below_space *state(const struct space *space) {
        return &file_space_of(space)->below;
}

static bool serves(const struct below *b, const struct space *space) {
        return file_for(space);
}

static bool is_full(const struct below *b) {
        return file_question_is_full(file_of(b));
}

static bool has(const struct below *b, const struct space *space, uint32_t id) {
        return file_record_of(file_of(b), space, id) != CATALOG_NOWHERE;
}

const struct below_ops file_below = {.evicts = true,
                                     .knows_by_tokens = true,
                                     .state = state,
                                     .serves = serves,
                                     .may_begin = file_may_begin,
                                     .is_full = is_full,
                                     .find = file_find,
                                     .begin_read = file_begin_read,
                                     .may_read = file_may_read,
                                     .add_read = file_add_read,
                                     .end_read = file_end_read,
                                     .was_read = file_was_read,
                                     .begin_write = file_begin_write,
                                     .passes = file_passes,
                                     .has = has,
                                     .add_write = file_add_write,
                                     .add_prefix = file_add_prefix,
                                     .end_write = file_end_write,
                                     .end_round = file_end_round,
                                     .note = file_note_name};

/* ---- life ------------------------------------------------------------------------------------ */

int store_disk_begin(struct store *store, const struct store_disk_config *config) {
        bool on_gpu = store->config.backend != KVD_BACKEND_HOST;
        struct file *file;

        if (!config->there && !config->host)
                return 0;
        if (config->host && !on_gpu)
                return store_refuse(store, -EOPNOTSUPP,
                                    "host_tier is for pools on a GPU; unset it");
        file = store->file = sys->calloc(1, sizeof *file);
        if (!file)
                return store_refuse(store, -ENOMEM, "out of memory for the file");
        below_begin(&file->below, store, &file_below);
        file->store = store;
        file->below.depth = config->depth;
        file->config = *config;
        file->copies = &file_copies;
        file->disk.state = STORE_DISK_OPENING;
        store->account.copies_below = config->there ? config->bytes / CATALOG_COPIES : 0;
        head_begin(&file->head, config->bytes);
        return on_gpu ? host_begin(file) : 0;
}

/* Frees the tier's memory; the file stays as it is. */
static void store_ends(struct store *store) {
        struct file *file = STEAL(store->file);

        if (!file)
                return;
        file->host = host_free(file->host);
        catalog_close(&file->catalog);
        free(file);
}

/* ---- spaces ---------------------------------------------------------------------------------- */

/* Room for a hint of each block that the file can hold: one space may fill it. */
static void lay_out(const struct space *space, uint64_t max_blocks, struct kvd_index *ix) {
        const struct file *file = space_store(space)->file;

        if (file)
                ix->hint_slots = kvd_table_slots(file->config.bytes /
                                                 file_slot_bytes(ix->block_bytes, 0));
}

static int space_begins(struct space *space) {
        struct file_space *fs = space->parts.file = sys->calloc(1, sizeof *fs);

        if (!fs)
                return -ENOMEM;
        fs->number = -1;
        fs->wanted =
                (struct file_wanted){.space = space, .first = KVD_NOWHERE, .last = KVD_NOWHERE};
        file_tell_below(space);
        return 0;
}

static void space_ends(struct space *space) {
        free(file_space_of(space));
}

/* Writes some of the hints for records that existed before the space was opened. */
static bool tell_some(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        int number = file_space_number(file, space);

        if (fs->told == CATALOG_NOWHERE)
                return false;
        fs->told = number < 0 ? CATALOG_NOWHERE :
                                catalog_tell_some(&file->catalog, number, fs->told);
        file_tell_below(space);
        return fs->told != CATALOG_NOWHERE;
}

static bool idle(struct space *space) {
        struct file *file = file_for(space);
        bool more = space_store(space)->file && copies_miss_some(space_store(space)->file, space);

        if (!file)
                return more;
        return tell_some(file, space) || more;
}

static struct file_erasing *unused_erasing(struct file *file) {
        for (uint32_t i = 0; i < ERASING; i++)
                if (!file->erasing[i].wanted)
                        return &file->erasing[i];
        return NULL;
}

/* A request that is outstanding goes on without the space; one that was not sent ends. */
static void leave_question(struct file *file, const struct space *space) {
        struct file_disk *d = &file->disk;

        if (d->question.space != space)
                return;
        if (d->ready)
                file_settle(file, NULL, 0);
        d->question.space = NULL;
}

/*
 * The space was deleted, so its records are erased, unless it was only collected to make room. If
 * the file is not open yet, they are erased once it is.
 */
static void space_leaves(struct space *space) {
        struct file *file = space_store(space)->file;
        struct file_erasing *e;

        if (!file)
                return;
        if (file_space_of(space)->number >= 0)
                catalog_tell(&file->catalog, file_space_of(space)->number, NULL);
        leave_question(file, space);
        copies_space_leaves(space);
        if (file_space_of(space)->number >= 0)
                file->owners[file_space_of(space)->number] = NULL;
        host_space_leaves(file, space);
        if (space->listed.collected)
                return;
        e = unused_erasing(file);
        if (!e) {
                store_disk_off(file->store, "too many spaces were deleted at once");
                return;
        }
        e->wanted = true;
        file_name_of(space, &e->name);
        file->n_erasing++;
        file_erase(file);
}

const struct hooks file_hooks = {.lay_out = lay_out,
                                 .space_begins = space_begins,
                                 .idle = idle,
                                 .space_leaves = space_leaves,
                                 .space_ends = space_ends,
                                 .store_ends = store_ends};
