/* SPDX-License-Identifier: Apache-2.0 */

/*
 * SCORE where the blocks are: as job_score.c, but keys are read by the GPU's own kernels, and what
 * comes to the processor is one number for each layer and block. Anchors come from the summaries,
 * which are here; only blocks that have none are read for them. -ENOSYS: not in this way (no
 * kernels in this build or for this device, shapes they do not take, no memory), and nothing was
 * done.
 */

#include <errno.h>
#include <string.h>

#include "daemon/worker/score.h"
#include "kernels/cuda/keydiff.h"
#include "kernels/keydiff.h"

struct device_scores {
        struct task *task;
        uint32_t n, n_tokens;      /* items; tokens, the last block's as many as it has */
        uint32_t *ids;             /* [2][n]: all, and those without a summary */
        bool unsummarised;
        float *sums;               /* [layer][head][dim] */
        float *means;              /* [layer][n] */
        /* memory of the GPU: its beginning, and what is not used yet of it */
        cu_address at, next;
        cu_address d_ids, d_means, d_best;
        struct gpu_keydiff keys;
};

static uint64_t sums_bytes(const struct shape *s) {
        return (uint64_t)s->layers * s->heads * s->dim * sizeof(float);
}

/* Blocks lie one behind the other: only the last may be part filled. */
static int count_tokens(struct device_scores *d) {
        const struct task *task = d->task;

        d->n = task->job->n_items;
        for (uint32_t i = 0; i + 1 < d->n; i++)
                if (task->items[i].n_tokens < task->shape.tokens)
                        return -ENOSYS;
        if (!d->n || !task->items[d->n - 1].n_tokens || !task->shape.type ||
            task->shape.dim > GPU_KEYDIFF_DIM)
                return -ENOSYS;
        d->n_tokens = (d->n - 1) * task->shape.tokens +
                      MIN(task->items[d->n - 1].n_tokens, task->shape.tokens);
        return 0;
}

static int find_blocks(struct device_scores *d) {
        struct task *task = d->task;
        const struct shape *s = &task->shape;

        d->ids = task_room(task, 2 * (size_t)d->n, sizeof *d->ids);
        d->sums = task_room(task, sums_bytes(s), 1);
        d->means = task_room(task, (size_t)s->layers * d->n, sizeof *d->means);
        if (!d->ids || !d->sums || !d->means)
                return -ENOMEM;
        for (uint32_t i = 0; i < d->n; i++) {
                const struct kvd_job_item *item = &task->items[i];
                const uint8_t *row = task_summary(task, item->row, kvd_ref_generation(item->ref));
                uint32_t id = task_address(task, i) ? kvd_ref_id(item->ref) : GPU_NO_BLOCK;
                const float *anchors =
                        row ? (const float *)(row + task->space->summary.anchors_off) : NULL;

                d->ids[i] = id;
                d->ids[d->n + i] = row ? GPU_NO_BLOCK : id;
                d->unsummarised |= !row && id != GPU_NO_BLOCK;
                for (uint64_t k = 0; anchors && k < sums_bytes(s) / sizeof(float); k++)
                        d->sums[k] += anchors[k];
        }
        return 0;
}

/* ---- memory of the GPU ----------------------------------------------------------------------- */

static cu_address part(struct device_scores *d, uint64_t bytes) {
        cu_address at = d->next;

        d->next += ALIGN_UP(bytes, 256);
        return at;
}

/* Called twice: from 0, to know how much it is, and from where it is. */
static void lay_out(struct device_scores *d, cu_address from) {
        const struct shape *s = &d->task->shape;
        uint64_t heads = (uint64_t)s->layers * s->heads;

        d->at = d->next = from;
        d->d_ids = part(d, 2 * (uint64_t)d->n * sizeof *d->ids);
        d->keys.sums = part(d, sums_bytes(s));
        d->keys.counts = part(d, heads * sizeof(uint32_t));
        d->keys.scores = part(d, heads * d->n_tokens * sizeof(float));
        d->d_means = part(d, (uint64_t)s->layers * d->n * sizeof(float));
        d->d_best = part(d, (uint64_t)s->heads * d->n * sizeof(float));
        d->keys.scratch = part(d, gpu_keydiff_scratch(&d->keys));
}

static int make_room(struct device_scores *d) {
        const struct task *task = d->task;
        const struct shape *s = &task->shape;

        d->keys = (struct gpu_keydiff){.keys = {.blocks = {.base = task->space->device_base,
                                                           .block_bytes = s->block_bytes},
                                                .layer_stride = 2 * s->plane,
                                                .head_stride = s->head_stride,
                                                .token_stride = s->token_stride,
                                                .layers = s->layers,
                                                .heads = s->heads,
                                                .dim = s->dim,
                                                .per_block = s->tokens,
                                                .number = s->type},
                                       .to = d->n_tokens,
                                       .stride = d->n_tokens};
        lay_out(d, 0);
        d->at = device_room(task->device, d->next);
        if (!d->at)
                return -ENOSYS;
        lay_out(d, d->at);
        return 0;
}

/* ---- the job --------------------------------------------------------------------------------- */

static int upload(struct device_scores *d) {
        struct worker_device *device = d->task->device;
        const struct shape *s = &d->task->shape;
        uint64_t counts = (uint64_t)s->layers * s->heads * sizeof(uint32_t);
        uint32_t *zeros = task_room(d->task, counts, 1);
        int r = zeros ? device_write(device, d->d_ids, d->ids,
                                     2 * (uint64_t)d->n * sizeof *d->ids) :
                        -ENOMEM;

        if (r == 0)
                r = device_write(device, d->keys.sums, d->sums, sums_bytes(s));
        return r == 0 ? device_write(device, d->keys.counts, zeros, counts) : r;
}

static int launch(struct device_scores *d, struct gpu *gpu, cu_stream stream) {
        const struct shape *s = &d->task->shape;
        int r = 0;

        d->keys.keys.blocks.ids = d->d_ids + d->n * sizeof *d->ids;
        if (d->unsummarised)
                r = gpu_keydiff_anchor(gpu, stream, &d->keys);
        d->keys.keys.blocks.ids = d->d_ids;
        if (r == 0)
                r = gpu_keydiff_score(gpu, stream, &d->keys);
        for (uint32_t l = 0; r == 0 && l < s->layers; l++) {
                struct gpu_keydiff_blocks blocks = {
                        .mean = d->d_means + (uint64_t)l * d->n * sizeof(float),
                        .best = d->d_best,
                        .scores = d->keys.scores +
                                  (uint64_t)l * s->heads * d->n_tokens * sizeof(float),
                        .stride = d->n_tokens,
                        .heads = s->heads,
                        .n = d->n_tokens,
                        .per_block = s->tokens};

                r = gpu_keydiff_blocks(gpu, stream, &blocks);
        }
        return r;
}

/* Mean over the layers; those in which no key is valid have no say. */
static void put_results(const struct device_scores *d, float *result) {
        for (uint32_t i = 0; i < d->n; i++) {
                float mean = 0.0f;
                uint32_t layers = 0;

                for (uint32_t l = 0; l < d->task->shape.layers; l++)
                        if (d->means[(size_t)l * d->n + i] >= -2.0f) {
                                mean += d->means[(size_t)l * d->n + i];
                                layers++;
                        }
                mean = layers ? mean / (float)layers : -1.0f;
                d->task->ops->keydiff->priority(&result[i], &mean, 1);
        }
}

int score_on_device(struct task *task) {
        struct device_scores d = {.task = task};
        struct gpu *gpu = device_kernels(task->device);
        float *result;
        int r = gpu ? count_tokens(&d) : -ENOSYS;

        if (r == 0)
                r = find_blocks(&d);
        if (r == 0)
                r = make_room(&d);
        if (r == 0)
                r = upload(&d);
        if (r == 0)
                r = launch(&d, gpu, task->device->stream);
        if (device_finish(task->device) < 0)
                return task_refuse(task, -EIO, "%s", task->device->why.line);
        if (r < 0)
                return -ENOSYS; /* whatever it is: there is another way */
        r = device_read(task->device, d.means, d.d_means,
                        (uint64_t)task->shape.layers * d.n * sizeof(float));
        if (r < 0 || device_finish(task->device) < 0)
                return task_refuse(task, -EIO, "%s", task->device->why.line);
        result = task_results(task, d.n, sizeof *result);
        if (!result)
                return -E2BIG;
        put_results(&d, result);
        return 0;
}
