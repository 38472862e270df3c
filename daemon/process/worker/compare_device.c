/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The second stage of a comparison for blocks on a GPU. The GPU computes the distance of every pair
 * that may be shared, with the same bits as the processor would. The processor then finds the
 * nearest, in the order of job_compare.c. CALIBRATE does the same for given pairs.
 */

#include <errno.h>
#include <string.h>

#include "daemon/process/worker/compare.h"

#define MOST_PAIRS (1u << 22) /* 80 MiB of the GPU's memory */
#define MOST_ANGLES 4096u     /* different distances of positions; each has a row of angles */

struct pairs {
        struct compare *c;
        uint32_t n, n_angles;
        uint32_t *ids;                   /* [item] */
        struct gpu_distance_pair *pairs; /* in order */
        float *similarity;               /* [pair] */
        int64_t *deltas;                 /* [angle] */
        float *angles;                   /* [angle]: cosine [half], sine [half] */
        double *distances;               /* [pair] */
        cu_address next, d_ids, d_pairs, d_angles, d_norms, d_distances;
};

typedef void pair_visitor(struct pairs *p, uint32_t target, uint32_t source, float similarity);
typedef void pair_namer(struct pairs *p, pair_visitor *visit); /* visits all */

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

/*
 * The row of angles by which the source's keys are rotated to the target's position; MOST_ANGLES if
 * there are too many rows.
 */
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
        p->pairs[p->n++] = (struct gpu_distance_pair){target, source,
                                                      p->c->half ? angle_of(p, target, source) : 0};
}

static int find_pairs(struct pairs *p, pair_namer *all) {
        struct task *task = p->c->task;

        p->ids = task_room(task, task->job->n_items, sizeof *p->ids);
        if (!p->ids)
                return -ENOMEM;
        for (uint32_t i = 0; i < task->job->n_items; i++)
                p->ids[i] = task_address(task, i) && task->items[i].n_tokens == task->shape.tokens ?
                                    kvd_ref_id(task->items[i].ref) :
                                    GPU_NO_BLOCK;
        all(p, count_pair);
        if (p->n > MOST_PAIRS)
                return -ENOSYS;
        p->pairs = task_room(task, p->n, sizeof *p->pairs);
        p->similarity = task_room(task, p->n, sizeof *p->similarity);
        p->distances = task_room(task, p->n, sizeof *p->distances);
        p->deltas = task_room(task, MOST_ANGLES, sizeof *p->deltas);
        if (!p->pairs || !p->similarity || !p->distances || !p->deltas)
                return -ENOMEM;
        p->n = 0;
        all(p, put_pair);
        return p->n_angles > MOST_ANGLES ? -ENOSYS : 0;
}

static int make_angles(struct pairs *p) {
        const struct compare *c = p->c;

        p->angles = task_room(c->task, (size_t)p->n_angles * 2 * c->half, sizeof *p->angles);
        for (uint32_t i = 0; p->angles && i < p->n_angles; i++)
                compare_angles(c, p->deltas[i], p->angles + (size_t)i * 2 * c->half);
        return p->angles ? 0 : -ENOMEM;
}

/* ---- on the GPU ------------------------------------------------------------------------------ */

static void lay_out(struct pairs *p, cu_address from) {
        const struct compare *c = p->c;
        uint64_t n = c->task->job->n_items;

        p->next = from;
        p->d_ids = device_part(&p->next, n * sizeof *p->ids);
        p->d_pairs = device_part(&p->next, p->n * (uint64_t)sizeof *p->pairs);
        p->d_angles = device_part(&p->next, (uint64_t)p->n_angles * 2 * c->half * sizeof(float));
        p->d_norms = device_part(&p->next, n * 2 * c->shape.layers * sizeof(float));
        p->d_distances = device_part(&p->next, p->n * (uint64_t)sizeof *p->distances);
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

/* ---- launches -------------------------------------------------------------------------------- */

static struct gpu_block_shape shape_of(const struct compare *c) {
        return (struct gpu_block_shape){c->shape.layers,
                                        c->shape.heads,
                                        c->shape.tokens,
                                        c->shape.dim,
                                        c->task->space->ix->geometry.order,
                                        c->shape.type};
}

static struct gpu_blocks blocks_of(const struct pairs *p, uint32_t first) {
        const struct task *task = p->c->task;

        return (struct gpu_blocks){task->space->device_base, task->shape.block_bytes,
                                   p->d_ids + first * sizeof *p->ids};
}

/* Launches a kernel for n items, or pairs, from first on. */
typedef int launch_fn(const struct pairs *p, struct gpu *gpu, uint32_t first, uint32_t n);

static int launch_norms(const struct pairs *p, struct gpu *gpu, uint32_t first, uint32_t n) {
        const struct compare *c = p->c;
        const struct gpu_norms a = {.blocks = blocks_of(p, first),
                                    .shape = shape_of(c),
                                    .n = n,
                                    .to = p->d_norms +
                                          (uint64_t)first * 2 * c->shape.layers * sizeof(float)};

        return gpu_norms(gpu, c->task->device->stream, &a);
}

static int launch_pairs(const struct pairs *p, struct gpu *gpu, uint32_t first, uint32_t n) {
        const struct compare *c = p->c;
        const struct gpu_distances a = {.blocks = blocks_of(p, 0),
                                        .shape = shape_of(c),
                                        .metric = c->metric,
                                        .half = c->half,
                                        .limit = MAX(c->limit, c->limit_same),
                                        .pairs = p->d_pairs + first * sizeof *p->pairs,
                                        .n = n,
                                        .angles = c->half ? p->d_angles : 0,
                                        .norms = p->d_norms,
                                        .distances = p->d_distances + first * sizeof *p->distances};

        return gpu_distances(gpu, c->task->device->stream, &a);
}

/* Launches all n, task_launch_bytes at a time. blocks: how many each of the n reads. */
static int launch(struct pairs *p, struct gpu *gpu, launch_fn *some, uint32_t n, uint32_t blocks) {
        struct task *task = p->c->task;
        uint64_t bytes = blocks * task->shape.block_bytes;
        uint32_t most = (uint32_t)MIN(MAX(task_launch_bytes(task) / bytes, 1), n);
        int r = 0;

        for (uint32_t first = 0, k; r == 0 && first < n; first += k) {
                k = MIN(most, n - first);
                r = some(p, gpu, first, k);
                if (device_finish(task->device) < 0)
                        return task_refuse(task, -EIO, "%s", task->device->why.line);
                if (r == 0)
                        task_spend(task, k * bytes);
        }
        return r < 0 ? -ENOSYS : 0; /* whatever the error, the processor can do it */
}

static int run_pairs(struct pairs *p, struct gpu *gpu) {
        struct task *task = p->c->task;
        struct worker_device *device = task->device;
        cu_address room;
        int r;

        lay_out(p, 0);
        room = device_room(device, p->next);
        if (!room)
                return -ENOSYS;
        lay_out(p, room);
        r = upload(p);
        if (r == 0)
                r = launch(p, gpu, launch_norms, task->job->n_items, 1);
        if (r == 0)
                r = launch(p, gpu, launch_pairs, p->n, 2);
        if (r < 0)
                return r;
        r = device_read(device, p->distances, p->d_distances, p->n * sizeof *p->distances);
        if (r < 0 || device_finish(device) < 0)
                return task_refuse(task, -EIO, "%s", device->why.line);
        return 0;
}

/* ---- the jobs -------------------------------------------------------------------------------- */

static int measure(struct pairs *p, pair_namer *all) {
        struct gpu *gpu = device_kernels(p->c->task->device);
        int r = gpu ? find_pairs(p, all) : -ENOSYS;

        if (r == 0 && p->n_angles)
                r = make_angles(p);
        return r == 0 && p->n ? run_pairs(p, gpu) : r;
}

int compare_on_device(struct compare *c) {
        struct pairs p = {.c = c};
        int r = measure(&p, each_pair);

        for (uint32_t i = 0; r == 0 && i < p.n; i++)
                compare_keep(c, p.pairs[i].a, p.pairs[i].b, p.similarity[i], p.distances[i]);
        return r;
}

static void each_two(struct pairs *p, pair_visitor *visit) {
        for (uint32_t i = 0; i < p->c->task->job->n_items / 2; i++)
                visit(p, 2 * i, 2 * i + 1, 0);
}

int calibrate_on_device(struct compare *c, float *result) {
        struct pairs p = {.c = c};
        int r = measure(&p, each_two);

        for (uint32_t i = 0; r == 0 && i < p.n; i++)
                result[i] = (float)p.distances[i];
        return r;
}
