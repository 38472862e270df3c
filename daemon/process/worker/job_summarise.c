/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Summaries of sealed blocks (ipc/base/summary.h). A row is written once for each generation of its
 * block. Clients and the owner may read it at any time, so its stamp is 0 while it is written.
 *
 * The channels of labels are chosen by the first job of a space, and never change: for each layer
 * and head those with the largest mean |k|. The list of a head ascends, so its last number is above
 * 0 (unless it is the only one). It is written last, and marks the list as complete. If a worker
 * dies in between, the next one chooses for the remaining heads.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/compare.h"
#include "daemon/process/worker/jobs.h"
#include "daemon/process/worker/score.h"
#include "daemon/process/worker/summarise.h"
#include "kernels/hshare.h"

/* ---- channels -------------------------------------------------------------------------------- */

static uint16_t *channels_of(const struct task *task, uint32_t layer, uint32_t head) {
        const struct worker_space *w = task->space;

        return (uint16_t *)w->summaries +
               ((size_t)layer * task->shape.heads + head) * w->summary.channels;
}

static bool is_chosen(const struct task *task, const uint16_t *channels) {
        uint32_t n = task->space->summary.channels;

        return n < 2 || __atomic_load_n(&channels[n - 1], __ATOMIC_ACQUIRE);
}

bool summary_has_channels(const struct task *task) {
        const struct shape *s = &task->shape;

        for (uint32_t i = 0; i < s->layers * s->heads; i++)
                if (!is_chosen(task, channels_of(task, i / s->heads, i % s->heads)))
                        return false;
        return true;
}

struct choice {
        struct task *task;
        float *weights;   /* [thread][dim] */
        uint16_t *chosen; /* [thread][channels] */
        float *ones;      /* [dim]: 1.0 each, so that |k| is added */
};

static void choose(void *data, uint32_t i, uint32_t thread) {
        struct choice *choice = data;
        const struct task *task = choice->task;
        const struct shape *s = &task->shape;
        uint32_t n = task->space->summary.channels, layer = i / s->heads, head = i % s->heads;
        uint16_t *to = channels_of(task, layer, head),
                 *chosen = choice->chosen + (size_t)thread * n;
        float *weights = choice->weights + (size_t)thread * s->dim;

        if (is_chosen(task, to))
                return;
        memset(weights, 0, s->dim * sizeof *weights);
        for (uint32_t k = 0; k < task->job->n_items; k++) {
                const uint8_t *block = task_block(task, k);

                if (block)
                        task->ops->hshare->weigh(weights, choice->ones, 0, 1,
                                                 head_keys(s, block, layer, head), s->token_stride,
                                                 s->type, MIN(task->items[k].n_tokens, s->tokens),
                                                 s->dim);
        }
        kvd_label_channels(weights, s->dim, n, chosen);
        memcpy(to, chosen, (n - 1) * sizeof *to);
        __atomic_store_n(&to[n - 1], chosen[n - 1], __ATOMIC_RELEASE);
}

int summary_choose_channels(struct task *task) {
        const struct shape *s = &task->shape;
        uint32_t threads = threads_count(task->threads);
        struct choice choice = {.task = task};

        choice.weights = task_room(task, (size_t)threads * s->dim, sizeof(float));
        choice.chosen = task_room(task, (size_t)threads * task->space->summary.channels,
                                  sizeof(uint16_t));
        choice.ones = task_room(task, s->dim, sizeof(float));
        if (!choice.weights || !choice.chosen || !choice.ones)
                return -ENOMEM;
        for (uint32_t d = 0; d < s->dim; d++)
                choice.ones[d] = 1.0f;
        task_share(task, s->layers * s->heads,
                   task->job->n_items * s->block_bytes / s->layers / s->heads, choose, &choice);
        return 0;
}

/* ---- a row ----------------------------------------------------------------------------------- */

/* The bytes behind a block's last token were never written, and count as zeros. */
static const uint8_t *whole_layer(const struct shape *s, const uint8_t *planes, uint32_t n_tokens,
                                  uint8_t *room) {
        if (n_tokens == s->tokens)
                return planes;
        memset(room, 0, 2 * s->plane);
        for (uint32_t v = 0; v < 2; v++)
                for (uint32_t h = 0; h < s->heads; h++)
                        for (uint32_t t = 0; t < n_tokens; t++) {
                                size_t at = v * s->plane + h * s->head_stride + t * s->token_stride;

                                memcpy(room + at, planes + at, s->row);
                        }
        return room;
}

static void put_norms(const struct task *task, const uint8_t *block, uint32_t n_tokens, float *to,
                      uint8_t *room) {
        const struct shape *s = &task->shape;

        for (uint32_t l = 0; l < s->layers; l++)
                compare_norms(task, 1, whole_layer(s, layer_keys(s, block, l), n_tokens, room),
                              to + 2 * l);
}

static void put_anchors(const struct task *task, const uint8_t *block, uint32_t n_tokens, float *to,
                        uint8_t *room) {
        const struct shape *s = &task->shape;

        memset(to, 0, (size_t)s->layers * s->heads * s->dim * sizeof *to);
        score_add_anchors(task, block, n_tokens, to, (float *)room);
}

static void put_labels(const struct task *task, const uint8_t *block, uint32_t n_tokens,
                       uint8_t *to) {
        const struct shape *s = &task->shape;
        uint32_t n = task->space->summary.channels;
        size_t label = task->space->summary.label_bytes;

        for (uint32_t l = 0; l < s->layers; l++)
                for (uint32_t h = 0; h < s->heads; h++, to += s->tokens * label) {
                        task->ops->hshare->label(to, head_keys(s, block, l, h), s->token_stride,
                                                 s->type, n_tokens, s->dim, channels_of(task, l, h),
                                                 n);
                        memset(to + n_tokens * label, 0, (s->tokens - n_tokens) * label);
                }
}

static size_t summary_room_bytes(const struct task *task) {
        const struct shape *s = &task->shape;

        return ALIGN_UP(MAX(2 * s->plane, score_scratch(task) * sizeof(float)), 64);
}

static void summary_write(const struct task *task, const uint8_t *block, uint32_t n_tokens,
                          uint32_t generation, uint8_t *row, uint8_t *room) {
        const struct kvd_summary *layout = &task->space->summary;

        shm_write_begin((shm_u64 *)row, 0);
        put_norms(task, block, n_tokens, (float *)(row + layout->norms_off), room);
        put_anchors(task, block, n_tokens, (float *)(row + layout->anchors_off), room);
        put_labels(task, block, n_tokens, row + layout->labels_off);
        shm_write_end((shm_u64 *)row, (uint64_t)generation << 32 | KVD_SUMMARY_MADE);
}

/* ---- the job --------------------------------------------------------------------------------- */

struct summaries {
        struct task *task;
        uint8_t *rooms;
        size_t room_bytes;
};

static void summarise(void *data, uint32_t i, uint32_t thread) {
        struct summaries *all = data;
        const struct kvd_job_item *item = &all->task->items[i];
        const uint8_t *block = task_block(all->task, i);
        uint8_t *row = task_row(all->task, item->row);

        if (block && row)
                summary_write(all->task, block, MIN(item->n_tokens, all->task->shape.tokens),
                              kvd_ref_generation(item->ref), row,
                              all->rooms + thread * all->room_bytes);
}

#define SUMMARY_PASSES 4u /* over a block */

static int do_summarise(struct task *task) {
        struct summaries all = {.task = task, .room_bytes = summary_room_bytes(task)};
        int r = task_needs_numbers(task);

        if (r == 0)
                r = summary_choose_channels(task);
        if (r < 0)
                return r;
        all.rooms = task_room(task, threads_count(task->threads), all.room_bytes);
        if (!all.rooms)
                return -ENOMEM;
        task_share(task, task->job->n_items, SUMMARY_PASSES * task->shape.block_bytes, summarise,
                   &all);
        return 0;
}

const struct job_kind job_summarise = {.name = "summarise",
                                       .access = TASK_READ,
                                       .call = do_summarise,
                                       .on_device = summarise_on_device};
