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

static int make_tables(struct file *file) {
        uint32_t n = MAX(file->config.n_files, 1);

        file->disks = sys->calloc(n, sizeof *file->disks);
        if (!file->disks)
                return store_refuse(file->store, -ENOMEM, "out of memory for the file");
        for (uint32_t i = 0; i < n; i++)
                file->disks[i].state = STORE_DISK_OPENING;
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
        file->copies = &file_copies;
        file->state = STORE_DISK_OPENING;
        store->account.copies_below = config->n_files ? file_bytes(file) / CATALOG_COPIES : 0;
        set_begin(&file->set, config->n_files, config->bytes);
        r = make_tables(file);
        return r < 0 || !on_gpu ? r : host_begin(file);
}

/* Frees the tier's memory; the files stay as they are. */
static void store_ends(struct store *store) {
        struct file *file = STEAL(store->file);

        if (!file)
                return;
        file->host = host_free(file->host);
        catalog_close(&file->catalog);
        while (file->fetches.first)
                bring_end(kvd_list_first(&file->fetches, struct bringing, waiting));
        free(file->disks);
        free(file);
}

/* ---- spaces ---------------------------------------------------------------------------------- */

/* Room for a hint of each block that the files can hold: one space may fill all of them. */
static void lay_out(const struct space *space, uint64_t max_blocks, struct kvd_index *ix) {
        const struct file *file = space_store(space)->file;

        if (file)
                ix->hint_slots = kvd_table_slots(file_bytes(file) /
                                                 file_slot_bytes(ix->block_bytes, 0));
}

static int space_begins(struct space *space) {
        struct file_space *fs = space->parts.file = sys->calloc(1, sizeof *fs);

        if (!fs)
                return -ENOMEM;
        fs->number = -1;
        for (uint32_t i = 0; i < DISK_FILES; i++)
                fs->wanted[i] = (struct file_wanted){.space = space,
                                                     .first = KVD_NOWHERE,
                                                     .last = KVD_NOWHERE};
        file_tell_below(space);
        return 0;
}

static void space_ends(struct space *space) {
        free(file_space_of(space));
}

/* If blocks have changed, the space is swept when a disk is idle. */
static void note_changes(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        uint64_t changes = carry_changes(host_carry(file, 0), space);

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
static void leave_question(struct file *file, uint32_t i, const struct space *space) {
        struct file_disk *d = &file->disks[i];

        if (d->question.space != space)
                return;
        if (d->ready)
                file_settle(file, i, NULL, 0);
        d->question.space = NULL;
}

/*
 * The space was deleted, so its records are erased, unless it was only collected to make room. If
 * the files are not open yet, they are erased once they are.
 */
static void space_leaves(struct space *space) {
        struct file *file = space_store(space)->file;
        struct file_erasing *e;

        if (!file)
                return;
        fetches_end(file, space, NULL);
        if (file_space_of(space)->number >= 0)
                catalog_tell(&file->catalog, file_space_of(space)->number, NULL);
        for (uint32_t i = 0; i < file->config.n_files; i++)
                leave_question(file, i, space);
        copies_space_leaves(file, space);
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
