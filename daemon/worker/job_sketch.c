/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVReviver's four jobs: blocks leave (an exact copy with its checksum, and into the sketch), come back (from the copy,
 * compared with its checksum where it arrives, or from the sketch), and leave the sketch again; and a sketch that a
 * worker left half written is made anew.
 */

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/worker/job.h"
#include "daemon/worker/sketch.h"
#include "ipc/base/sequence.h"

#define NONE UINT32_MAX

struct copies {
        struct task *task;
        struct kvd_spilled *spilled; /* SPILL */
        uint32_t *errors;            /* the others */
};

static uint64_t checksum(const struct task *task, const void *block) {
        return XXH3_64bits(block, task->shape.block_bytes);
}

static bool in_sketch(const struct kvd_job_item *item) {
        return item->ordinal != KVD_NO_ORDINAL;
}

/* ---- SPILL ------------------------------------------------------------------------------------------------------- */

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

static void spill(void *data, uint32_t i, uint32_t thread) {
        struct copies *all = data;
        const struct kvd_job_item *item = &all->task->items[i];
        const uint8_t *block = task_block(all->task, i);
        uint8_t *to = item->place == KVD_NOWHERE ? NULL : task_spilled(all->task, item->place);
        struct kvd_spilled *result = &all->spilled[i];

        if (!block || (item->place != KVD_NOWHERE && !to)) {
                result->error = ESTALE;
                return;
        }
        keep_summary(all->task, item);
        if (!to)
                return;
        memcpy(to, block, all->task->shape.block_bytes);
        result->checksum = checksum(all->task, to);
}

/* Of what was copied, and of what is only in the sketch. */
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

int task_spill(struct task *task) {
        struct copies all = {.task = task};

        all.spilled = task_results(task, task->job->n_items, sizeof *all.spilled);
        if (!all.spilled)
                return -E2BIG;
        team_run(task->team, task->job->n_items, spill, &all);
        return task->sketch ? put_into_sketch(task, all.spilled) : 0;
}

/* ---- REVIVE ------------------------------------------------------------------------------------------------------ */

static void move_summary(const struct task *task, const struct kvd_job_item *item) {
        uint8_t *to = task_row(task, item->to_row), *from = task_row(task, item->row);

        if (to && from && to != from && shm_load((const shm_u64 *)from) & KVD_SUMMARY_MADE)
                task_copy_summary(task, from, to, kvd_ref_generation(item->ref));
}

/* The checksum is of what arrived, so that nothing can happen in between. */
static void revive_exact(void *data, uint32_t i, uint32_t thread) {
        struct copies *all = data;
        const struct kvd_job_item *item = &all->task->items[i];
        uint8_t *dest = task_block(all->task, i);
        const uint8_t *copy = task_spilled(all->task, item->place);

        if (item->flags & KVD_ENTRY_APPROX)
                return;
        if (!dest || !copy) {
                all->errors[i] = dest ? ENODATA : ESTALE;
                return;
        }
        memcpy(dest, copy, all->task->shape.block_bytes);
        if (checksum(all->task, dest) != item->checksum)
                all->errors[i] = EBADMSG;
        else
                move_summary(all->task, item);
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

/* What the sketch cannot answer does not hold up what has a copy. */
int task_revive(struct task *task) {
        struct copies all = {.task = task};
        int r;

        all.errors = task_results(task, task->job->n_items, sizeof *all.errors);
        if (!all.errors)
                return -E2BIG;
        team_run(task->team, task->job->n_items, revive_exact, &all);
        if (!any_approximate(task))
                return 0;
        r = revive_approximate(task, all.errors);
        if (r < 0)
                refuse_approximate(task, all.errors, -r);
        return 0;
}

/* ---- FORGET, REBUILD --------------------------------------------------------------------------------------------- */

/* Only what is as it was when it was put in is taken out, or put in again. */
static void check_copy(void *data, uint32_t i, uint32_t thread) {
        struct copies *all = data;
        const struct kvd_job_item *item = &all->task->items[i];
        const uint8_t *copy = task_spilled(all->task, item->place);

        if (item->flags & KVD_ENTRY_APPROX)
                return;
        if (!copy || !in_sketch(item))
                all->errors[i] = ENODATA;
        else if (checksum(all->task, copy) != item->checksum)
                all->errors[i] = EBADMSG;
}

/* approximate: the items that have no copy, and need none; or those that have. */
static int add_members(struct sketch_use *use, const uint32_t *errors, bool approximate) {
        static uint8_t any[1];
        struct task *task = use->task;
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < task->job->n_items; i++) {
                const struct kvd_job_item *item = &task->items[i];

                use->members[i].block = NULL;
                if (errors[i] || !in_sketch(item) || !!(item->flags & KVD_ENTRY_APPROX) != approximate)
                        continue;
                r = sketch_add(use, i, approximate ? any : task_spilled(task, item->place));
        }
        return r;
}

static int forget(struct sketch_use *use, const uint32_t *errors, bool approximate) {
        int64_t n;
        int r = add_members(use, errors, approximate);

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

int task_forget(struct task *task) {
        struct copies all = {.task = task};
        struct sketch_use use;
        int r = sketch_open(task, &use);

        if (r < 0)
                return r;
        all.errors = task_results(task, task->job->n_items, sizeof *all.errors);
        if (!all.errors)
                return -E2BIG;
        team_run(task->team, task->job->n_items, check_copy, &all);
        r = forget(&use, all.errors, false);
        return r < 0 ? r : forget(&use, all.errors, true);
}

int task_rebuild(struct task *task) {
        struct copies all = {.task = task};
        struct sketch_use use;
        int r = sketch_open(task, &use);

        if (r < 0)
                return r;
        all.errors = task_results(task, task->job->n_items, sizeof *all.errors);
        if (!all.errors)
                return -E2BIG;
        team_run(task->team, task->job->n_items, check_copy, &all);
        sketch_begin(&use);
        sketch_clear(&use);
        r = add_members(&use, all.errors, false);
        if (r == 0)
                r = sketch_insert(&use);
        if (r < 0)
                return r; /* half written still */
        sketch_end(&use, (int64_t)sketch_tokens(&use));
        return 0;
}
