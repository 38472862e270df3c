/* SPDX-License-Identifier: Apache-2.0 */

/*
 * COMPACT for blocks on a GPU. The GPU scores keys, unless the client has given scores, and moves
 * tokens. The processor gets only the scores, and chooses the tokens. A launch does some layers, so
 * that other jobs get their turns in between. Blocks need not be full: slots behind a block's last
 * token are scored, but never chosen.
 */

#include <errno.h>

#include "daemon/process/worker/compact.h"
#include "daemon/process/worker/score.h"
#include "kernels/block.h"
#include "kernels/cuda/block.h"

struct device_packing {
        struct packing *p;
        struct device_anchor anchor; /* only without the client's scores */
        struct gpu_blocks blocks;    /* of all items */
        /* scores of a row: slots of all source blocks; the client scores only tokens */
        uint32_t columns;
        uint32_t most;   /* layers of a launch */
        float *scores;   /* [layer of a launch][head][column] */
        uint32_t *index; /* [layer of a launch][head][kept]: slots */
        uint8_t *rooms;  /* [thread]: scores, scratch */
        cu_address next, d_scores, d_index;
};

static uint32_t rows_of(const struct device_packing *d) {
        return d->most * d->p->task->shape.heads;
}

static int make_rooms(struct device_packing *d) {
        struct packing *p = d->p;
        struct task *task = p->task;
        const struct shape *s = &task->shape;
        uint64_t layer_bytes = 2 * s->plane * (p->n_from + p->n_to);

        d->columns = p->n_scores ? p->n_tokens : p->n_from * s->tokens;
        d->most = (uint32_t)MIN(MAX(task_launch_bytes(task) / layer_bytes, 1), s->layers);
        d->most = MIN(d->most, MAX(GPU_COMPACT_HEADS / s->heads, 1));
        d->scores = task_room(task, (size_t)rows_of(d) * d->columns, sizeof *d->scores);
        d->index = task_room(task, (size_t)rows_of(d) * p->keep, sizeof *d->index);
        d->rooms = task_room(task, (size_t)threads_count(task->threads) * 2 * p->n_tokens,
                             sizeof(float));
        return d->scores && d->index && d->rooms ? 0 : -ENOMEM;
}

static void lay_out_ids(struct device_packing *d) {
        const struct task *task = d->p->task;

        d->blocks.base = task->space->device_base;
        d->blocks.block_bytes = task->shape.block_bytes;
        d->blocks.ids = device_part(&d->next, task->job->n_items * sizeof(uint32_t));
}

/* Called twice (device_part). */
static void lay_out(struct device_packing *d, cu_address from) {
        d->next = from;
        if (d->p->n_scores) {
                lay_out_ids(d);
        } else {
                anchor_lay_out(&d->anchor, &d->next);
                d->blocks = d->anchor.keys.keys.blocks;
                d->d_scores = device_part(&d->next,
                                          (uint64_t)rows_of(d) * d->columns * sizeof *d->scores);
        }
        d->d_index = device_part(&d->next, (uint64_t)rows_of(d) * d->p->keep * sizeof *d->index);
}

static int make_device_room(struct device_packing *d) {
        cu_address room;

        lay_out(d, 0);
        room = device_room(d->p->task->device, d->next);
        if (!room)
                return -ENOSYS;
        lay_out(d, room);
        return 0;
}

/* ---- some layers ----------------------------------------------------------------------------- */

/* The client can write its blocks at any time, so that tokens are chosen by this copy. */
static int read_scores(const struct device_packing *d, uint32_t first, uint32_t n) {
        const struct packing *p = d->p;
        uint64_t from = first * score_bytes(p), to = (first + n) * score_bytes(p);
        int r = 0;

        for (uint64_t at = from; r == 0 && at < to;) {
                struct score_piece piece = score_piece(p, at, to);
                cu_address block = task_address(p->task, p->n_from + p->n_to + piece.block);

                r = device_read(p->task->device, (uint8_t *)d->scores + (at - from),
                                block + piece.offset, piece.bytes);
                at += piece.bytes;
        }
        return r;
}

static int score(const struct device_packing *d, struct gpu *gpu, uint32_t first, uint32_t n) {
        struct worker_device *device = d->p->task->device;
        const struct shape *s = &d->p->task->shape;
        struct gpu_scores a = d->anchor.keys;
        int r;

        a.keys.offset = first * a.keys.layer_stride;
        a.keys.layers = n;
        a.sums += (uint64_t)first * s->heads * s->dim * sizeof(float);
        a.from = 0;
        a.to = d->columns;
        a.stride = d->columns;
        a.scores = d->d_scores;
        r = gpu_score(gpu, device->stream, &a);
        return r < 0 ? r :
                       device_read(device, d->scores, a.scores,
                                   (uint64_t)n * s->heads * d->columns * sizeof *d->scores);
}

static void choose(void *data, uint32_t row, uint32_t thread) {
        const struct device_packing *d = data;
        const struct packing *p = d->p;
        const float *scores = d->scores + (size_t)row * d->columns;
        float *own = (float *)d->rooms + (size_t)thread * 2 * p->n_tokens;
        uint32_t *index = d->index + (size_t)row * p->keep;

        for (uint32_t t = 0; t < p->n_tokens; t++)
                own[t] = scores[p->n_scores ? t : p->place[t]];
        p->task->ops->block->topk(index, own, p->n_tokens, p->keep, true,
                                  (uint32_t *)own + p->n_tokens);
        for (uint32_t i = 0; i < p->keep; i++)
                index[i] = p->place[index[i]];
}

static int move(const struct device_packing *d, struct gpu *gpu, uint32_t first, uint32_t n) {
        struct worker_device *device = d->p->task->device;
        const struct shape *s = &d->p->task->shape;
        const struct gpu_compact a = {.blocks = d->blocks,
                                      .offset = first * 2 * s->plane,
                                      .layer_stride = 2 * s->plane,
                                      .plane = s->plane,
                                      .head_stride = s->head_stride,
                                      .slot_stride = s->token_stride,
                                      .index = d->d_index,
                                      .to = d->p->n_from,
                                      .layers = n,
                                      .heads = s->heads,
                                      .per_block = s->tokens,
                                      .n = d->p->keep,
                                      .bytes = s->row};
        int r = device_write(device, d->d_index, d->index,
                             (uint64_t)n * s->heads * d->p->keep * sizeof *d->index);

        return r < 0 ? r : gpu_compact(gpu, device->stream, &a);
}

static int finish(const struct device_packing *d, struct gpu *gpu, int r) {
        struct task *task = d->p->task;

        if (device_finish(task->device) < 0)
                return task_refuse(task, -EIO, "%s", task->device->why.line);
        return r < 0 ? task_refuse(task, r, "%s", gpu->why) : 0;
}

static int pack_some(struct device_packing *d, struct gpu *gpu, uint32_t first, uint32_t n) {
        struct task *task = d->p->task;
        int r = d->p->n_scores ? read_scores(d, first, n) : score(d, gpu, first, n);

        r = finish(d, gpu, r);
        if (r < 0)
                return r;
        task_share(task, n * task->shape.heads, d->columns * sizeof(float), choose, d);
        r = finish(d, gpu, move(d, gpu, first, n));
        if (r == 0)
                task_spend(task, n * 2 * task->shape.plane * (d->p->n_from + d->p->n_to));
        return r;
}

/* ---- the job --------------------------------------------------------------------------------- */

/* Zeros the destinations, since the last one's rest and the state planes stay zeros. */
static int clear(const struct packing *p) {
        struct task *task = p->task;
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < p->n_from + p->n_to + p->n_scores; i++) {
                cu_address block = task_address(task, i);

                if (!block)
                        return task_refuse(task, -ESTALE, "a block is gone");
                if (i >= p->n_from && i < p->n_from + p->n_to)
                        r = device_zero(task->device, block, task->shape.block_bytes);
        }
        return r;
}

static int begin(struct device_packing *d) {
        const struct packing *p = d->p;
        int r = p->n_scores ? 0 : anchor_find(&d->anchor, p->task);

        if (r == 0)
                r = make_rooms(d);
        if (r == 0)
                r = make_device_room(d);
        return r == 0 ? clear(p) : r;
}

static int send_blocks(struct device_packing *d, struct gpu *gpu) {
        return finish(d, gpu,
                      d->p->n_scores ? task_send_ids(d->p->task, d->blocks.ids, "a compaction") :
                                       anchor_make(&d->anchor, gpu));
}

int pack_on_device(struct packing *p) {
        struct gpu *gpu = device_kernels(p->task->device);
        struct device_packing d = {.p = p};
        int r = gpu ? begin(&d) : -ENOSYS;

        if (r == 0)
                r = send_blocks(&d, gpu);
        for (uint32_t first = 0, n; r == 0 && first < p->task->shape.layers; first += n) {
                n = MIN(d.most, p->task->shape.layers - first);
                r = pack_some(&d, gpu, first, n);
        }
        return r;
}
