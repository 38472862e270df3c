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
#include "daemon/process/worker/task.h"
#include "kernels/bicache.h"
#include "kernels/cuda/bicache.h"

struct profile {
        struct task *task;
        uint32_t groups, n_blocks, n_tokens; /* blocks of one side of one group */
        uint32_t layer;                      /* being compared; counted over all groups */
        /* Fills keys and values with the layer's products. 0 or negative errno. */
        int (*compare)(const struct profile *p);
        const uint8_t **blocks; /* [item]; only on the processor */
        struct gpu *gpu;        /* only on the GPU, as are the addresses: */
        cu_address d_ids, d_products;
        struct kvd_products *keys, *values; /* [token] of the layer; values follows keys */
        float (*result)[2];
};

/* Compares the keys, or the values, of one block's tokens. */
static void add_products(const struct profile *p, const uint8_t *alone, const uint8_t *whole,
                         size_t off, uint32_t n, struct kvd_products *to) {
        const struct task *task = p->task;
        const struct shape *s = &task->shape;

        memset(to, 0, n * sizeof *to);
        for (uint32_t h = 0; h < s->heads; h++) {
                size_t at = off + h * s->head_stride;

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

/* ---- on a GPU -------------------------------------------------------------------------------- */

/*
 * The GPU computes each token's products, with the same bits as the processor would, and the
 * processor gets six numbers for each token and layer. Launches are short (task_launch_bytes), so
 * that other jobs get their turns in between.
 */

static struct gpu_products products_of(const struct profile *p, uint32_t first, uint32_t n) {
        const struct task *task = p->task;
        const struct shape *s = &task->shape;
        const struct gpu_blocks blocks = {task->space->device_base, s->block_bytes, p->d_ids};
        uint64_t alone = (uint64_t)(p->layer / s->layers) * 2 * p->n_blocks + first;
        struct gpu_products a = {.to = p->d_products,
                                 .a = blocks,
                                 .b = blocks,
                                 .offset = p->layer % s->layers * 2 * s->plane,
                                 .plane_stride = s->plane,
                                 .head_stride = s->head_stride,
                                 .token_stride = s->token_stride,
                                 .planes = 2,
                                 .heads = s->heads,
                                 .tokens = n,
                                 .per_block = s->tokens,
                                 .dim = s->dim,
                                 .number = s->type};

        a.a.ids += alone * sizeof(uint32_t);
        a.b.ids += (alone + p->n_blocks) * sizeof(uint32_t);
        return a;
}

/* Compares n tokens, from block first on. */
static int compare_some(const struct profile *p, uint32_t first, uint32_t n) {
        struct worker_device *device = p->task->device;
        const struct gpu_products a = products_of(p, first, n);
        uint64_t at = (uint64_t)first * p->task->shape.tokens, bytes = n * sizeof *p->keys;
        int r = gpu_products(p->gpu, device->stream, &a);

        if (r == 0)
                r = device_read(device, p->keys + at, a.to, bytes);
        if (r == 0)
                r = device_read(device, p->values + at, a.to + bytes, bytes);
        if (device_finish(device) < 0)
                return task_refuse(p->task, -EIO, "%s", device->why.line);
        return r < 0 ? task_refuse(p->task, r, "%s", p->gpu->why) : 0;
}

static uint32_t per_launch(const struct profile *p) {
        return (uint32_t)MIN(MAX(task_launch_bytes(p->task) / (4 * p->task->shape.plane), 1),
                             p->n_blocks);
}

static int compare_on_device(const struct profile *p) {
        const struct shape *s = &p->task->shape;
        uint32_t most = per_launch(p);
        int r = 0;

        for (uint32_t i = 0; r == 0 && i * s->tokens < p->n_tokens; i += most) {
                r = compare_some(p, i, MIN(most * s->tokens, p->n_tokens - i * s->tokens));
                task_spend(p->task, 4 * s->plane * most);
        }
        return r;
}

static void lay_out(struct profile *p, cu_address from) {
        p->d_ids = device_part(&from, p->task->job->n_items * sizeof(uint32_t));
        p->d_products = from;
}

/* Prepares compare on the GPU. -ENOSYS: the GPU cannot do it, and nothing was done. */
static int begin_on_device(struct profile *p) {
        struct worker_device *device = p->task->device;
        uint64_t tokens = (uint64_t)per_launch(p) * p->task->shape.tokens;
        cu_address room;

        p->gpu = device_kernels(device);
        if (!p->gpu)
                return -ENOSYS;
        lay_out(p, 0);
        room = device_room(device, p->d_products + 2 * tokens * sizeof *p->keys);
        if (!room)
                return -ENOSYS;
        lay_out(p, room);
        p->compare = compare_on_device;
        return task_send_ids(p->task, p->d_ids, "the sample");
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
                r = begin_on_device(&p);
        return r < 0 ? r : compare_layers(&p);
}

const struct job_kind job_profile = {.name = "profile",
                                     .access = TASK_READ,
                                     .call = do_profile,
                                     .on_device = do_profile_on_device};
