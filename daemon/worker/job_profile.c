/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's similarity of a prefix's keys and values computed alone with those computed as part of
 * the whole input, layer by layer, in two readings:
 *
 *      token_mean   mean over tokens of the cosines of their keys (all heads together) and of their values
 *      flat         cosine of all keys and values as one vector
 *
 *      items   [layer group][alone, whole][block]      param   tokens
 *      result  float [layers of all groups][2]: token_mean, flat
 */

#include <errno.h>
#include <string.h>

#include "daemon/worker/jobs.h"
#include "kernels/bicache.h"

struct profile {
        struct task *task;
        uint32_t groups, n_blocks, n_tokens; /* blocks of one side of one group */
        const uint8_t **blocks;
        struct kvd_products *rooms;          /* [thread][K, V][token] */
        float (*result)[2];
};

/* Compares all tokens' keys, or values, of one layer. */
static void add_products(const struct profile *p, const uint8_t **alone, size_t off,
                         struct kvd_products *to) {
        const struct task *task = p->task;
        const struct shape *s = &task->shape;
        const uint8_t **whole = alone + p->n_blocks;

        memset(to, 0, p->n_tokens * sizeof *to);
        for (uint32_t t = 0; t < p->n_tokens; t += s->tokens)
                for (uint32_t h = 0; h < s->heads; h++) {
                        size_t at = off + h * s->head_stride * s->element;

                        task->ops->bicache->products(to + t, alone[t / s->tokens] + at,
                                                     s->token_stride, whole[t / s->tokens] + at,
                                                     s->token_stride, s->type,
                                                     MIN(s->tokens, p->n_tokens - t), s->dim);
                }
}

static void compare_layer(void *data, uint32_t at, uint32_t thread) {
        const struct profile *p = data;
        const struct shape *s = &p->task->shape;
        const uint8_t **alone = p->blocks + (size_t)(at / s->layers) * 2 * p->n_blocks;
        struct kvd_products *keys = p->rooms + (size_t)thread * 2 * p->n_tokens,
                            *values = keys + p->n_tokens;
        size_t off = at % s->layers * 2 * s->plane;

        add_products(p, alone, off, keys);
        add_products(p, alone, off + s->plane, values);
        p->result[at][0] = (float)kvd_similarity_token_mean(keys, values, p->n_tokens);
        p->result[at][1] = (float)kvd_similarity_flat(keys, values, p->n_tokens);
}

static int do_profile(struct task *task) {
        struct profile p = {.task = task, .groups = task->space->ix->geometry.layer_groups,
                            .n_tokens = task->job->param[0]};
        int r = task_needs_numbers(task);

        if (r < 0)
                return r;
        p.n_blocks = task->job->n_items / p.groups / 2;
        if (!p.n_tokens || task->job->n_items != p.groups * 2 * p.n_blocks ||
            p.n_tokens > (uint64_t)p.n_blocks * task->shape.tokens)
                return task_refuse(task, -EINVAL, "%u tokens in %u blocks of %u groups", p.n_tokens,
                                   task->job->n_items, p.groups);
        p.blocks = task_room(task, task->job->n_items, sizeof *p.blocks);
        p.result = task_results(task, (size_t)p.groups * task->shape.layers, sizeof *p.result);
        p.rooms = task_room(task, (size_t)threads_count(task->threads) * 2 * p.n_tokens,
                            sizeof *p.rooms);
        if (!p.blocks || !p.result || !p.rooms)
                return -ENOMEM;
        for (uint32_t i = 0; i < task->job->n_items; i++) {
                p.blocks[i] = task_block(task, i);
                if (!p.blocks[i])
                        return task_refuse(task, -ESTALE, "a block of the sample is gone");
        }
        threads_share(task->threads, p.groups * task->shape.layers, compare_layer, &p);
        return 0;
}

const struct job_kind job_profile = {.name = "profile", .access = TASK_READ, .call = do_profile};
