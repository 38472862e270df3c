/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KeyDiff on blocks: how different a block's keys are from the other keys of the sequence. The
 * sequence's anchor is the sum of its blocks' anchors, from their summaries or computed here. A
 * block's score is the mean over layers and heads of its tokens' largest score, and its priority is
 * (1 + score) / 2. A block that is not resident has priority 0, and adds to the anchor only if it
 * has a summary.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/jobs.h"
#include "daemon/process/worker/score.h"
#include "kernels/keydiff.h"

struct scores {
        struct task *task;
        const float *anchors; /* [layer][head][dim]: of the sequence */
        /* [thread]: scratch of the kernels, then scores [head][token], best [head] */
        float *rooms;
        size_t room;    /* floats */
        size_t scratch; /* floats */
        float *result;  /* [item] */
};

static struct kvd_key_rows keys_of(const struct task *task, const uint8_t *const *block,
                                   uint32_t layer) {
        const struct shape *s = &task->shape;

        return (struct kvd_key_rows){.blocks = block,
                                     .offset = layer * 2 * s->plane,
                                     .head_stride = s->head_stride,
                                     .token_stride = s->token_stride,
                                     .per_block = s->tokens,
                                     .heads = s->heads,
                                     .dim = s->dim,
                                     .type = s->type};
}

static uint32_t item_tokens(const struct task *task, uint32_t i) {
        return MIN(task->items[i].n_tokens, task->shape.tokens);
}

/* ---- anchors --------------------------------------------------------------------------------- */

size_t score_scratch(const struct task *task) {
        const struct kvd_key_rows keys = keys_of(task, NULL, 0);

        return kvd_keydiff_scratch(&keys) + keys.heads;
}

void score_add_anchors(const struct task *task, const uint8_t *block, uint32_t n_tokens,
                       float *sums, float *scratch) {
        const struct shape *s = &task->shape;
        uint32_t *counts = (uint32_t *)(scratch + score_scratch(task)) - s->heads;

        memset(counts, 0, s->heads * sizeof *counts);
        for (uint32_t l = 0; l < s->layers; l++) {
                const struct kvd_key_rows keys = keys_of(task, &block, l);

                task->ops->keydiff->anchor(sums + (size_t)l * s->heads * s->dim, counts, &keys, 0,
                                           n_tokens, scratch);
        }
}

static void add_item(const struct task *task, uint32_t i, float *sums, float *scratch) {
        const struct kvd_job_item *item = &task->items[i];
        const struct shape *s = &task->shape;
        const uint8_t *row = task_summary(task, item->row, kvd_ref_generation(item->ref)), *block;
        size_t n = (size_t)s->layers * s->heads * s->dim;

        if (row) {
                const float *anchors = (const float *)(row + task->space->summary.anchors_off);

                for (size_t d = 0; d < n; d++)
                        sums[d] += anchors[d];
                return;
        }
        block = task_block(task, i);
        if (block)
                score_add_anchors(task, block, item_tokens(task, i), sums, scratch);
}

float *score_anchors(struct task *task) {
        const struct shape *s = &task->shape;
        float *sums = task_room(task, (size_t)s->layers * s->heads * s->dim, sizeof *sums),
              *scratch = task_room(task, score_scratch(task), sizeof *scratch);

        if (!sums || !scratch)
                return NULL;
        for (uint32_t i = 0; i < task->job->n_items; i++)
                if (task->items[i].flags != KVD_JOB_DEST) {
                        add_item(task, i, sums, scratch);
                        task_spend(task, s->block_bytes);
                }
        return sums;
}

/* ---- scores ---------------------------------------------------------------------------------- */

void score_layer(const struct task *task, const uint8_t *block, uint32_t n_tokens, uint32_t layer,
                 const float *anchors, float *to, size_t stride, float *scratch) {
        const struct kvd_key_rows keys = keys_of(task, &block, layer);

        task->ops->keydiff->score(to, stride, &keys, 0, n_tokens,
                                  anchors + (size_t)layer * keys.heads * keys.dim, scratch);
}

/* Mean over the layers, except those without a valid key (less than -2). */
struct mean {
        float sum;
        uint32_t layers;
};

static void add_layer(struct mean *mean, float score) {
        if (score >= -2.0f) {
                mean->sum += score;
                mean->layers++;
        }
}

static float priority_of(const struct task *task, const struct mean *m) {
        float mean = m->layers ? m->sum / (float)m->layers : -1.0f, priority;

        task->ops->keydiff->priority(&priority, &mean, 1);
        return priority;
}

static void score(void *data, uint32_t i, uint32_t thread) {
        const struct scores *all = data;
        const struct task *task = all->task;
        const struct shape *s = &task->shape;
        const uint8_t *block = task_block(task, i);
        uint32_t n = item_tokens(task, i);
        float *scratch = all->rooms + thread * all->room, *scores = scratch + all->scratch;
        float *best = scores + (size_t)s->heads * s->tokens, of_layer;
        struct mean mean = {0};

        for (uint32_t l = 0; block && n && l < s->layers; l++) {
                score_layer(task, block, n, l, all->anchors, scores, s->tokens, scratch);
                task->ops->keydiff->blocks(&of_layer, best, scores, s->tokens, s->heads, n,
                                           s->tokens);
                add_layer(&mean, of_layer);
        }
        all->result[i] = priority_of(task, &mean);
}

static int do_score(struct task *task) {
        const struct shape *s = &task->shape;
        struct scores all = {.task = task};
        int r = task_needs_numbers(task);

        if (r < 0)
                return r;
        all.scratch = ALIGN_UP(score_scratch(task), 16);
        all.room = all.scratch + (size_t)s->heads * s->tokens + s->heads;
        all.room = ALIGN_UP(all.room, 16);
        all.result = task_results(task, task->job->n_items, sizeof(float));
        if (!all.result)
                return -E2BIG;
        all.anchors = score_anchors(task);
        all.rooms = task_room(task, threads_count(task->threads) * all.room, sizeof(float));
        if (!all.anchors || !all.rooms)
                return -ENOMEM;
        task_share(task, task->job->n_items, s->block_bytes, score, &all);
        return 0;
}

/* ---- scores on a GPU ------------------------------------------------------------------------- */

/*
 * The GPU's kernels read the keys, and the processor gets one number for each layer and block. All
 * tokens are one run, so only the last block may be partly filled.
 */

struct device_scores {
        struct task *task;
        struct device_anchor anchor;
        uint32_t n, n_tokens; /* number of items, and of their tokens */
        uint32_t most;        /* blocks of a launch */
        float *means;         /* [layer][block of a launch] */
        cu_address next, d_means, d_best;
        struct gpu_scores keys;
};

static int count_tokens(struct device_scores *d) {
        struct task *task = d->task;
        const struct shape *s = &task->shape;

        d->n = task->job->n_items;
        for (uint32_t i = 0; i + 1 < d->n; i++)
                if (task->items[i].n_tokens < s->tokens)
                        return -ENOSYS;
        if (!d->n || !task->items[d->n - 1].n_tokens)
                return -ENOSYS;
        d->n_tokens = (d->n - 1) * s->tokens + item_tokens(task, d->n - 1);
        d->most = (uint32_t)MIN(MAX(task_launch_bytes(task) / s->block_bytes, 1), d->n);
        d->means = task_room(task, (size_t)s->layers * d->most, sizeof *d->means);
        return d->means ? 0 : -ENOMEM;
}

/* Called twice (device_part). */
static void lay_out(struct device_scores *d, cu_address from) {
        const struct shape *s = &d->task->shape;
        uint64_t heads = (uint64_t)s->layers * s->heads;

        d->next = from;
        anchor_lay_out(&d->anchor, &d->next);
        d->keys = d->anchor.keys;
        d->keys.stride = (uint64_t)d->most * s->tokens;
        d->keys.scores = device_part(&d->next, heads * d->keys.stride * sizeof(float));
        d->d_means = device_part(&d->next, (uint64_t)s->layers * d->most * sizeof(float));
        d->d_best = device_part(&d->next, (uint64_t)s->heads * d->most * sizeof(float));
}

static int make_room(struct device_scores *d) {
        cu_address room;

        lay_out(d, 0);
        room = device_room(d->task->device, d->next);
        if (!room)
                return -ENOSYS;
        lay_out(d, room);
        return 0;
}

static int launch(const struct device_scores *d, struct gpu *gpu, const struct gpu_scores *a) {
        const struct shape *s = &d->task->shape;
        cu_stream stream = d->task->device->stream;
        uint32_t n = a->to - a->from, blocks = DIV_UP(n, s->tokens);
        int r = gpu_score(gpu, stream, a);

        for (uint32_t l = 0; r == 0 && l < s->layers; l++) {
                struct gpu_block_scores b = {.mean = d->d_means +
                                                     (uint64_t)l * blocks * sizeof(float),
                                             .best = d->d_best,
                                             .scores = a->scores + (uint64_t)l * s->heads *
                                                                           a->stride *
                                                                           sizeof(float),
                                             .stride = a->stride,
                                             .heads = s->heads,
                                             .n = n,
                                             .per_block = s->tokens};

                r = gpu_block_scores(gpu, stream, &b);
        }
        return r;
}

static void put_results(const struct device_scores *d, uint32_t n, float *result) {
        for (uint32_t i = 0; i < n; i++) {
                struct mean mean = {0};

                for (uint32_t l = 0; l < d->task->shape.layers; l++)
                        add_layer(&mean, d->means[(size_t)l * n + i]);
                result[i] = priority_of(d->task, &mean);
        }
}

/* Scores n blocks, from block first on. */
static int score_some(struct device_scores *d, struct gpu *gpu, uint32_t first, uint32_t n,
                      float *result) {
        const struct shape *s = &d->task->shape;
        struct worker_device *device = d->task->device;
        struct gpu_scores a = d->keys;
        int r;

        a.from = first * s->tokens;
        a.to = MIN(a.from + n * s->tokens, d->n_tokens);
        r = launch(d, gpu, &a);
        if (r == 0)
                r = device_read(device, d->means, d->d_means,
                                (uint64_t)s->layers * n * sizeof(float));
        if (device_finish(device) < 0)
                return task_refuse(d->task, -EIO, "%s", device->why.line);
        if (r == 0)
                put_results(d, n, result);
        return r;
}

static int score_all(struct device_scores *d, struct gpu *gpu) {
        float *result = task_results(d->task, d->n, sizeof *result);
        int r = result ? anchor_make(&d->anchor, gpu) : -E2BIG;

        for (uint32_t first = 0, n; r == 0 && first < d->n; first += n) {
                n = MIN(d->most, d->n - first);
                r = score_some(d, gpu, first, n, result + first);
                if (r == 0)
                        task_spend(d->task, n * d->task->shape.block_bytes);
        }
        return r;
}

/* -ENOSYS: the GPU cannot do it, and nothing was done. */
static int score_on_device(struct task *task) {
        struct device_scores d = {.task = task};
        struct gpu *gpu = device_kernels(task->device);
        int r = gpu ? count_tokens(&d) : -ENOSYS;

        if (r == 0)
                r = anchor_find(&d.anchor, task);
        if (r == 0)
                r = make_room(&d);
        if (r == 0)
                r = score_all(&d, gpu);
        return r < 0 && r != -EIO && r != -E2BIG ? -ENOSYS : r; /* the processor can do it */
}

const struct job_kind job_score = {.name = "score",
                                   .access = TASK_READ,
                                   .call = do_score,
                                   .on_device = score_on_device};
