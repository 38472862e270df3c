/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's similarity of a prefix's keys and values computed alone with those computed as part of
 * the whole input, layer by layer, in two definitions:
 *
 *      token_mean   mean over tokens of the cosines of their keys (all heads together) and of their values
 *      flat         cosine of all keys and values as one vector
 *
 *      items   [layer group][alone, whole][block]      param   tokens
 *      result  float [layers of all groups][2]: token_mean, flat
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/jobs.h"
#include "daemon/process/worker/profile.h"

/* Compares the keys, or the values, of one block's tokens. */
static void add_products(const struct profile *p, const uint8_t *alone, const uint8_t *whole,
                         size_t off, uint32_t n, struct kvd_products *to) {
        const struct task *task = p->task;
        const struct shape *s = &task->shape;

        memset(to, 0, n * sizeof *to);
        for (uint32_t h = 0; h < s->heads; h++) {
                size_t at = off + h * s->head_stride * s->element;

                task->ops->bicache->products(to, alone + at, s->token_stride, whole + at,
                                             s->token_stride, s->type, n, s->dim);
        }
}

static void compare_block(void *data, uint32_t i, uint32_t thread) {
        const struct profile *p = data;
        const struct shape *s = &p->task->shape;
        const uint8_t **alone = p->blocks + (size_t)(p->layer / s->layers) * 2 * p->n_blocks;
        const uint8_t **whole = alone + p->n_blocks;
        size_t off = p->layer % s->layers * 2 * s->plane;
        uint32_t first = i * s->tokens, n = MIN(s->tokens, p->n_tokens - first);

        add_products(p, alone[i], whole[i], off, n, p->keys + first);
        add_products(p, alone[i], whole[i], off + s->plane, n, p->values + first);
}

static int compare_layer(const struct profile *p) {
        const struct shape *s = &p->task->shape;

        task_share(p->task, DIV_UP(p->n_tokens, s->tokens), 4 * s->plane, compare_block, (void *)p);
        return 0;
}

static int compare_layers(struct profile *p) {
        int r = 0;

        for (p->layer = 0; r == 0 && p->layer < p->groups * p->task->shape.layers; p->layer++) {
                r = p->compare(p);
                p->result[p->layer][0] = (float)kvd_similarity_token_mean(p->keys, p->values,
                                                                          p->n_tokens);
                p->result[p->layer][1] = (float)kvd_similarity_flat(p->keys, p->values,
                                                                    p->n_tokens);
        }
        return r;
}

/* ---- the job --------------------------------------------------------------------------------- */

static int make_room(struct profile *p) {
        struct task *task = p->task;

        p->result = task_results(task, (size_t)p->groups * task->shape.layers, sizeof *p->result);
        p->keys = task_room(task, (size_t)2 * p->n_tokens, sizeof *p->keys);
        if (!p->result || !p->keys)
                return -ENOMEM;
        p->values = p->keys + p->n_tokens;
        return 0;
}

static int begin(struct profile *p) {
        struct task *task = p->task;
        int r = task_needs_numbers(task);

        if (r < 0)
                return r;
        p->groups = task->space->ix->geometry.layer_groups;
        p->n_tokens = task->job->param[0];
        p->n_blocks = task->job->n_items / p->groups / 2;
        if (!p->n_tokens || task->job->n_items != p->groups * 2 * p->n_blocks ||
            p->n_tokens > (uint64_t)p->n_blocks * task->shape.tokens)
                return task_refuse(task, -EINVAL, "%u tokens in %u blocks of %u groups",
                                   p->n_tokens, task->job->n_items, p->groups);
        return make_room(p);
}

static int find_blocks(struct profile *p) {
        struct task *task = p->task;

        p->blocks = task_room(task, task->job->n_items, sizeof *p->blocks);
        for (uint32_t i = 0; p->blocks && i < task->job->n_items; i++) {
                p->blocks[i] = task_block(task, i);
                if (!p->blocks[i])
                        return task_refuse(task, -ESTALE, "a block of the sample is gone");
        }
        return p->blocks ? 0 : -ENOMEM;
}

static int do_profile(struct task *task) {
        struct profile p = {.task = task, .compare = compare_layer};
        int r = begin(&p);

        if (r == 0)
                r = find_blocks(&p);
        return r < 0 ? r : compare_layers(&p);
}

static int do_profile_on_device(struct task *task) {
        struct profile p = {.task = task};
        int r = begin(&p);

        if (r == 0)
                r = profile_on_device(&p);
        return r < 0 ? r : compare_layers(&p);
}

const struct job_kind job_profile = {.name = "profile",
                                     .access = TASK_READ,
                                     .call = do_profile,
                                     .on_device = do_profile_on_device};
