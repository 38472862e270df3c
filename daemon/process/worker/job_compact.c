/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compaction. Each layer and KV head chooses the tokens of the source blocks that have the highest
 * scores, and moves their keys and values into the destination blocks, packed, in order of position.
 * The scores are the client's, or those of job_score.c by the anchor of the whole sequence. The
 * rest of the last destination and the state planes are zeros. Threads share out the layers.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/compact.h"
#include "daemon/process/worker/jobs.h"
#include "daemon/process/worker/score.h"
#include "kernels/block.h"

/* One block at a time, since blocks need not be full. */
static void score_tokens(const struct packing *p, uint32_t layer, float *scores, float *scratch) {
        uint32_t at = 0;

        for (uint32_t i = 0; i < p->n_from; i++) {
                uint32_t n = MIN(p->task->items[i].n_tokens, p->task->shape.tokens);

                score_layer(p->task, p->from[i], n, layer, p->anchors, scores + at, p->n_tokens,
                            scratch);
                at += n;
        }
}

/* The client can write its blocks at any time, so that tokens are chosen by a copy. */
static void copy_scores(const struct packing *p, uint32_t layer, float *scores) {
        uint64_t bytes = score_bytes(p), first = layer * bytes;

        for (uint64_t done = 0; done < bytes;) {
                struct score_piece piece = score_piece(p, first + done, first + bytes);

                memcpy((uint8_t *)scores + done, p->scores[piece.block] + piece.offset,
                       piece.bytes);
                done += piece.bytes;
        }
}

static void move(const struct packing *p, uint32_t layer, uint32_t head, const uint32_t *chosen) {
        const struct shape *s = &p->task->shape;
        struct kvd_slots from = {.blocks = p->from,
                                 .stride = s->token_stride,
                                 .per_block = s->tokens,
                                 .bytes = s->row};
        struct kvd_slots to = from;

        to.blocks = p->to;
        for (uint32_t plane = 0; plane < 2; plane++) {
                from.offset = to.offset = (2 * layer + plane) * s->plane + head * s->head_stride;
                p->task->ops->block->compact(&to, &from, chosen, p->keep);
        }
}

static void pack_layer(void *data, uint32_t layer, uint32_t thread) {
        const struct packing *p = data;
        const struct shape *s = &p->task->shape;
        float *scores = (float *)(p->rooms + thread * p->room),
              *scratch = scores + (size_t)s->heads * p->n_tokens;
        uint32_t *chosen = (uint32_t *)(scratch + p->scratch);

        if (p->n_scores)
                copy_scores(p, layer, scores);
        else
                score_tokens(p, layer, scores, scratch);
        for (uint32_t h = 0; h < s->heads; h++) {
                p->task->ops->block->topk(chosen, scores + (size_t)h * p->n_tokens, p->n_tokens,
                                          p->keep, true, chosen + p->n_tokens);
                for (uint32_t i = 0; i < p->keep; i++)
                        chosen[i] = p->place[chosen[i]];
                move(p, layer, h, chosen);
        }
}

/* ---- input ----------------------------------------------------------------------------------- */

static int find_places(struct packing *p) {
        struct task *task = p->task;

        p->place = task_room(task, p->n_tokens, sizeof *p->place);
        for (uint32_t i = 0, at = 0; p->place && i < p->n_from; i++)
                for (uint32_t t = 0; t < MIN(task->items[i].n_tokens, task->shape.tokens); t++)
                        p->place[at++] = i * task->shape.tokens + t;
        return p->place ? 0 : -ENOMEM;
}

static int count(struct packing *p) {
        struct task *task = p->task;

        p->n_from = task->job->param[0];
        p->n_to = task->job->param[1];
        p->keep = task->job->param[2];
        p->n_scores = task->job->param[3];
        if ((uint64_t)p->n_from + p->n_to + p->n_scores > task->job->n_items)
                return task_refuse(task, -EPROTO, "blocks beyond the job's items");
        for (uint32_t i = 0; i < p->n_from; i++)
                p->n_tokens += MIN(task->items[i].n_tokens, task->shape.tokens);
        if (!p->keep || p->keep > p->n_tokens || DIV_UP(p->keep, task->shape.tokens) != p->n_to)
                return task_refuse(task, -EPROTO, "%u tokens of %u in %u blocks", p->keep,
                                   p->n_tokens, p->n_to);
        if (p->n_scores &&
            task->shape.layers * score_bytes(p) > p->n_scores * task->shape.block_bytes)
                return task_refuse(task, -EPROTO, "scores of %u tokens in %u blocks", p->n_tokens,
                                   p->n_scores);
        return find_places(p);
}

static int find_blocks(struct packing *p) {
        struct task *task = p->task;

        for (uint32_t i = 0; i < p->n_from + p->n_to + p->n_scores; i++) {
                p->from[i] = task_block(task, i);
                if (!p->from[i])
                        return task_refuse(task, -ESTALE, "a block is gone");
        }
        for (uint32_t i = 0; i < p->n_to; i++) {
                memset(p->to[i], 0, task->shape.block_bytes);
                task_spend(task, task->shape.block_bytes);
        }
        return 0;
}

static int find_anchors(struct packing *p) {
        p->scratch = ALIGN_UP(score_scratch(p->task), 16);
        p->anchors = score_anchors(p->task);
        return p->anchors ? 0 : -ENOMEM;
}

static int make_rooms(struct packing *p) {
        struct task *task = p->task;

        if (!p->n_scores && find_anchors(p) < 0)
                return -ENOMEM;
        p->room =
                ALIGN_UP(((size_t)task->shape.heads * p->n_tokens + p->scratch + 2 * p->n_tokens) *
                                 sizeof(float),
                         64);
        p->from = task_room(task, (size_t)p->n_from + p->n_to + p->n_scores, sizeof *p->from);
        p->to = p->from + p->n_from;
        p->scores = p->to + p->n_to;
        p->rooms = task_room(task, threads_count(task->threads), p->room);
        return p->from && p->rooms ? 0 : -ENOMEM;
}

static int begin(struct packing *p) {
        int r = count(p);

        if (r == 0 && !p->n_scores)
                r = task_needs_numbers(p->task);
        if (r == 0 && !task_results(p->task, 1, sizeof(uint32_t)))
                r = -E2BIG;
        return r;
}

static int do_compact(struct task *task) {
        struct packing p = {.task = task};
        int r = begin(&p);

        if (r == 0)
                r = make_rooms(&p);
        if (r == 0)
                r = find_blocks(&p);
        if (r < 0)
                return r;
        task_share(task, task->shape.layers, 2 * task->shape.plane * (p.n_from + p.n_to),
                   pack_layer, &p);
        return 0;
}

static int do_compact_on_device(struct task *task) {
        struct packing p = {.task = task};
        int r = begin(&p);

        return r < 0 ? r : pack_on_device(&p);
}

const struct job_kind job_compact = {.name = "compact",
                                     .access = TASK_PACK,
                                     .call = do_compact,
                                     .on_device = do_compact_on_device};
