/* SPDX-License-Identifier: Apache-2.0 */

/*
 * When blocks are written to the file: a hand goes round a space's blocks, and picks those that are
 * admitted (admit.c), with what they are behind.
 */

#include <errno.h>

#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/cache/inside.h"
#include "store/file/admit.h"
#include "store/file/file.h"

#define LOOKS 2048u  /* blocks looked at in one call */
#define ALL_LOOKS 16384u /* ... if nobody's use of them counts */
#define PATH 1024u   /* blocks before one that are written along with it */

static uint64_t most_of(const struct file *file, const struct space *space) {
        uint64_t pool = file->store->config.pool_bytes, quota = space->domain->config.quota;

        if (!quota || quota >= pool)
                return file_bytes(file);
        return (uint64_t)((double)file_bytes(file) * (double)quota / (double)pool);
}

/* All of it goes there, and somebody waits for that. */
static bool is_wanted(const struct space *space) {
        return file_space_of(space)->all == ALL_UNDER_WAY;
}

/* Nothing goes for it that the record is behind. */
static uint32_t take_place(struct file *file, const struct space *space, uint32_t up, int number) {
        struct catalog_entry *parent = up == CATALOG_NOWHERE ? NULL : &file->catalog.entries[up];
        uint32_t place;

        if (parent)
                parent->busy++;
        place = file->host && !host_has_room(file, space) ?
                        CATALOG_NOWHERE :
                        catalog_take(&file->catalog, file_slot_bytes(space->ix->block_bytes),
                                     number, most_of(file, space),
                                     is_wanted(space) ? file_space_of(space)->since_ns :
                                                        UINT64_MAX);
        if (parent)
                parent->busy--;
        return place;
}

/* What is there already does not go for what comes. */
static void keep(struct file *file, const struct space *space, uint32_t place) {
        if (is_wanted(space) && place != CATALOG_NOWHERE)
                catalog_touch(&file->catalog, place);
}

/* A record for the block behind its parent's, or the one that is there already. False: no room. */
static bool plan(struct file *file, struct space *space, uint32_t id) {
        const struct kvd_desc *desc = kvd_index_desc(space->ix, id);
        uint32_t up = CATALOG_NOWHERE, place;
        int number = file_space_number(file, space);
        struct kvd_label label = {.epoch = file->catalog.spaces[number].epoch,
                                  .root = desc->root,
                                  .group = desc->group,
                                  .depth = desc->depth,
                                  .n_tokens = desc->n_tokens};
        struct kvd_record_key key;

        if (space->blocks[id].parent != NONE) {
                up = file_record_of(file, space, space->blocks[id].parent);
                label.parent = file->catalog.entries[up].sequence;
        }
        key = file_key(file->secret, &label, desc->tokens);
        place = catalog_find(&file->catalog, key.tag);
        if (place != CATALOG_NOWHERE) {
                catalog_link(&file->catalog, place, up);
                keep(file, space, place);
                file_note_record(space, id, place, file->catalog.entries[place].sequence);
                return true;
        }
        place = take_place(file, space, up, number);
        if (place == CATALOG_NOWHERE) {
                file_space_of(space)->left++;
                return false;
        }
        label.sequence = ++file->sequence;
        catalog_enter(&file->catalog, place, key, &label, up, number);
        file_note_record(space, id, place, label.sequence);
        block_hold(space, id);
        file_question_add(file, &(struct store_disk_item){.place = place,
                                                          .label = label,
                                                          .block = block_ref(space, id),
                                                          .tokens = desc->tokens});
        return true;
}

/* The block, and before it whatever is not in the file. False: it did not go. */
static bool plan_path(struct file *file, struct space *space, uint32_t id, uint32_t *looks) {
        uint32_t path[PATH], n = 0;

        while (id != NONE && n < PATH && file_record_of(file, space, id) == CATALOG_NOWHERE) {
                if (!admit_can_be_written(&space->blocks[id]))
                        return false;
                path[n++] = id;
                id = space->blocks[id].parent;
        }
        *looks += n;
        if (n == PATH && id != NONE && file_record_of(file, space, id) == CATALOG_NOWHERE)
                return false;
        while (n && !file_question_is_full(file))
                if (!plan(file, space, path[--n]))
                        return false;
        return n == 0;
}

static void look_at(struct file *file, struct space *space, uint32_t *looks, uint32_t *reads) {
        struct file_space *fs = file_space_of(space);
        uint32_t id = fs->hand;

        fs->hand = id + 1 < space_ids(space) ? id + 1 : 0;
        fs->looked++;
        file_forget_stale(file, space, id);
        if (!admit_can_be_written(&space->blocks[id]))
                return;
        keep(file, space, file_record_of(file, space, id));
        if (file_record_of(file, space, id) != CATALOG_NOWHERE ||
            !(is_wanted(space) || admit_block(space, id, file->config.depth, reads)))
                return;
        if (!plan_path(file, space, id, looks) && file_question_is_full(file)) {
                fs->hand = id; /* the rest of it is the next question's */
                fs->looked--;
        }
}

/* A round through all blocks has ended. After one that was wanted they are looked at as ever. */
static void end_round(struct space *space) {
        struct file_space *fs = file_space_of(space);

        fs->unswept = is_wanted(space);
        if (fs->unswept)
                fs->all = ALL_DONE;
        fs->looked = 0;
}

static bool sweep(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);
        uint32_t reads = KVD_PIN_READS, most = is_wanted(space) ? ALL_LOOKS : LOOKS;

        file_begin_question(file, STORE_DISK_WRITE, space);
        for (uint32_t looks = 0; looks < most && reads && !file_question_is_full(file); looks++) {
                if (fs->looked >= space_ids(space)) {
                        if (!file->question.n) /* else it ends behind the answer */
                                end_round(space);
                        break;
                }
                look_at(file, space, &looks, &reads);
        }
        return file->question.n > 0;
}

/* Its namespace is asked for first. */
static bool ask_name(struct file *file, struct space *space) {
        struct file_space *fs = file_space_of(space);

        file->naming = catalog_space(&file->catalog, fs->id, true);
        fs->refused = file->naming < 0;
        if (fs->refused)
                return false;
        file->question.what = STORE_DISK_NAMESPACE;
        file->question.space = space;
        file->question.id = fs->id;
        return true;
}

static bool try_space(struct file *file, struct space *space) {
        int number = file_space_number(file, space);

        if (number < 0 || !file->catalog.spaces[number].epoch)
                return ask_name(file, space);
        file->catalog.spaces[number].owner = space->domain;
        if (is_wanted(space))
                file_want(file, true); /* also where this piece finds nothing */
        return sweep(file, space);
}

static int refuse_demotion(struct space *space) {
        return store_refuse(space_store(space), -EOPNOTSUPP,
                            "there is no file tier for the space, or it is not on; see kvctl "
                            "tiers");
}

/* A second one begins the first one's anew: both see it end. */
int space_demote(struct space *space) {
        struct file *file = file_for(space);
        struct file_space *fs = file_space_of(space);

        if (!file)
                return refuse_demotion(space);
        fs->all = ALL_UNDER_WAY;
        fs->since_ns = sys_now_ns();
        fs->unswept = true;
        fs->looked = 0;
        fs->left = 0;
        file_want(file, true);
        return 1;
}

int space_demoted(struct space *space) {
        const struct file_space *fs = file_space_of(space);

        if (!file_for(space))
                return refuse_demotion(space);
        if (fs->all == ALL_NOT) /* a daemon before was asked */
                return space_demote(space);
        if (fs->all != ALL_DONE)
                return 1;
        if (fs->left)
                return store_refuse(space_store(space), -ENOSPC,
                                    "%llu blocks did not go to the file; see kvctl tiers",
                                    (unsigned long long)fs->left);
        return 0;
}

bool demote_next(struct file *file, bool *later) {
        uint32_t n = MIN(store_spaces(file->store), 64);

        for (uint32_t i = 0; i < n; i++) {
                struct space *space = store_next_space(file->store, file->turn);

                if (!space)
                        space = store_next_space(file->store, 0);
                file->turn = space_number(space) + 1;
                if (file_for(space) != file || !file_space_of(space)->unswept)
                        continue;
                *later = true;
                if (try_space(file, space))
                        return true;
        }
        return false;
}

void demote_done(struct file *file, const int32_t *errors, uint32_t n) {
        struct store_disk_question *q = &file->question;

        for (uint32_t i = 0; i < q->n; i++) {
                uint32_t place = (uint32_t)q->items[i].place;
                bool written = i < n && errors[i] == 0;

                if (q->space)
                        block_let_go(q->space, kvd_ref_id(q->items[i].block));
                file_count(file, place)->errors += !written;
                if (!written && q->space)
                        file_space_of(q->space)->left++;
                if (!written) {
                        (i < n ? catalog_spoil : catalog_drop)(&file->catalog, place);
                        continue;
                }
                catalog_written(&file->catalog, place);
                file_count(file, place)->written_bytes +=
                        file->catalog.extents[place / FILE_SLOTS].slot_bytes;
        }
}
