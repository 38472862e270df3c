/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A sequence's anchor on the GPU, as score_anchors makes it. The processor adds up the anchors in
 * summaries, and the GPU reads only the blocks that have no summary. The anchor stays on the GPU.
 */

#include <errno.h>

#include "daemon/process/worker/score.h"
#include "ipc/base/format.h"

static uint64_t sums_bytes(const struct shape *s) {
        return (uint64_t)s->layers * s->heads * s->dim * sizeof(float);
}

static uint64_t counts_bytes(const struct shape *s) {
        return (uint64_t)s->layers * s->heads * sizeof(uint32_t);
}

static uint32_t item_tokens(const struct task *task, uint32_t i) {
        return MIN(task->items[i].n_tokens, task->shape.tokens);
}

/* Adds the anchors in the item's summary. True: it has none, and its keys must be read. */
static bool add_summary(struct device_anchor *a, uint32_t i) {
        const struct task *task = a->task;
        const struct kvd_job_item *item = &task->items[i];
        const uint8_t *row = task_summary(task, item->row, kvd_ref_generation(item->ref));
        const float *anchors = row ? (const float *)(row + task->space->summary.anchors_off) : NULL;

        if (item->flags == KVD_JOB_DEST)
                return false;
        for (uint64_t k = 0; anchors && k < sums_bytes(&task->shape) / sizeof(float); k++)
                a->sums[k] += anchors[k];
        return !row;
}

static struct gpu_key_rows keys_of(const struct task *task) {
        const struct shape *s = &task->shape;
        size_t element = kvd_is_narrow(s->type) ? 1 : s->row / s->dim;

        return (struct gpu_key_rows){.blocks = {.base = task->space->device_base,
                                                .block_bytes = s->block_bytes},
                                     .layer_stride = 2 * s->plane,
                                     .head_stride = s->head_stride / element,
                                     .token_stride = s->token_stride / element,
                                     .layers = s->layers,
                                     .heads = s->heads,
                                     .dim = s->dim,
                                     .per_block = s->tokens,
                                     .number = s->type};
}

/*
 * Finds the next run of consecutive tokens behind keys->to: all blocks of a run are full, except
 * for the last one. False if none is left.
 */
static bool next_run(const struct task *task, struct gpu_scores *keys) {
        uint32_t each = task->shape.tokens, n = task->job->n_items, i = DIV_UP(keys->to, each);

        while (i < n && item_tokens(task, i) == 0)
                i++;
        keys->from = keys->to = i * each;
        for (; i < n && keys->to % each == 0 && item_tokens(task, i); i++)
                keys->to += item_tokens(task, i);
        return keys->to > keys->from;
}

static uint64_t scratch_bytes(const struct device_anchor *a) {
        struct gpu_scores run = a->keys;
        uint64_t most = 0;

        for (run.to = 0; next_run(a->task, &run);)
                most = MAX(most, gpu_score_scratch(&run));
        return most;
}

int anchor_find(struct device_anchor *a, struct task *task) {
        uint32_t n = task->job->n_items, *ids = task_ids(task);

        if (!n || !task->shape.type || task->shape.dim > GPU_SCORE_DIM)
                return -ENOSYS;
        *a = (struct device_anchor){.task = task, .keys.keys = keys_of(task)};
        a->ids = task_room(task, 2 * (size_t)n, sizeof *a->ids);
        a->sums = task_room(task, sums_bytes(&task->shape), 1);
        a->zeros = task_room(task, counts_bytes(&task->shape), 1);
        if (!ids || !a->ids || !a->sums || !a->zeros)
                return -ENOMEM;
        for (uint32_t i = 0; i < n; i++) {
                a->ids[i] = ids[i];
                a->ids[n + i] = add_summary(a, i) ? ids[i] : GPU_NO_BLOCK;
        }
        return 0;
}

void anchor_lay_out(struct device_anchor *a, cu_address *next) {
        const struct task *task = a->task;

        a->keys.keys.blocks.ids = device_part(next,
                                              2 * (uint64_t)task->job->n_items * sizeof *a->ids);
        a->keys.sums = device_part(next, sums_bytes(&task->shape));
        a->keys.counts = device_part(next, counts_bytes(&task->shape));
        a->keys.scratch = device_part(next, scratch_bytes(a));
}

static int upload(struct device_anchor *a) {
        struct worker_device *device = a->task->device;
        const struct shape *s = &a->task->shape;
        uint64_t n = 2 * (uint64_t)a->task->job->n_items;
        int r = device_write(device, a->keys.keys.blocks.ids, a->ids, n * sizeof *a->ids);

        if (r == 0)
                r = device_write(device, a->keys.sums, a->sums, sums_bytes(s));
        return r == 0 ? device_write(device, a->keys.counts, a->zeros, counts_bytes(s)) : r;
}

static int add_keys(const struct device_anchor *a, struct gpu *gpu) {
        struct gpu_scores run = a->keys;
        int r = 0;

        run.keys.blocks.ids += a->task->job->n_items * sizeof *a->ids;
        for (run.to = 0; r == 0 && next_run(a->task, &run);)
                r = gpu_anchor(gpu, a->task->device->stream, &run);
        return r;
}

int anchor_make(struct device_anchor *a, struct gpu *gpu) {
        struct task *task = a->task;
        uint32_t n = 0;
        int r = upload(a);

        for (uint32_t i = 0; i < task->job->n_items; i++)
                n += a->ids[task->job->n_items + i] != GPU_NO_BLOCK;
        if (r == 0 && n)
                r = add_keys(a, gpu);
        if (device_finish(task->device) < 0)
                return task_refuse(task, -EIO, "%s", task->device->why.line);
        task_spend(task, n * task->shape.block_bytes);
        return r;
}
