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

static struct kvd_key_rows keys_of(const struct task *task, const uint8_t *const *block) {
        const struct shape *s = &task->shape;

        return (struct kvd_key_rows){.blocks = block,
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

struct sums {
        struct task *task;
        float *anchors;
        float *scratch;
        uint32_t *counts; /* [head] */
};

static void add_own(const struct sums *all, uint32_t i, const uint8_t *block) {
        const struct task *task = all->task;
        const struct shape *s = &task->shape;
        struct kvd_key_rows keys = keys_of(task, &block);

        for (uint32_t l = 0; l < s->layers; l++) {
                keys.offset = l * 2 * s->plane;
                task->ops->keydiff->anchor(all->anchors + (size_t)l * s->heads * s->dim,
                                           all->counts, &keys, 0, item_tokens(task, i),
                                           all->scratch);
        }
}

static void add_anchor(const struct sums *all, uint32_t i) {
        const struct kvd_job_item *item = &all->task->items[i];
        const struct shape *s = &all->task->shape;
        const uint8_t *row = task_summary(all->task, item->row, kvd_ref_generation(item->ref)),
                      *block;
        size_t n = (size_t)s->layers * s->heads * s->dim;

        if (row) {
                const float *anchors = (const float *)(row + all->task->space->summary.anchors_off);

                for (size_t d = 0; d < n; d++)
                        all->anchors[d] += anchors[d];
                return;
        }
        block = task_block(all->task, i);
        if (block)
                add_own(all, i, block);
}

float *score_anchors(struct task *task) {
        const struct shape *s = &task->shape;
        struct kvd_key_rows keys = keys_of(task, NULL);
        struct sums all = {.task = task};

        all.anchors = task_room(task, (size_t)s->layers * s->heads * s->dim, sizeof *all.anchors);
        all.scratch = task_room(task, kvd_keydiff_scratch(&keys), sizeof *all.scratch);
        all.counts = task_room(task, s->heads, sizeof *all.counts);
        if (!all.anchors || !all.scratch || !all.counts)
                return NULL;
        for (uint32_t i = 0; i < task->job->n_items; i++)
                if (task->items[i].flags != KVD_JOB_DEST) {
                        add_anchor(&all, i);
                        task_spend(task, s->block_bytes);
                }
        return all.anchors;
}

/* ---- scores ---------------------------------------------------------------------------------- */

/* Mean over the layers, except those without a valid key (less than -2). */
static void score(void *data, uint32_t i, uint32_t thread) {
        const struct scores *all = data;
        const struct task *task = all->task;
        const struct shape *s = &task->shape;
        const uint8_t *block = task_block(task, i);
        uint32_t n = item_tokens(task, i), layers = 0;
        float *scratch = all->rooms + thread * all->room, *scores = scratch + all->scratch;
        float *best = scores + (size_t)s->heads * s->tokens, mean, sum = 0.0f;
        struct kvd_key_rows keys = keys_of(task, &block);

        for (uint32_t l = 0; block && n && l < s->layers; l++) {
                keys.offset = l * 2 * s->plane;
                task->ops->keydiff->score(scores, s->tokens, &keys, 0, n,
                                          all->anchors + (size_t)l * s->heads * s->dim, scratch);
                task->ops->keydiff->blocks(&mean, best, scores, s->tokens, s->heads, n, s->tokens);
                if (mean >= -2.0f) {
                        sum += mean;
                        layers++;
                }
        }
        mean = layers ? sum / (float)layers : -1.0f;
        task->ops->keydiff->priority(&all->result[i], &mean, 1);
}

static int do_score(struct task *task) {
        const struct shape *s = &task->shape;
        struct scores all = {.task = task};
        struct kvd_key_rows keys = keys_of(task, NULL);
        int r = task_needs_numbers(task);

        if (r < 0)
                return r;
        all.scratch = ALIGN_UP(kvd_keydiff_scratch(&keys), 16);
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

const struct job_kind job_score = {.name = "score",
                                   .access = TASK_READ,
                                   .call = do_score,
                                   .on_device = score_on_device};
