/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The beginning and the end of the file tier, and the hooks by which the cache tells it that spaces
 * and clients come and go.
 */

#include <errno.h>

#include "ipc/base/device.h"
#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "ipc/base/tier.h"
#include "store/cache/memory.h"
#include "store/file/file.h"
#include "store/hooks.h"

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
        file->store = store;
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
        while (file->fetches.first)
                bring_end(kvd_list_first(&file->fetches, struct bringing, waiting));
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

/* If blocks have changed, the space is swept when the disk is idle. */
static void note_changes(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        uint64_t changes = carry_changes(host_carry(file), space);

        if (fs->changes == changes)
                return;
        fs->changes = changes;
        if (fs->all != ALL_UNDER_WAY)
                fs->looked = 0; /* a round that demotes all blocks ends despite changes */
        if (!fs->unswept)
                file_want(file, false);
        fs->unswept = true;
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
        note_changes(file, space);
        return tell_some(file, space) || more;
}

static void attachment_ends(struct attachment *a) {
        if (space_store(a->space)->file)
                fetches_end(space_store(a->space)->file, a->space, a);
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
        fetches_end(file, space, NULL);
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
                                 .store_ends = store_ends,
                                 .attachment_ends = attachment_ends};
