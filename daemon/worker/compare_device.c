/* SPDX-License-Identifier: Apache-2.0 */

/*
 * MemShare's second stage where the blocks are: every pair that may be shared is a piece of work
 * for the GPU's kernels, and what comes to the processor is a distance each, of the same bits as
 * the processor's. Which is the nearest is decided here, in the order of job_compare.c.
 */

#include <errno.h>
#include <string.h>

#include "daemon/worker/compare.h"
#include "kernels/cuda/memshare.h"

#define MOST_PAIRS (1u << 22) /* 80 MiB of the GPU's memory */
#define MOST_ANGLES 4096u     /* distances of positions, each a row of angles */

struct pairs {
        struct compare *c;
        uint32_t n, n_angles;
        uint32_t *ids;                   /* [item] */
        struct gpu_memshare_pair *pairs; /* in order */
        float *similarity;               /* [pair] */
        int64_t *deltas;                 /* [angle] */
        float *angles;                   /* [angle]: cosine [half], sine [half] */
        double *distances;               /* [pair] */
        cu_address next, d_ids, d_pairs, d_angles, d_norms, d_distances;
};

typedef void pair_visitor(struct pairs *p, uint32_t target, uint32_t source, float similarity);

static void each_pair(struct pairs *p, pair_visitor *visit) {
        const struct compare *c = p->c;
        const struct kvd_job_step *new = &c->task->steps[0];

        for (uint32_t target = new->first_item; target < new->first_item + new->n_items; target++)
                for (uint32_t k = 0; k < c->n_steps; k++) {
                        const struct kvd_job_step *s = &c->task->steps[c->steps[k].step];

                        for (uint32_t i = s->first_item; i < s->first_item + s->n_items; i++)
                                if (p->ids[target] != GPU_NO_BLOCK && p->ids[i] != GPU_NO_BLOCK &&
                                    compare_may(c, target, i))
                                        visit(p, target, i, c->steps[k].similarity);
                }
}

static void count_pair(struct pairs *p, uint32_t target, uint32_t source, float similarity) {
        p->n++;
}

/* Keys of the source turn by as many positions as it lies before the target. */
static uint32_t angle_of(struct pairs *p, uint32_t target, uint32_t source) {
        const struct kvd_job_item *items = p->c->task->items;
        int64_t delta = (int64_t)items[target].position - items[source].position;
        uint32_t i = p->n_angles;

        while (i > 0 && p->deltas[i - 1] != delta)
                i--;
        if (i > 0)
                return i - 1;
        if (p->n_angles < MOST_ANGLES)
                p->deltas[p->n_angles] = delta;
        return p->n_angles++;
}

static void put_pair(struct pairs *p, uint32_t target, uint32_t source, float similarity) {
        if (p->c->half && p->n_angles > MOST_ANGLES)
                return;
        p->similarity[p->n] = similarity;
        p->pairs[p->n++] = (struct gpu_memshare_pair){target, source,
                                                      p->c->half ? angle_of(p, target, source) : 0};
}

static int find_pairs(struct pairs *p) {
        struct task *task = p->c->task;

        p->ids = task_room(task, task->job->n_items, sizeof *p->ids);
        if (!p->ids)
                return -ENOMEM;
        for (uint32_t i = 0; i < task->job->n_items; i++)
                p->ids[i] = task_address(task, i) && task->items[i].n_tokens == task->shape.tokens ?
                                    kvd_ref_id(task->items[i].ref) : GPU_NO_BLOCK;
        each_pair(p, count_pair);
        if (p->n > MOST_PAIRS)
                return -ENOSYS;
        p->pairs = task_room(task, p->n, sizeof *p->pairs);
        p->similarity = task_room(task, p->n, sizeof *p->similarity);
        p->distances = task_room(task, p->n, sizeof *p->distances);
        p->deltas = task_room(task, MOST_ANGLES, sizeof *p->deltas);
        if (!p->pairs || !p->similarity || !p->distances || !p->deltas)
                return -ENOMEM;
        p->n = 0;
        each_pair(p, put_pair);
        return p->n_angles > MOST_ANGLES ? -ENOSYS : 0;
}

static int make_angles(struct pairs *p) {
        const struct compare *c = p->c;

        p->angles = task_room(c->task, (size_t)p->n_angles * 2 * c->half, sizeof *p->angles);
        for (uint32_t i = 0; p->angles && i < p->n_angles; i++)
                kvd_memshare_angles(c->frequencies, c->half, p->deltas[i],
                                    p->angles + (size_t)i * 2 * c->half,
                                    p->angles + (size_t)i * 2 * c->half + c->half);
        return p->angles ? 0 : -ENOMEM;
}

/* ---- on the GPU ------------------------------------------------------------------------------ */

static cu_address part(struct pairs *p, uint64_t bytes) {
        cu_address at = p->next;

        p->next += ALIGN_UP(bytes, 256);
        return at;
}

static void lay_out(struct pairs *p, cu_address from) {
        const struct compare *c = p->c;
        uint64_t n = c->task->job->n_items;

        p->next = from;
        p->d_ids = part(p, n * sizeof *p->ids);
        p->d_pairs = part(p, p->n * (uint64_t)sizeof *p->pairs);
        p->d_angles = part(p, (uint64_t)p->n_angles * 2 * c->half * sizeof(float));
        p->d_norms = part(p, n * 2 * c->shape.layers * sizeof(float));
        p->d_distances = part(p, p->n * (uint64_t)sizeof *p->distances);
}

static int upload(struct pairs *p) {
        struct worker_device *device = p->c->task->device;
        int r = device_write(device, p->d_ids, p->ids, p->c->task->job->n_items * sizeof *p->ids);

        if (r == 0)
                r = device_write(device, p->d_pairs, p->pairs, p->n * sizeof *p->pairs);
        if (r == 0 && p->n_angles)
                r = device_write(device, p->d_angles, p->angles,
                                 (uint64_t)p->n_angles * 2 * p->c->half * sizeof(float));
        return r;
}

static int launch(struct pairs *p, struct gpu *gpu, cu_stream stream) {
        const struct compare *c = p->c;
        const struct gpu_memshare_shape shape = {c->shape.layers,
                                                 c->shape.heads,
                                                 c->shape.tokens,
                                                 c->shape.dim,
                                                 c->task->space->ix->geometry.order,
                                                 c->shape.type};
        const struct gpu_blocks blocks = {c->task->space->device_base, c->task->shape.block_bytes,
                                          p->d_ids};
        const struct gpu_memshare_keep norms = {
                .blocks = blocks, .shape = shape, .n = c->task->job->n_items, .to = p->d_norms};
        const struct gpu_memshare distances = {.blocks = blocks,
                                               .shape = shape,
                                               .metric = c->metric,
                                               .half = c->half,
                                               .limit = c->limit,
                                               .pairs = p->d_pairs,
                                               .n = p->n,
                                               .angles = c->half ? p->d_angles : 0,
                                               .norms = p->d_norms,
                                               .distances = p->d_distances};
        int r = gpu_memshare_norms(gpu, stream, &norms);

        return r < 0 ? r : gpu_memshare(gpu, stream, &distances);
}

static int run_pairs(struct pairs *p, struct gpu *gpu) {
        struct worker_device *device = p->c->task->device;
        cu_address room;
        int r;

        lay_out(p, 0);
        room = device_room(device, p->next);
        if (!room)
                return -ENOSYS;
        lay_out(p, room);
        r = upload(p);
        if (r == 0)
                r = launch(p, gpu, device->stream);
        if (device_finish(device) < 0)
                return task_refuse(p->c->task, -EIO, "%s", device->why.line);
        if (r < 0)
                return -ENOSYS; /* whatever it is: there is another way */
        r = device_read(device, p->distances, p->d_distances, p->n * sizeof *p->distances);
        if (r < 0 || device_finish(device) < 0)
                return task_refuse(p->c->task, -EIO, "%s", device->why.line);
        return 0;
}

int compare_on_device(struct compare *c) {
        struct gpu *gpu = device_kernels(c->task->device);
        struct pairs p = {.c = c};
        int r = gpu ? find_pairs(&p) : -ENOSYS;

        if (r == 0 && p.n_angles)
                r = make_angles(&p);
        if (r == 0 && p.n)
                r = run_pairs(&p, gpu);
        for (uint32_t i = 0; r == 0 && i < p.n; i++)
                compare_keep(c, p.pairs[i].a, p.pairs[i].b, p.similarity[i], p.distances[i]);
        return r;
}
