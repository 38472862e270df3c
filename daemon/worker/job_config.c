/* SPDX-License-Identifier: Apache-2.0 */

/*
 * HShare's sharing configuration of one sequence, from what its last prompt queries selected: a row
 * of bits, a bit a token, for each layer, head and query. Heads of a layer are compared query by
 * query, layers head by head and query by query. Layers that are not sparse select nothing that
 * others could use.
 *
 *      items   blocks with u64 [layer][head][query][word], one after the other    param  layers, heads, queries, words
 *      result  u8 [layers]: source of each layer, then u8 [layers][heads]: source of each head of it
 */

#include <errno.h>
#include <string.h>

#include "daemon/worker/jobs.h"
#include "kernels/hshare.h"

struct config {
        struct task *task;
        uint32_t layers, heads, queries, words;
        uint32_t dense;          /* first layers that are not sparse */
        enum kvd_share how;
        uint64_t *bits;
        uint32_t *counts;        /* [layer][head][query]: bits set */
        uint32_t *both;          /* [thread][head][query] */
        float *of_layers;        /* similarity [layers - dense][layers - dense] */
        float *of_heads;         /* [thread][heads][heads], then scratch [heads] */
        uint32_t *plans;         /* [thread][heads] */
        uint8_t *layer_result, *head_result;
};

static size_t row_of(const struct config *c, uint32_t layer, uint32_t head) {
        return ((size_t)layer * c->heads + head) * c->queries;
}

static uint64_t *bits_of(const struct config *c, size_t row) {
        return c->bits + row * c->words;
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
                                   "a configuration is of 1 to 256 layers and heads, 4096 queries, "
                                   "and "
                                   "65536 words of bits");
        rows = (uint64_t)c->layers * c->heads * c->queries;
        bytes = rows * c->words * sizeof(uint64_t);
        if (bytes > c->task->job->n_items * c->task->shape.block_bytes)
                return task_refuse(c->task, -EINVAL, "bits of %llu bytes in %u blocks",
                                   (unsigned long long)bytes, c->task->job->n_items);
        return 0;
}

/* A row may lie in two blocks. */
static int copy_bits(struct config *c) {
        struct task *task = c->task;
        uint64_t left = row_of(c, c->layers, 0) * c->words * sizeof(uint64_t);
        uint8_t *to;

        c->bits = task_room(task, left, 1);
        to = (uint8_t *)c->bits;
        for (uint32_t i = 0; to && i < task->job->n_items && left; i++) {
                const uint8_t *block = task_block(task, i);
                uint64_t n = MIN(left, task->shape.block_bytes);

                if (!block)
                        return task_refuse(task, -ESTALE, "a block of bits is gone");
                memcpy(to, block, n);
                to += n;
                left -= n;
        }
        return to ? 0 : -ENOMEM;
}

static int make_room(struct config *c) {
        struct task *task = c->task;
        uint32_t threads = threads_count(task->threads);
        size_t n = c->layers - c->dense;

        c->counts = task_room(task, row_of(c, c->layers, 0), sizeof *c->counts);
        c->both = task_room(task, threads * row_of(c, 1, 0), sizeof *c->both);
        c->of_layers = task_room(task, n * n + n, sizeof *c->of_layers);
        c->of_heads = task_room(task, threads * (size_t)(c->heads + 1) * c->heads,
                                sizeof *c->of_heads);
        c->plans = task_room(task, (size_t)threads * MAX(c->heads, c->layers), sizeof *c->plans);
        c->layer_result = task_results(task, (size_t)c->layers * (1 + c->heads), 1);
        if (!c->counts || !c->both || !c->of_layers || !c->of_heads || !c->plans ||
            !c->layer_result)
                return -ENOMEM;
        c->head_result = c->layer_result + c->layers;
        return 0;
}

/* ---- similarity ------------------------------------------------------------------------------ */

/* Compares n rows from a on with those from b on. */
static float similarity(const struct config *c, size_t a, size_t b, uint32_t n, uint32_t thread) {
        uint32_t *both = c->both + thread * row_of(c, 1, 0);

        c->task->ops->hshare->overlap(both, bits_of(c, a), bits_of(c, b), n, c->words);
        return (float)kvd_share_similarity(both, c->counts + a, c->counts + b, n);
}

static void count_layer(void *data, uint32_t layer, uint32_t thread) {
        struct config *c = data;
        size_t row = row_of(c, layer, 0);

        c->task->ops->hshare->overlap(c->counts + row, bits_of(c, row), bits_of(c, row),
                                      c->heads * c->queries, c->words);
}

static void compare_layer(void *data, uint32_t i, uint32_t thread) {
        struct config *c = data;
        uint32_t n = c->layers - c->dense;

        for (uint32_t j = 0; j < i; j++)
                c->of_layers[(size_t)i * n + j] = similarity(c, row_of(c, c->dense + i, 0),
                                                             row_of(c, c->dense + j, 0),
                                                             c->heads * c->queries, thread);
}

static void plan_heads(void *data, uint32_t layer, uint32_t thread) {
        struct config *c = data;
        float *s = c->of_heads + (size_t)thread * (c->heads + 1) * c->heads;
        uint32_t *plan = c->plans + (size_t)thread * MAX(c->heads, c->layers);
        uint32_t k = kvd_share_count(task_setting(c->task, KVD_hshare_head_ratio), c->heads);

        memset(s, 0, (size_t)c->heads * c->heads * sizeof *s);
        for (uint32_t i = 0; i < c->heads; i++)
                for (uint32_t j = 0; j < i; j++)
                        s[(size_t)i * c->heads + j] = similarity(c, row_of(c, layer, i),
                                                                 row_of(c, layer, j), c->queries,
                                                                 thread);
        kvd_share_plan(s, c->heads, layer < c->dense ? 0 : k, c->how, plan,
                       s + (size_t)c->heads * c->heads);
        for (uint32_t h = 0; h < c->heads; h++)
                c->head_result[(size_t)layer * c->heads + h] = (uint8_t)plan[h];
}

static void plan_layers(struct config *c) {
        uint32_t n = c->layers - c->dense;
        uint32_t k = n ? kvd_share_count(task_setting(c->task, KVD_hshare_layer_ratio), n) : 0;

        for (uint32_t l = 0; l < c->dense; l++)
                c->layer_result[l] = (uint8_t)l;
        if (n)
                kvd_share_plan(c->of_layers, n, k, c->how, c->plans, c->of_layers + (size_t)n * n);
        for (uint32_t l = 0; l < n; l++)
                c->layer_result[c->dense + l] = (uint8_t)(c->dense + c->plans[l]);
}

static int do_config(struct task *task) {
        struct config c = {.task = task};
        int r = check(&c);

        if (r < 0)
                return r;
        c.dense = (uint32_t)MIN(task_setting(task, KVD_hshare_dense_layers), c.layers);
        c.how = task_setting(task, KVD_hshare_algo) ? KVD_SHARE_STAR : KVD_SHARE_GREEDY_ROOT;
        r = make_room(&c);
        if (r == 0)
                r = copy_bits(&c);
        if (r < 0)
                return r;
        threads_share(task->threads, c.layers, count_layer, &c);
        threads_share(task->threads, c.layers, plan_heads, &c);
        threads_share(task->threads, c.layers - c.dense, compare_layer, &c);
        plan_layers(&c);
        return 0;
}

const struct job_kind job_config = {.name = "config", .access = TASK_READ, .call = do_config};
