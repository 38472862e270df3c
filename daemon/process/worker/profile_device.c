/* SPDX-License-Identifier: Apache-2.0 */

/*
 * PROFILE for blocks on a GPU. The GPU computes each token's products, with the same bits as the
 * processor would, and the processor gets six numbers for each token and layer. Launches are short
 * (task_launch_bytes), so that other jobs get their turns in between.
 */

#include <errno.h>

#include "daemon/process/worker/profile.h"
#include "kernels/cuda/bicache.h"

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
                                 .head_stride = s->head_stride * s->element,
                                 .token_stride = s->token_stride * s->element,
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

static int compare(const struct profile *p) {
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

int profile_on_device(struct profile *p) {
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
        p->compare = compare;
        return task_send_ids(p->task, p->d_ids, "the sample");
}
