/* SPDX-License-Identifier: Apache-2.0 */

/*
 * HShare's sharing configuration of one sequence, made from the tokens that its last prompt queries
 * selected: a row of bits, one for each token, for each layer, head and query. Heads of a layer are
 * compared query by query, layers head by head and query by query. Layers that are not sparse
 * select nothing that others could use. The GPU counts bits if the blocks are there; the rest is
 * done here.
 *
 *      items   blocks with u64 [layer][head][query][word], one after the other    param  layers, heads, queries, words
 *      result  u8 [layers]: source of each layer, then u8 [layers][heads]: source of each head
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/jobs.h"
#include "daemon/process/worker/task.h"
#include "kernels/cuda/hshare.h"
#include "kernels/hshare.h"

struct config {
        struct task *task;
        uint32_t layers, heads, queries, words;
        uint32_t dense; /* number of first layers that are not sparse */
        enum kvd_share how;
        /*
         * to[pair][row] = number of bits that are set in both rows of a pair. 0 or negative errno.
         */
        int (*compare)(const struct config *c, const struct gpu_overlap_pair *pairs, uint32_t n,
                       uint32_t rows, uint32_t *to);
        const uint8_t **blocks; /* [item]; only on the processor */
        struct gpu *gpu;        /* only on the GPU, as are the addresses: */
        cu_address d_ids, d_pairs, d_both;
        uint32_t *counts; /* [layer][head][query]: number of bits set */
        uint32_t room;    /* number of rows that are compared at a time */
        uint32_t *both;   /* [room] */
        struct gpu_overlap_pair *pairs;
        float *similar; /* [n][n] for n layers or heads, then n floats of scratch */
        uint32_t *plan; /* [layers] or [heads] */
        uint8_t *layer_result, *head_result;
};

/* n rows of a pair. */
struct rows {
        const struct config *c;
        struct gpu_overlap_pair pair;
        uint32_t n;
        uint32_t *to; /* [row]: number of bits that are set in both */
};

static uint32_t row_of(const struct config *c, uint32_t layer, uint32_t head) {
        return (layer * c->heads + head) * c->queries;
}

/* ---- input ----------------------------------------------------------------------------------- */

static int check(struct config *c) {
        const uint32_t *param = c->task->job->param;
        uint64_t rows, bytes;

        c->layers = param[0];
        c->heads = param[1];
        c->queries = param[2];
        c->words = param[3];
        if (!c->layers || c->layers > 256 || !c->heads || c->heads > 256 || !c->queries ||
            c->queries > 4096 || !c->words || c->words > 65536)
                return task_refuse(c->task, -EINVAL,
                                   "a configuration has 1 to 256 layers and heads, 1 to 4096 "
                                   "queries, and 1 to 65536 words of bits");
        rows = (uint64_t)c->layers * c->heads * c->queries;
        bytes = rows * c->words * sizeof(uint64_t);
        if (rows > KVD_CONFIG_ROWS || bytes > c->task->job->n_items * c->task->shape.block_bytes)
                return task_refuse(c->task, -EINVAL, "%llu rows of bits, %llu bytes, in %u blocks",
                                   (unsigned long long)rows, (unsigned long long)bytes,
                                   c->task->job->n_items);
        return 0;
}

static int find_blocks(struct config *c) {
        struct task *task = c->task;

        c->blocks = task_room(task, task->job->n_items, sizeof *c->blocks);
        for (uint32_t i = 0; c->blocks && i < task->job->n_items; i++) {
                c->blocks[i] = task_block(task, i);
                if (!c->blocks[i])
                        return task_refuse(task, -ESTALE, "a block of bits is gone");
        }
        return c->blocks ? 0 : -ENOMEM;
}

#define ROOM (1u << 16) /* rows that are compared at a time; more if a pair has more */

static int make_room(struct config *c) {
        struct task *task = c->task;
        size_t n = MAX(c->heads, c->layers);

        c->room = MAX(row_of(c, 1, 0), ROOM);
        c->counts = task_room(task, row_of(c, c->layers, 0), sizeof *c->counts);
        c->both = task_room(task, c->room, sizeof *c->both);
        c->pairs = task_room(task, MAX(c->room / c->queries, c->layers), sizeof *c->pairs);
        c->similar = task_room(task, n * n + n, sizeof *c->similar);
        c->plan = task_room(task, n, sizeof *c->plan);
        c->layer_result = task_results(task, (size_t)c->layers * (1 + c->heads), 1);
        if (!c->counts || !c->both || !c->pairs || !c->similar || !c->plan || !c->layer_result)
                return -ENOMEM;
        c->head_result = c->layer_result + c->layers;
        return 0;
}

/* ---- rows of bits ---------------------------------------------------------------------------- */

/* Address of a word. *n becomes the number of words from there on in its block, if that is less. */
static const uint64_t *words_at(const struct config *c, uint64_t word, uint32_t *n) {
        uint64_t at = word * sizeof(uint64_t), bytes = c->task->shape.block_bytes;

        *n = (uint32_t)MIN(*n, (bytes - at % bytes) / sizeof(uint64_t));
        return (const uint64_t *)(c->blocks[at / bytes] + at % bytes);
}

static uint32_t overlap(const struct config *c, size_t a, size_t b) {
        uint32_t sum = 0;

        for (uint32_t w = 0, n; w < c->words; w += n) {
                const uint64_t *x, *y;
                uint32_t both;

                n = c->words - w;
                x = words_at(c, a * c->words + w, &n);
                y = words_at(c, b * c->words + w, &n);
                c->task->ops->hshare->overlap(&both, x, y, 1, n);
                sum += both;
        }
        return sum;
}

#define ROWS 16u /* rows that a thread compares at a time */

static void compare_rows(void *data, uint32_t i, uint32_t thread) {
        const struct rows *r = data;

        for (uint32_t row = i * ROWS; row < MIN((i + 1) * ROWS, r->n); row++)
                r->to[row] = overlap(r->c, (size_t)r->pair.a + row, (size_t)r->pair.b + row);
}

static int compare(const struct config *c, const struct gpu_overlap_pair *pairs, uint32_t n,
                   uint32_t rows, uint32_t *to) {
        for (uint32_t i = 0; i < n; i++) {
                struct rows r = {c, pairs[i], rows, to + (size_t)i * rows};

                task_share(c->task, DIV_UP(rows, ROWS),
                           2 * sizeof(uint64_t) * c->words * MIN(rows, ROWS), compare_rows, &r);
        }
        return 0;
}

/* ---- rows of bits on a GPU ------------------------------------------------------------------- */

/*
 * The GPU counts bits, and the processor gets one number for each row of a pair. Launches are short
 * (task_launch_bytes), so that other jobs get their turns in between.
 */

static uint64_t row_bytes(const struct config *c) {
        return 2 * sizeof(uint64_t) * c->words;
}

/* Compares rows first to end - 1 of the n pairs that are in d_pairs. */
static int launch(const struct config *c, uint32_t n, uint32_t first, uint32_t end, uint32_t *to) {
        const struct task *task = c->task;
        struct worker_device *device = task->device;
        const struct gpu_overlap a = {.blocks = {task->space->device_base, task->shape.block_bytes,
                                                 c->d_ids},
                                      .pairs = c->d_pairs,
                                      .to = c->d_both,
                                      .n = n,
                                      .first = first,
                                      .end = end,
                                      .words = c->words};
        int r = gpu_overlap(c->gpu, device->stream, &a);

        if (r == 0)
                r = device_read(device, to, c->d_both, (uint64_t)n * (end - first) * sizeof *to);
        if (device_finish(device) < 0)
                return task_refuse(c->task, -EIO, "%s", device->why.line);
        return r < 0 ? task_refuse(c->task, r, "%s", c->gpu->why) : 0;
}

/* Each launch compares several whole pairs, or some rows of one pair. */
static int compare_on_device(const struct config *c, const struct gpu_overlap_pair *pairs,
                             uint32_t n, uint32_t rows, uint32_t *to) {
        uint32_t most = (uint32_t)MIN(MAX(task_launch_bytes(c->task) / row_bytes(c), 1), c->room);
        uint32_t together = MIN(MAX(most / rows, 1), GPU_OVERLAP_PAIRS);
        int r = 0;

        for (uint32_t i = 0, k; r == 0 && i < n; i += k) {
                k = MIN(together, n - i);
                r = device_write(c->task->device, c->d_pairs, pairs + i, k * sizeof *pairs);
                for (uint32_t first = 0, end; r == 0 && first < rows; first = end) {
                        end = MIN(rows, first + most);
                        r = launch(c, k, first, end, to + (size_t)i * rows + first);
                        task_spend(c->task, row_bytes(c) * k * (end - first));
                }
        }
        return r;
}

static void lay_out(struct config *c, cu_address from) {
        uint64_t n = c->task->job->n_items;

        c->d_ids = device_part(&from, n * sizeof(uint32_t));
        c->d_pairs = device_part(&from, MAX(c->room / c->queries, c->layers) * sizeof *c->pairs);
        c->d_both = device_part(&from, c->room * sizeof *c->both);
}

/* Prepares compare on the GPU. -ENOSYS: the GPU cannot do it, and nothing was done. */
static int begin_on_device(struct config *c) {
        struct worker_device *device = c->task->device;
        cu_address room;

        c->gpu = device_kernels(device);
        if (!c->gpu || c->task->shape.block_bytes % sizeof(uint64_t))
                return -ENOSYS;
        lay_out(c, 0);
        room = device_room(device, c->d_both + c->room * sizeof *c->both);
        if (!room)
                return -ENOSYS;
        lay_out(c, room);
        c->compare = compare_on_device;
        return task_send_ids(c->task, c->d_ids, "bits");
}

/* ---- similarity ------------------------------------------------------------------------------ */

/* n heads or layers. Thing i has the rows from first + i * rows on. */
struct things {
        uint32_t n, first, rows;
};

static struct gpu_overlap_pair pair_of(const struct things *t, uint32_t i, uint32_t j) {
        return (struct gpu_overlap_pair){t->first + i * t->rows, t->first + j * t->rows};
}

/* A pair of things, j < i; next() visits the triangle of all pairs row by row. */
struct place {
        uint32_t i, j;
};

static void next(struct place *at) {
        if (++at->j == at->i)
                *at = (struct place){at->i + 1, 0};
}

/* Compares as many pairs from *at on as there is room for, and advances *at. */
static int compare_some(struct config *c, const struct things *t, struct place *at) {
        struct place from = *at;
        uint32_t n = 0;
        int r;

        for (; at->i < t->n && (n + 1) * t->rows <= c->room; next(at))
                c->pairs[n++] = pair_of(t, at->i, at->j);
        r = c->compare(c, c->pairs, n, t->rows, c->both);
        for (uint32_t k = 0; r == 0 && k < n; k++, next(&from))
                c->similar[(size_t)from.i * t->n + from.j] =
                        (float)kvd_share_similarity(c->both + (size_t)k * t->rows,
                                                    c->counts + c->pairs[k].a,
                                                    c->counts + c->pairs[k].b, t->rows);
        return r;
}

/* Makes a plan in which `share` of the things use the tokens of others. */
static int plan(struct config *c, const struct things *t, uint32_t share) {
        struct place at = {1, 0};
        int r = 0;

        while (r == 0 && at.i < t->n)
                r = compare_some(c, t, &at);
        if (r < 0)
                return r;
        kvd_share_plan(c->similar, t->n, share, c->how, c->plan, c->similar + (size_t)t->n * t->n);
        task_spend(c->task, (uint64_t)t->n * t->n * sizeof(float) * (1 + MIN(share, t->n - share)));
        return 0;
}

static int plan_heads(struct config *c, uint32_t layer) {
        const struct things heads = {c->heads, row_of(c, layer, 0), c->queries};
        uint32_t k = kvd_share_count(task_setting(c->task, KVD_hshare_head_ratio), c->heads);
        int r = plan(c, &heads, layer < c->dense ? 0 : k);

        for (uint32_t h = 0; r == 0 && h < c->heads; h++)
                c->head_result[(size_t)layer * c->heads + h] = (uint8_t)c->plan[h];
        return r;
}

static int plan_layers(struct config *c) {
        const struct things layers = {c->layers - c->dense, row_of(c, c->dense, 0),
                                      row_of(c, 1, 0)};
        double ratio = task_setting(c->task, KVD_hshare_layer_ratio);
        int r = layers.n ? plan(c, &layers, kvd_share_count(ratio, layers.n)) : 0;

        for (uint32_t l = 0; l < c->dense; l++)
                c->layer_result[l] = (uint8_t)l;
        for (uint32_t l = 0; r == 0 && l < layers.n; l++)
                c->layer_result[c->dense + l] = (uint8_t)(c->dense + c->plan[l]);
        return r;
}

static int count(struct config *c) {
        for (uint32_t l = 0; l < c->layers; l++)
                c->pairs[l] = (struct gpu_overlap_pair){row_of(c, l, 0), row_of(c, l, 0)};
        return c->compare(c, c->pairs, c->layers, row_of(c, 1, 0), c->counts);
}

/* ---- the job --------------------------------------------------------------------------------- */

static int begin(struct config *c) {
        int r = check(c);

        if (r < 0)
                return r;
        c->dense = (uint32_t)MIN(task_setting(c->task, KVD_hshare_dense_layers), c->layers);
        c->how = task_setting(c->task, KVD_hshare_algo) ? KVD_SHARE_STAR : KVD_SHARE_GREEDY_ROOT;
        return make_room(c);
}

static int make_plans(struct config *c) {
        int r = count(c);

        for (uint32_t l = 0; r == 0 && l < c->layers; l++)
                r = plan_heads(c, l);
        return r < 0 ? r : plan_layers(c);
}

static int do_config(struct task *task) {
        struct config c = {.task = task, .compare = compare};
        int r = begin(&c);

        if (r == 0)
                r = find_blocks(&c);
        return r < 0 ? r : make_plans(&c);
}

static int do_config_on_device(struct task *task) {
        struct config c = {.task = task};
        int r = begin(&c);

        if (r == 0)
                r = begin_on_device(&c);
        return r < 0 ? r : make_plans(&c);
}

const struct job_kind job_config = {.name = "config",
                                    .access = TASK_READ,
                                    .call = do_config,
                                    .on_device = do_config_on_device};
