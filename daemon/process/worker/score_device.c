/* SPDX-License-Identifier: Apache-2.0 */

/*
 * SCORE for blocks on a GPU: as job_score.c, but the GPU's kernels read the keys, and the processor
 * gets one number for each layer and block. -ENOSYS: the GPU cannot do it (no kernels in this build
 * or for this device, a shape that they do not support, out of memory), and nothing was done.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/score.h"
#include "kernels/keydiff.h"

struct device_scores {
        struct task *task;
        struct device_anchor anchor;
        uint32_t n, n_tokens; /* number of items, and of their tokens */
        uint32_t most;        /* blocks of a launch */
        float *means;         /* [layer][block of a launch] */
        cu_address next, d_means, d_best;
        struct gpu_scores keys;
};

/* The kernels read all tokens as one run, so only the last block may be partly filled. */
static int count_tokens(struct device_scores *d) {
        struct task *task = d->task;
        const struct shape *s = &task->shape;

        d->n = task->job->n_items;
        for (uint32_t i = 0; i + 1 < d->n; i++)
                if (task->items[i].n_tokens < s->tokens)
                        return -ENOSYS;
        if (!d->n || !task->items[d->n - 1].n_tokens)
                return -ENOSYS;
        d->n_tokens = (d->n - 1) * s->tokens + MIN(task->items[d->n - 1].n_tokens, s->tokens);
        d->most = (uint32_t)MIN(MAX(task_launch_bytes(task) / s->block_bytes, 1), d->n);
        d->means = task_room(task, (size_t)s->layers * d->most, sizeof *d->means);
        return d->means ? 0 : -ENOMEM;
}

/* ---- memory of the GPU ----------------------------------------------------------------------- */

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

/* ---- the job --------------------------------------------------------------------------------- */

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

/* Mean over the layers, except those without a valid key (less than -2). */
static void put_results(const struct device_scores *d, uint32_t n, float *result) {
        for (uint32_t i = 0; i < n; i++) {
                float mean = 0.0f;
                uint32_t layers = 0;

                for (uint32_t l = 0; l < d->task->shape.layers; l++)
                        if (d->means[(size_t)l * n + i] >= -2.0f) {
                                mean += d->means[(size_t)l * n + i];
                                layers++;
                        }
                mean = layers ? mean / (float)layers : -1.0f;
                d->task->ops->keydiff->priority(&result[i], &mean, 1);
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

int score_on_device(struct task *task) {
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
