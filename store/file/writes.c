/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the sweep (store/below/sweep.c) writes to the file: a record for each block, after that of
 * its parent.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/below/admit.h"
#include "store/cache/inside.h"
#include "store/file/file.h"

uint64_t file_most(const struct file *file, const struct space *space) {
        uint64_t pool = file->store->config.pool_bytes, quota = space_domain(space)->config.quota;

        if (!quota || quota >= pool)
                return file->config.bytes;
        return (uint64_t)((double)file->config.bytes * (double)quota / (double)pool);
}

/* All blocks of the space are to be demoted (kvctl evict --to file). */
static bool is_wanted(const struct space *space) {
        return file_space_of(space)->below.all;
}

/* ---- records --------------------------------------------------------------------------------- */

/* A place for a record. busy keeps its parent, at up, from being evicted for it. */
static uint32_t take_place(struct file *file, const struct space *space, uint32_t up, int number,
                           uint32_t n_tokens) {
        struct catalog_entry *parent = up == CATALOG_NOWHERE ? NULL : &file->catalog.entries[up];
        uint32_t place = CATALOG_NOWHERE;

        if (parent)
                parent->busy++;
        if (!file->host || host_has_room(file, space))
                place = catalog_take(&file->catalog,
                                     file_slot_bytes(space_block_bytes(space), n_tokens), number,
                                     file_most(file, space),
                                     is_wanted(space) ? file_space_of(space)->since_ns :
                                                        UINT64_MAX);
        if (parent)
                parent->busy--;
        return place;
}

/* While all blocks are demoted, records that exist already are not evicted for new ones. */
static void keep(struct file *file, const struct space *space, uint32_t place) {
        if (is_wanted(space) && place != CATALOG_NOWHERE)
                catalog_touch(&file->catalog, place);
}

static void enter(struct file *file, struct space *space, uint32_t id, uint32_t place,
                  struct kvd_record_key key, const struct kvd_label *label, uint32_t up) {
        const struct kvd_desc *desc = block_desc(space, id);

        catalog_enter(&file->catalog, place, key, label, up, file_space_of(space)->number);
        file_note_record(space, id, place, label->sequence);
        below_hold(&file->below, space, block_ref(space, id));
        file_question_add(file, &(struct store_disk_item){.place = place,
                                                          .label = *label,
                                                          .block = block_ref(space, id),
                                                          .tokens = desc->tokens});
}

static struct kvd_label label_of(struct file *file, struct space *space, uint32_t id,
                                 uint64_t root) {
        const struct kvd_desc *desc = block_desc(space, id);
        int number = file_space_number(file, space);

        return (struct kvd_label){.epoch = file->catalog.spaces[number].epoch,
                                  .root = root,
                                  .group = desc->group,
                                  .depth = desc->depth,
                                  .n_tokens = desc->n_tokens};
}

/* Makes that record the block's. */
static void note(struct file *file, struct space *space, uint32_t id, uint32_t place) {
        keep(file, space, place);
        file_note_record(space, id, place, file->catalog.entries[place].sequence);
}

/*
 * Does the block have a record already? In a bidirectional space a record with its tag belongs to
 * another prefix, with the same tokens in this block. It is dropped, since the new record hides it.
 */
static bool has_record(struct file *file, struct space *space, uint32_t id, uint32_t up,
                       uint64_t tag) {
        uint32_t place = catalog_find(&file->catalog, tag);
        const struct catalog_entry *e = &file->catalog.entries[place];

        if (place == CATALOG_NOWHERE)
                return false;
        if (space_finds_whole(space)) {
                if (e->state == CATALOG_THERE && !e->busy)
                        catalog_drop(&file->catalog, place);
                return false;
        }
        catalog_link(&file->catalog, place, up);
        note(file, space, id, place);
        return true;
}

/*
 * Gives the block a record after its parent's, unless there is one already. -EAGAIN: the disk has
 * enough to do, or will free host memory; -ENOSPC: there is no room.
 */
static int add(struct file *file, struct space *space, uint32_t id, uint64_t root) {
        const struct kvd_desc *desc = block_desc(space, id);
        struct kvd_label label = label_of(file, space, id, root);
        uint32_t up = CATALOG_NOWHERE, place;
        struct kvd_record_key key;

        if (block_of(space, id)->parent != NONE) {
                up = file_record_of(file, space, block_of(space, id)->parent);
                label.parent = file->catalog.entries[up].sequence;
        }
        key = file_key(file->head.super.secret, &label, desc->tokens);
        if (has_record(file, space, id, up, key.tag))
                return 0;
        if (file_question_is_full(file))
                return -EAGAIN;
        place = take_place(file, space, up, file_space_of(space)->number, desc->n_tokens);
        if (place == CATALOG_NOWHERE && file->host && file->disk.question.n)
                return -EAGAIN;
        if (place == CATALOG_NOWHERE)
                return -ENOSPC;
        label.sequence = ++file->sequence;
        enter(file, space, id, place, key, &label, up);
        return 0;
}

int file_add_write(struct below *b, struct space *space, uint32_t id) {
        return add(file_of(b), space, id, block_desc(space, id)->root);
}

/* ---- bidirectional prefixes ------------------------------------------------------------------ */

/* Place of the prefix's last record if the file has all of them, or CATALOG_NOWHERE. */
static uint32_t find_prefix(struct file *file, struct space *space, uint64_t root) {
        uint32_t place = CATALOG_NOWHERE, bt = space_block_tokens(space);
        const struct below *b = &file->below;

        for (uint32_t i = 0; i < b->path; i++) {
                struct kvd_label label = label_of(file, space, b->path_at[b->path - 1 - i], root);

                place = file_record_behind(file, &label, place, b->prefix + i * bt);
                if (place == CATALOG_NOWHERE)
                        break;
        }
        return place;
}

/* Removes the first blocks as long as each has a record that follows the one before it. */
static void pass_written(struct file *file, const struct space *space) {
        const struct catalog_entry *entries = file->catalog.entries;
        struct below *b = &file->below;
        uint64_t before = 0;

        for (; b->path; b->path--) {
                uint32_t place = file_record_of(file, space, b->path_at[b->path - 1]);

                if (place == CATALOG_NOWHERE || entries[place].parent != before)
                        break;
                before = entries[place].sequence;
        }
}

/*
 * Writes all blocks of the prefix, and continues only records that belong to these blocks: the
 * content of a block depends on all tokens of the prefix, which are not compared here. If the file
 * seems to have the whole prefix, by its hashes, it is not written again, but no new record is added
 * after those that only the hashes found. So prefixes with equal hashes cost each other a miss.
 */
int file_add_prefix(struct below *b, struct space *space) {
        uint32_t last = b->path_at[0], all = b->path, there = CATALOG_NOWHERE;
        uint64_t root = file_root(space, block_desc(space, last)->root, b->prefix);
        struct file *file = file_of(b);
        int r = 0;

        pass_written(file, space);
        if (b->path == all)
                there = find_prefix(file, space, root);
        if (there != CATALOG_NOWHERE) {
                note(file, space, last, there);
                return 0;
        }
        for (uint32_t n = b->path; n && r == 0; n--)
                r = add(file, space, b->path_at[n - 1], root);
        return r;
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Gives the space a namespace, which is a precondition for records. */
static void make_name(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        struct catalog_namespace *n;
        int number = file_enter_space(file, space);

        fs->refused = number < 0;
        if (fs->refused)
                return;
        n = &file->catalog.spaces[number];
        if (head_name(&file->head, fs->id, &n->epoch) < 0) {
                if (!n->copy_bytes)
                        *n = (struct catalog_namespace){0};
                fs->refused = true;
                file_changes(file);
                return;
        }
        file_want(file, true);
}

int file_begin_write(struct below *b, struct space *space) {
        struct file *file = file_of(b);
        int number = file_space_number(file, space);

        if (number < 0 || !file->catalog.spaces[number].epoch) {
                make_name(file, space);
                return 0;
        }
        file->catalog.spaces[number].owner = space_domain(space);
        if (is_wanted(space))
                file_want(file, true); /* even if this piece finds nothing */
        if (!file_is_idle(file) || !host_may_begin(file, space))
                return -EAGAIN;
        file_begin_question(file, STORE_DISK_WRITE, space);
        return 1;
}

bool file_end_write(struct below *b) {
        struct file *file = file_of(b);

        if (file->disk.question.n)
                file_question_ready(file);
        return file->disk.question.n;
}

void file_passes(struct below *b, struct space *space, uint32_t id) {
        struct file *file = file_of(b);

        file_forget_stale(file, space, id);
        if (!is_wanted(space) || !admit_can_be_written(space, id))
                return;
        file_space_of(space)->no_return += !admit_can_return(space, id);
        if (admit_can_lead(space, id))
                keep(file, space, file_record_of(file, space, id));
}

void file_end_round(struct below *b, struct space *space, bool all) {
        file_space_of(space)->all_done |= all;
}

void file_written(struct file *file, const int32_t *errors, uint32_t n) {
        struct store_disk_question *q = &file->disk.question;

        below_let_go(&file->below);
        for (uint32_t i = 0; i < q->n; i++) {
                uint32_t place = (uint32_t)q->items[i].place;
                int error = i < n ? errors[i] : -ECANCELED;
                bool written = !error;

                file_count_error(&file->disk.count, error);
                if (!written && q->space) {
                        file_space_of(q->space)->below.left += is_wanted(q->space);
                        file_space_of(q->space)->below.path = 0; /* it is begun again */
                        block_set_record(q->space, kvd_ref_id(q->items[i].block), 0, 0, 0);
                }
                if (!written) {
                        (i < n ? catalog_spoil : catalog_drop)(&file->catalog, place);
                        continue;
                }
                catalog_written(&file->catalog, place);
                file->disk.count.written_bytes +=
                        file->catalog.extents[place / FILE_SLOTS].slot_bytes;
        }
}

/* ---- kvctl evict --to file ------------------------------------------------------------------- */

static int refuse_demotion(struct space *space) {
        return store_refuse(
                space_store(space), -EOPNOTSUPP,
                "there is no file tier for the space, or it is not on; see kvctl tiers");
}

/* A second call restarts the round; both callers see the same end. */
int space_demote(struct space *space) {
        struct file *file = file_for(space);
        struct file_space *fs = file_space_of(space);

        if (!file)
                return refuse_demotion(space);
        fs->below.all = true;
        fs->all_done = false;
        fs->since_ns = sys_now_ns();
        sweep_again(&fs->below);
        fs->no_return = 0;
        fs->below.left = fs->below.path = 0;
        file_want(file, true);
        return 1;
}

int space_demoted(struct space *space, uint64_t *no_return) {
        const struct file_space *fs = file_space_of(space);

        *no_return = 0;
        if (!file_for(space))
                return refuse_demotion(space);
        if (!fs->below.all && !fs->all_done) /* the previous daemon got the call */
                return space_demote(space);
        if (fs->below.all)
                return 1;
        if (fs->below.left)
                return store_refuse(space_store(space), -ENOSPC,
                                    "%u blocks could not be written to the file; see kvctl tiers",
                                    fs->below.left);
        *no_return = fs->no_return;
        return 0;
}
