/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decodes a job from its arguments, checks it, and calls its kind: the GPU's kernels if there are
 * any for it, or else the processor, with the blocks that it reads and writes staged. methods.def
 * lists the kinds.
 */

#include "daemon/process/worker/jobs.h"

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/spaces.h"
#include "ipc/base/format.h"

static const struct job_kind *const kinds[] = {
#define KVD_JOB_KIND(NAME, name, number) [KVD_JOB_##NAME] = &job_##name,
#include "ipc/base/methods.def"
};

static struct shape shape_of(const struct kvd_index *ix) {
        static const enum kvd_number types[KVD_dtype_end] =
                {[KVD_dtype_f32] = KVD_NUMBER_F32,   [KVD_dtype_f16] = KVD_NUMBER_F16,
                 [KVD_dtype_bf16] = KVD_NUMBER_BF16, [KVD_dtype_q8] = KVD_NUMBER_Q8,
                 [KVD_dtype_q4] = KVD_NUMBER_Q4,     [KVD_dtype_e4m3] = KVD_NUMBER_E4M3,
                 [KVD_dtype_e5m2] = KVD_NUMBER_E5M2};
        const struct kvd_shape *g = &ix->geometry;
        size_t row = kvd_format_row(g->dtype, g->head_dim);
        bool hnd = g->order == KVD_order_hnd;

        return (struct shape){
                .layers = g->layers / g->layer_groups,
                .heads = g->kv_heads,
                .tokens = g->block_tokens,
                .dim = g->head_dim,
                .type = types[g->dtype],
                .row = row,
                .head_stride = hnd ? g->block_tokens * row : row,
                .token_stride = hnd ? row : g->kv_heads * row,
                .plane = g->kv_heads * g->block_tokens * row,
                .block_bytes = ix->block_bytes,
        };
}

static int find_arguments(struct task *task, uint64_t bytes) {
        const struct kvd_job *job = task->job;
        uint64_t need = sizeof *job + job->n_items * sizeof *task->items +
                        job->n_steps * sizeof *task->steps + job->n_tokens * sizeof *task->tokens;

        if (need > bytes || job->kind >= ARRAY_SIZE(kinds) || !kinds[job->kind])
                return task_refuse(task, -EPROTO,
                                   "a job of kind %u that needs %llu bytes, not %llu", job->kind,
                                   (unsigned long long)need, (unsigned long long)bytes);
        task->items = (const void *)(job + 1);
        task->steps = (const void *)(task->items + job->n_items);
        task->tokens = (const void *)(task->steps + job->n_steps);
        return 0;
}

static int find_memory(struct task *task, struct spaces *spaces) {
        const struct kvd_job *job = task->job;

        task->space = spaces_find(spaces, job->space);
        if (!task->space)
                return task_refuse(task, -EPROTO, "a job of a space that was not sent");
        task->device = &spaces->device;
        task->shape = shape_of(task->space->ix);
        if (!job->sketch)
                return 0;
        if (!spaces->sketch || spaces->sketch->number != job->sketch ||
            spaces->sketch->space != job->space)
                return task_refuse(task, -EPROTO, "a job of a sketch that was not sent");
        task->sketch = sketch_take(spaces->sketch);
        return 0;
}

static int call(const struct job_kind *kind, struct task *task) {
        int r = kind->on_device && task_on_device(task) ? kind->on_device(task) : -ENOSYS;

        if (r != -ENOSYS)
                return r;
        r = task_stage(task, kind->access);
        if (r == 0)
                r = kind->call(task);
        return r == 0 ? task_unstage(task, kind->access) : r;
}

int job_run(struct task *task, struct spaces *spaces, uint64_t bytes) {
        const struct job_kind *kind;
        int r = find_arguments(task, bytes);

        if (r == 0)
                r = find_memory(task, spaces);
        if (r < 0)
                return r;
        kind = kinds[task->job->kind];
        r = call(kind, task);
        if (r < 0 && !task->why.line[0])
                task_refuse(task, r, "%s: %s", kind->name, strerror(-r));
        return r;
}
