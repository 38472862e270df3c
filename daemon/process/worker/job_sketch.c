/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Four jobs of exact copies and sketches. SPILL writes blocks to exact copies with checksums, and inserts them into
 * the sketch. REVIVE brings blocks back: from the copy, whose checksum is compared at the
 * destination, or from the sketch. FORGET removes blocks from the sketch. REBUILD makes a sketch
 * again that a worker left half written.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/copies.h"
#include "daemon/process/worker/jobs.h"
#include "daemon/process/worker/sketch.h"
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
                shm_write_end((shm_u64 *)to, 0); /* invalidates the row's previous summary */
}

struct spilling {
        struct task *task;
        struct kvd_spilled *spilled; /* the result */
        struct copy *copies;
        struct sketch_use use;
        bool later; /* insert into the sketch after the mean is known */
        bool begun; /* the sketch is being changed */
};

/* Prepares the copy of item i, which fails if the block is gone. */
static void choose_block(struct spilling *s, uint32_t i) {
        const struct kvd_job_item *item = &s->task->items[i];
        uint8_t *block = task_block(s->task, i);

        s->copies[i] = (struct copy){.place = block ? item->place : KVD_NOWHERE,
                                     .block = block,
                                     .error = block ? 0 : ESTALE};
        if (block)
                keep_summary(s->task, item);
}

static int insert_some(void *data, uint32_t first, uint32_t n) {
        struct spilling *s = data;

        if (!s->begun && sketch_tokens(&s->use)) {
                sketch_begin(&s->use);
                s->begun = true;
        }
        sketch_look_at(&s->use, first, n);
        sketch_insert(&s->use);
        return 0;
}

static int add_some_to_mean(void *data, uint32_t first, uint32_t n) {
        struct spilling *s = data;

        sketch_look_at(&s->use, first, n);
        return sketch_add_to_mean(&s->use);
}

/* Copies blocks, and inserts them into the sketch if they were copied, or need no copy. */
static int spill_some(void *data, uint32_t first, uint32_t n) {
        struct spilling *s = data;
        struct task *task = s->task;
        int r = 0;

        for (uint32_t i = first; i < first + n; i++)
                choose_block(s, i);
        copies_put(task, s->copies + first, n);
        for (uint32_t i = first; r == 0 && i < first + n; i++) {
                s->spilled[i] = (struct kvd_spilled){.checksum = s->copies[i].checksum,
                                                     .error = s->copies[i].error};
                if (task->sketch && in_sketch(&task->items[i]) && !s->spilled[i].error)
                        r = sketch_add(&s->use, i, task_block(task, i));
        }
        return r < 0 || !task->sketch || s->later ? r : insert_some(s, first, n);
}

/* For the first blocks of a sketch: reads all blocks twice more. */
static int insert_with_mean(struct spilling *s) {
        int r;

        if (!sketch_tokens(&s->use))
                return 0;
        r = task_batches(s->task, TASK_READ, add_some_to_mean, s);
        if (r < 0)
                return r;
        sketch_begin(&s->use);
        s->begun = true;
        sketch_freeze_mean(&s->use);
        return task_batches(s->task, TASK_READ, insert_some, s);
}

/* If it fails after sketch_begin, the sketch is half written, and stays marked as being changed. */
static int do_spill(struct task *task) {
        uint32_t n = task->job->n_items;
        struct spilling s = {.task = task};
        int r = task->sketch ? sketch_open(task, &s.use) : 0;

        if (r < 0)
                return r;
        s.later = task->sketch && sketch_wants_mean(&s.use);
        s.spilled = task_results(task, n, sizeof *s.spilled);
        s.copies = task_room(task, n, sizeof *s.copies);
        if (!s.spilled || !s.copies)
                return s.spilled ? -ENOMEM : -E2BIG;
        r = task_batches(task, TASK_READ, spill_some, &s);
        if (r == 0 && s.later)
                r = insert_with_mean(&s);
        if (r == 0 && s.begun)
                sketch_end(&s.use, (int64_t)sketch_tokens(&s.use));
        return r;
}

/* ---- REVIVE ---------------------------------------------------------------------------------- */

static void move_summary(const struct task *task, const struct kvd_job_item *item) {
        uint8_t *to = task_row(task, item->to_row), *from = task_row(task, item->row);

        if (to && from && to != from && shm_load((const shm_u64 *)from) & KVD_SUMMARY_MADE)
                task_copy_summary(task, from, to, kvd_ref_generation(item->ref));
}

struct reviving {
        struct task *task;
        uint32_t *errors; /* the result */
        struct copy *copies;
        struct sketch_use use;
        int sketch; /* 0, or negative errno: the sketch cannot be queried */
};

static void revive_exact(struct reviving *v, uint32_t first, uint32_t n) {
        struct task *task = v->task;

        for (uint32_t i = first; i < first + n; i++) {
                const struct kvd_job_item *item = &task->items[i];
                uint8_t *dest = item->flags & KVD_ENTRY_APPROX ? NULL : task_block(task, i);

                v->copies[i] = (struct copy){.place = dest ? item->place : KVD_NOWHERE,
                                             .block = dest,
                                             .checksum = item->checksum,
                                             .error = item->flags & KVD_ENTRY_APPROX ? 0 :
                                                      dest                           ? ENODATA :
                                                                                       ESTALE};
        }
        copies_get(task, v->copies + first, n);
        for (uint32_t i = first; i < first + n; i++) {
                v->errors[i] = v->copies[i].error;
                if (v->copies[i].block && !v->errors[i])
                        move_summary(task, &task->items[i]);
        }
}

static int ask_for(struct reviving *v, uint32_t i) {
        struct task *task = v->task;
        uint8_t *dest = task_block(task, i);

        if (!dest || !in_sketch(&task->items[i])) {
                v->errors[i] = dest ? ENODATA : ESTALE;
                return 0;
        }
        memset(dest, 0, task->shape.block_bytes); /* the state plane is in no sketch */
        move_summary(task, &task->items[i]);
        return sketch_add(&v->use, i, dest);
}

/* If the sketch fails, blocks that have a copy are still revived. */
static int revive_some(void *data, uint32_t first, uint32_t n) {
        struct reviving *v = data;

        revive_exact(v, first, n);
        for (uint32_t i = first; v->sketch == 0 && i < first + n; i++)
                if (v->task->items[i].flags & KVD_ENTRY_APPROX)
                        v->sketch = ask_for(v, i);
        for (uint32_t i = first; v->sketch < 0 && i < first + n; i++)
                if (v->task->items[i].flags & KVD_ENTRY_APPROX)
                        v->errors[i] = (uint32_t)-v->sketch;
        if (v->sketch == 0 && v->use.header) {
                sketch_look_at(&v->use, first, n);
                sketch_query(&v->use);
        }
        return 0;
}

static bool any_approximate(const struct task *task) {
        for (uint32_t i = 0; i < task->job->n_items; i++)
                if (task->items[i].flags & KVD_ENTRY_APPROX)
                        return true;
        return false;
}

static int do_revive(struct task *task) {
        uint32_t n = task->job->n_items;
        struct reviving v = {.task = task,
                             .errors = task_results(task, n, sizeof *v.errors),
                             .copies = task_room(task, n, sizeof *v.copies)};

        if (!v.errors || !v.copies)
                return v.errors ? -ENOMEM : -E2BIG;
        if (any_approximate(task))
                v.sketch = sketch_open(task, &v.use);
        return task_batches(task, TASK_WRITE, revive_some, &v);
}

/* ---- FORGET, REBUILD ------------------------------------------------------------------------- */

/* Exact copies of members of the sketch, and the result for each. */
struct members {
        struct copy *copies;
        uint32_t *errors; /* the job's result */
};

/* A copy is removed from the sketch, or inserted again, only if its checksum is still right. */
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

/* approximate: true: the items that have no copy, and need none; false: those that have one. */
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

        if (r >= 0)
                r = find_members(task, &members);
        if (r < 0)
                return r;
        r = forget(&use, &members, false);
        return r < 0 ? r : forget(&use, &members, true);
}

static int do_rebuild(struct task *task) {
        struct members members;
        struct sketch_use use;
        int r = sketch_open(task, &use);

        if (r >= 0)
                r = find_members(task, &members);
        if (r < 0)
                return r;
        sketch_begin(&use);
        sketch_clear(&use);
        r = add_members(&use, &members, false);
        if (r == 0 && sketch_tokens(&use) && sketch_wants_mean(&use)) {
                r = sketch_add_to_mean(&use);
                if (r == 0)
                        sketch_freeze_mean(&use);
        }
        if (r < 0)
                return r; /* still half written */
        sketch_insert(&use);
        sketch_end(&use, (int64_t)sketch_tokens(&use));
        return 0;
}

const struct job_kind job_spill = {.name = "spill", .access = TASK_NONE, .call = do_spill};
const struct job_kind job_revive = {.name = "revive", .access = TASK_NONE, .call = do_revive};
const struct job_kind job_forget = {.name = "forget", .access = TASK_NONE, .call = do_forget};
const struct job_kind job_rebuild = {.name = "rebuild", .access = TASK_NONE, .call = do_rebuild};
