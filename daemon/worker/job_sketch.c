/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVReviver's four jobs: blocks leave (an exact copy with its checksum, and into the sketch), come
 * back (from the copy, compared with its checksum where it arrives, or from the sketch), and leave
 * the sketch again; and a sketch that a worker left half written is made anew.
 */

#include <errno.h>
#include <string.h>

#include "daemon/worker/copies.h"
#include "daemon/worker/jobs.h"
#include "daemon/worker/sketch.h"
#include "ipc/base/sequence.h"

static bool in_sketch(const struct kvd_job_item *item) {
        return item->ordinal != KVD_NO_ORDINAL;
}

/* ---- SPILL ----------------------------------------------------------------------------------- */

static void keep_summary(const struct task *task, const struct kvd_job_item *item) {
        uint32_t generation = kvd_ref_generation(item->ref);
        const uint8_t *from = task_summary(task, item->row, generation);
        uint8_t *to = task_row(task, item->to_row);

        if (!to || from == to)
                return;
        if (from)
                task_copy_summary(task, from, to, generation);
        else
                shm_write_end((shm_u64 *)to, 0); /* of what was here before */
}

/* The blocks that are copied; one that is not there fails. */
static void choose_blocks(struct task *task, struct copy *copies) {
        for (uint32_t i = 0; i < task->job->n_items; i++) {
                uint8_t *block = task_block(task, i);

                copies[i] = (struct copy){.place = KVD_NOWHERE, .error = block ? 0 : ESTALE};
                if (!block)
                        continue;
                copies[i].place = task->items[i].place;
                copies[i].block = block;
                keep_summary(task, &task->items[i]);
        }
}

/* Blocks that were copied go into the sketch, and those that are only to be in the sketch. */
static int put_into_sketch(struct task *task, const struct kvd_spilled *spilled) {
        struct sketch_use use;
        int r = sketch_open(task, &use);

        for (uint32_t i = 0; r == 0 && i < task->job->n_items; i++)
                if (in_sketch(&task->items[i]) && !spilled[i].error)
                        r = sketch_add(&use, i, task_block(task, i));
        if (r < 0 || !sketch_tokens(&use))
                return r;
        sketch_begin(&use);
        r = sketch_insert(&use);
        sketch_end(&use, r < 0 ? 0 : (int64_t)sketch_tokens(&use));
        return r;
}

static int do_spill(struct task *task) {
        uint32_t n = task->job->n_items;
        struct kvd_spilled *spilled = task_results(task, n, sizeof *spilled);
        struct copy *copies = task_room(task, n, sizeof *copies);

        if (!spilled || !copies)
                return spilled ? -ENOMEM : -E2BIG;
        choose_blocks(task, copies);
        copies_put(task, copies, n);
        for (uint32_t i = 0; i < n; i++)
                spilled[i] = (struct kvd_spilled){.checksum = copies[i].checksum,
                                                  .error = copies[i].error};
        return task->sketch ? put_into_sketch(task, spilled) : 0;
}

/* ---- REVIVE ---------------------------------------------------------------------------------- */

static void move_summary(const struct task *task, const struct kvd_job_item *item) {
        uint8_t *to = task_row(task, item->to_row), *from = task_row(task, item->row);

        if (to && from && to != from && shm_load((const shm_u64 *)from) & KVD_SUMMARY_MADE)
                task_copy_summary(task, from, to, kvd_ref_generation(item->ref));
}

static void revive_exact(struct task *task, struct copy *copies, uint32_t *errors) {
        uint32_t n = task->job->n_items;

        for (uint32_t i = 0; i < n; i++) {
                const struct kvd_job_item *item = &task->items[i];
                uint8_t *dest = item->flags & KVD_ENTRY_APPROX ? NULL : task_block(task, i);

                copies[i] = (struct copy){.place = dest ? item->place : KVD_NOWHERE,
                                          .block = dest,
                                          .checksum = item->checksum,
                                          .error = item->flags & KVD_ENTRY_APPROX ? 0 :
                                                   dest                           ? ENODATA :
                                                                                    ESTALE};
        }
        copies_get(task, copies, n);
        for (uint32_t i = 0; i < n; i++) {
                errors[i] = copies[i].error;
                if (copies[i].block && !errors[i])
                        move_summary(task, &task->items[i]);
        }
}

static void refuse_approximate(struct task *task, uint32_t *errors, int error) {
        for (uint32_t i = 0; i < task->job->n_items; i++)
                if (task->items[i].flags & KVD_ENTRY_APPROX)
                        errors[i] = (uint32_t)error;
}

static int revive_approximate(struct task *task, uint32_t *errors) {
        struct sketch_use use;
        int r = sketch_open(task, &use);

        for (uint32_t i = 0; r == 0 && i < task->job->n_items; i++) {
                uint8_t *dest = task_block(task, i);

                if (!(task->items[i].flags & KVD_ENTRY_APPROX))
                        continue;
                if (!dest || !in_sketch(&task->items[i])) {
                        errors[i] = dest ? ENODATA : ESTALE;
                        continue;
                }
                memset(dest, 0, task->shape.block_bytes); /* the state plane is in no sketch */
                r = sketch_add(&use, i, dest);
                move_summary(task, &task->items[i]);
        }
        if (r == 0)
                sketch_query(&use);
        return r;
}

static bool any_approximate(const struct task *task) {
        for (uint32_t i = 0; i < task->job->n_items; i++)
                if (task->items[i].flags & KVD_ENTRY_APPROX)
                        return true;
        return false;
}

/* Blocks that the sketch cannot answer for do not delay those that have a copy. */
static int do_revive(struct task *task) {
        uint32_t n = task->job->n_items, *errors = task_results(task, n, sizeof *errors);
        struct copy *copies = task_room(task, n, sizeof *copies);
        int r;

        if (!errors || !copies)
                return errors ? -ENOMEM : -E2BIG;
        revive_exact(task, copies, errors);
        if (!any_approximate(task))
                return 0;
        r = revive_approximate(task, errors);
        if (r < 0)
                refuse_approximate(task, errors, -r);
        return 0;
}

/* ---- FORGET, REBUILD ------------------------------------------------------------------------- */

/* Members of the sketch, and what became of each. */
struct members {
        struct copy *copies;
        uint32_t *errors;      /* the job's result */
};

/*
 * A copy is taken out of the sketch, or put in again, only if it is as it was when it was put in.
 */
static int find_members(struct task *task, struct members *ret) {
        uint32_t n = task->job->n_items;

        ret->errors = task_results(task, n, sizeof *ret->errors);
        ret->copies = task_room(task, n, sizeof *ret->copies);
        if (!ret->errors || !ret->copies)
                return ret->errors ? -ENOMEM : -E2BIG;
        for (uint32_t i = 0; i < n; i++) {
                const struct kvd_job_item *item = &task->items[i];
                bool has_copy = !(item->flags & KVD_ENTRY_APPROX);

                ret->copies[i] = (struct copy){.place = has_copy && in_sketch(item) ? item->place :
                                                                                      KVD_NOWHERE,
                                               .checksum = item->checksum,
                                               .error = has_copy ? ENODATA : 0};
        }
        copies_read(task, ret->copies, n);
        for (uint32_t i = 0; i < n; i++)
                ret->errors[i] = ret->copies[i].error;
        return 0;
}

/* approximate: the items that have no copy, and need none; or those that have. */
static int add_members(struct sketch_use *use, const struct members *members, bool approximate) {
        static uint8_t any[1];
        struct task *task = use->task;
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < task->job->n_items; i++) {
                const struct kvd_job_item *item = &task->items[i];

                use->members[i].block = NULL;
                if (members->errors[i] || !in_sketch(item) ||
                    !!(item->flags & KVD_ENTRY_APPROX) != approximate)
                        continue;
                r = sketch_add(use, i, approximate ? any : members->copies[i].block);
        }
        return r;
}

static int forget(struct sketch_use *use, const struct members *members, bool approximate) {
        int64_t n;
        int r = add_members(use, members, approximate);

        n = (int64_t)sketch_tokens(use);
        if (r < 0 || n == 0)
                return r;
        sketch_begin(use);
        if (approximate)
                r = sketch_remove_estimates(use);
        else
                sketch_remove(use);
        sketch_end(use, r < 0 ? 0 : -n);
        return r;
}

static int do_forget(struct task *task) {
        struct members members;
        struct sketch_use use;
        int r = sketch_open(task, &use);

        if (r == 0)
                r = find_members(task, &members);
        if (r == 0)
                r = forget(&use, &members, false);
        return r < 0 ? r : forget(&use, &members, true);
}

static int do_rebuild(struct task *task) {
        struct members members;
        struct sketch_use use;
        int r = sketch_open(task, &use);

        if (r == 0)
                r = find_members(task, &members);
        if (r < 0)
                return r;
        sketch_begin(&use);
        sketch_clear(&use);
        r = add_members(&use, &members, false);
        if (r == 0)
                r = sketch_insert(&use);
        if (r < 0)
                return r; /* half written still */
        sketch_end(&use, (int64_t)sketch_tokens(&use));
        return 0;
}

const struct job_kind job_spill = {.name = "spill", .access = TASK_READ, .call = do_spill};
const struct job_kind job_revive = {.name = "revive", .access = TASK_WRITE, .call = do_revive};
const struct job_kind job_forget = {.name = "forget", .access = TASK_NONE, .call = do_forget};
const struct job_kind job_rebuild = {.name = "rebuild", .access = TASK_NONE, .call = do_rebuild};
