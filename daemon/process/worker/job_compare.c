/* SPDX-License-Identifier: Apache-2.0 */

/*
 * MemShare. Stage 1 finds earlier steps whose bags of words are similar to the new one's (step 0).
 * Stage 2 finds, for each block of the new step that may be replaced, the nearest block of those
 * steps that may replace it, if it is near enough. With memshare.align = rope, the source's keys
 * are rotated to the target's position first; a client that uses the match then rotates its
 * queries.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "daemon/process/worker/compare.h"
#include "daemon/process/worker/jobs.h"

#define NONE COMPARE_NONE

/* ---- stage 1 --------------------------------------------------------------------------------- */

static int check_steps(struct task *task) {
        if (task->job->n_steps == 0)
                return task_refuse(task, -EPROTO, "nothing to compare");
        for (uint32_t i = 0; i < task->job->n_steps; i++) {
                const struct kvd_job_step *s = &task->steps[i];

                if ((uint64_t)s->first_item + s->n_items > task->job->n_items ||
                    (uint64_t)s->first_token + s->n_tokens > task->job->n_tokens)
                        return task_refuse(task, -EPROTO,
                                           "a step beyond the job's items or tokens");
        }
        return 0;
}

static int make_bag(struct task *task, uint32_t step, struct kvd_bag *bag) {
        const struct kvd_job_step *s = &task->steps[step];
        uint32_t *ids = task_room(task, s->n_tokens, sizeof *ids);
        uint16_t *counts = task_room(task, s->n_tokens, sizeof *counts);

        if (!ids || !counts)
                return -ENOMEM;
        kvd_bag_make(bag, task->tokens + s->first_token, s->n_tokens, ids, counts);
        return 0;
}

/* Inserts into the list: best first, on ties earlier steps first, at most `most` steps. */
static void keep_best(struct compare *c, struct candidate new, uint32_t most) {
        uint32_t at = c->n_steps;

        while (at > 0 && c->steps[at - 1].similarity < new.similarity)
                at--;
        if (at == most)
                return;
        if (c->n_steps < most)
                c->n_steps++;
        memmove(&c->steps[at + 1], &c->steps[at], (c->n_steps - 1 - at) * sizeof *c->steps);
        c->steps[at] = new;
}

#define BAG_BYTES 64u /* cost of sorting and comparing one token of a bag */

static int find_steps(struct compare *c) {
        struct task *task = c->task;
        uint32_t most = (uint32_t)task_setting(task, KVD_memshare_top_steps) ?: UINT32_MAX;
        double tau = task_setting(task, KVD_memshare_tau_step);
        struct kvd_bag new, other;
        int r;

        c->steps = task_room(task, task->job->n_steps, sizeof *c->steps);
        r = c->steps ? make_bag(task, 0, &new) : -ENOMEM;
        for (uint32_t i = 1; r == 0 && i < task->job->n_steps; i++) {
                double similarity;

                r = make_bag(task, i, &other);
                if (r < 0)
                        break;
                similarity = kvd_bag_cosine(&new, &other);
                task_spend(task, (uint64_t)(task->steps[0].n_tokens + task->steps[i].n_tokens) *
                                         BAG_BYTES);
                if (similarity > tau)
                        keep_best(c, (struct candidate){i, (float)similarity}, most);
        }
        return r;
}

/* ---- stage 2 --------------------------------------------------------------------------------- */

static struct kvd_memshare_shape shape_of(const struct task *task, uint32_t layers) {
        const struct shape *s = &task->shape;

        return (struct kvd_memshare_shape){.layers = layers,
                                           .heads = s->heads,
                                           .tokens = s->tokens,
                                           .dim = s->dim,
                                           .type = s->type};
}

void compare_norms(const struct task *task, uint32_t layers, const uint8_t *planes, float *to) {
        const struct kvd_memshare_shape shape = shape_of(task, layers);

        task->ops->memshare->norms(&shape, planes, to);
}

void compare_angles(const struct compare *c, int64_t delta, float *to) {
        kvd_memshare_angles(c->frequencies, c->half, delta, to, to + c->half);
}

/* Norms come from the summary, or are computed if there is none. */
static void prepare(void *data, uint32_t i, uint32_t thread) {
        struct compare *c = data;
        const struct task *task = c->task;
        const struct kvd_job_item *item = &task->items[i];
        const uint8_t *block = task_block(task, i);
        const uint8_t *row = task_summary(task, item->row, kvd_ref_generation(item->ref));
        float *norms = c->norms + (size_t)i * 2 * c->shape.layers;

        c->blocks[i] = item->n_tokens == task->shape.tokens ? block : NULL;
        if (!c->blocks[i])
                return;
        if (row)
                memcpy(norms, row + task->space->summary.norms_off,
                       2 * c->shape.layers * sizeof *norms);
        else
                compare_norms(task, c->shape.layers, block, norms);
}

bool compare_may(const struct compare *c, uint32_t target, uint32_t source) {
        const struct kvd_job_item *items = c->task->items;

        return items[target].flags & KVD_JOB_TARGET && items[source].flags & KVD_JOB_SOURCE &&
               kvd_ref_id(items[source].ref) != kvd_ref_id(items[target].ref);
}

static bool same_tokens(const struct task *task, uint32_t target, uint32_t source) {
        uint32_t n = task->shape.tokens, most = task->job->n_tokens;
        uint32_t a = task->items[target].ordinal, b = task->items[source].ordinal;

        return most >= n && a <= most - n && b <= most - n &&
               memcmp(task->tokens + a, task->tokens + b, n * sizeof *task->tokens) == 0;
}

double compare_limit(const struct compare *c, uint32_t target, uint32_t source) {
        return c->limit_same > c->limit && same_tokens(c->task, target, source) ? c->limit_same :
                                                                                  c->limit;
}

void compare_keep(struct compare *c, uint32_t target, uint32_t source, float similarity,
                  double distance) {
        struct kvd_match *best = &c->found[target - c->task->steps[0].first_item];

        if (!(distance <= compare_limit(c, target, source)) ||
            (best->source != NONE && !(distance < (double)best->distance)))
                return;
        *best = (struct kvd_match){target, source, (float)distance, similarity};
}

static double distance(struct compare *c, uint32_t target, uint32_t source, double limit,
                       uint32_t thread) {
        const struct task *task = c->task;
        int64_t delta = (int64_t)task->items[target].position - task->items[source].position;
        float *cosine = c->angles + (size_t)thread * 2 * c->half;
        struct kvd_memshare_query q = {.shape = &c->shape,
                                       .metric = c->metric,
                                       .cosine = cosine,
                                       .sine = cosine + c->half,
                                       .half = delta ? c->half : 0,
                                       .limit = limit};
        const struct kvd_memshare_block a = {c->blocks[target],
                                             c->norms + (size_t)target * 2 * c->shape.layers};
        const struct kvd_memshare_block b = {c->blocks[source],
                                             c->norms + (size_t)source * 2 * c->shape.layers};

        if (q.half)
                compare_angles(c, delta, cosine);
        return task->ops->memshare->distance(&q, &a, &b);
}

static void compare_pair(struct compare *c, uint32_t target, uint32_t source, float similarity,
                         uint32_t thread) {
        const struct kvd_match *best = &c->found[target - c->task->steps[0].first_item];
        double limit = compare_limit(c, target, source);

        if (best->source != NONE)
                limit = MIN(limit, (double)best->distance);
        compare_keep(c, target, source, similarity, distance(c, target, source, limit, thread));
}

/* Sources of one candidate step, compared with every target. */
struct sources {
        struct compare *c;
        uint32_t first, n;
        float similarity;
};

static void find_nearest(void *data, uint32_t i, uint32_t thread) {
        const struct sources *s = data;
        struct compare *c = s->c;
        uint32_t target = c->task->steps[0].first_item + i;

        for (uint32_t source = s->first; c->blocks[target] && source < s->first + s->n; source++)
                if (c->blocks[source] && compare_may(c, target, source))
                        compare_pair(c, target, source, s->similarity, thread);
}

#define SOURCES_BYTES (UINT64_C(8) << 20) /* sources that a target is compared with at a time */

/* Compares each target with all sources in the same order, best step first. */
static void find_all(struct compare *c) {
        struct task *task = c->task;
        uint32_t most = (uint32_t)MAX(SOURCES_BYTES / task->shape.block_bytes, 1);

        for (uint32_t k = 0; k < c->n_steps; k++) {
                const struct kvd_job_step *step = &task->steps[c->steps[k].step];

                for (uint32_t at = 0; at < step->n_items; at += most) {
                        struct sources s = {c, step->first_item + at, MIN(most, step->n_items - at),
                                            c->steps[k].similarity};

                        task_share(task, task->steps[0].n_items, 2 * s.n * task->shape.block_bytes,
                                   find_nearest, &s);
                }
        }
}

/* Only keys that are stored after rotation depend on their position. */
static int prepare_rotation(struct compare *c) {
        const struct task *task = c->task;
        uint32_t dims = (uint32_t)task_setting(task, KVD_model_rope_dims) ?: task->shape.dim;
        uint32_t threads = threads_count(task->threads);

        if (!task_setting(task, KVD_memshare_align) ||
            task->space->ix->geometry.rope != KVD_rope_post)
                return 0;
        c->half = MIN(dims, task->shape.dim) / 2;
        c->frequencies = task_room((struct task *)task, c->half, sizeof *c->frequencies);
        c->angles = task_room((struct task *)task, (size_t)threads * 2 * c->half,
                              sizeof *c->angles);
        if (!c->frequencies || !c->angles)
                return -ENOMEM;
        kvd_memshare_frequencies(c->frequencies, c->half, task_setting(task, KVD_model_rope_theta));
        return 0;
}

static int make_rooms(struct compare *c) {
        struct task *task = c->task;

        c->norms = task_room(task, (size_t)task->job->n_items * 2 * c->shape.layers,
                             sizeof *c->norms);
        c->blocks = task_room(task, task->job->n_items, sizeof *c->blocks);
        return c->norms && c->blocks ? prepare_rotation(c) : -ENOMEM;
}

static int find_blocks(struct compare *c) {
        struct task *task = c->task;
        uint32_t n = task->steps[0].n_items;
        int r = make_rooms(c);

        if (r < 0)
                return r;
        c->found = task_room(task, n, sizeof *c->found);
        if (!c->found)
                return -ENOMEM;
        for (uint32_t i = 0; i < n; i++)
                c->found[i].source = NONE;
        r = task_on_device(task) ? compare_on_device(c) : -ENOSYS;
        if (r == -ENOSYS)
                r = task_stage(task, TASK_READ);
        else
                return r;
        if (r < 0)
                return r;
        task_share(task, task->job->n_items, task->shape.block_bytes, prepare, c);
        find_all(c);
        return 0;
}

/* ---- the job --------------------------------------------------------------------------------- */

static int tell(struct compare *c) {
        uint32_t n = c->n_steps ? c->task->steps[0].n_items : 0, found = 0;
        struct kvd_match *to;

        for (uint32_t i = 0; i < n; i++)
                found += c->found[i].source != NONE;
        to = task_results(c->task, found, sizeof *to);
        if (!to)
                return -E2BIG;
        for (uint32_t i = 0; i < n; i++)
                if (c->found[i].source != NONE)
                        *to++ = c->found[i];
        return 0;
}

static double limit_of(const struct task *task, uint32_t param) {
        float tau;

        memcpy(&tau, &task->job->param[param], sizeof tau);
        return (double)tau;
}

static struct compare comparison(struct task *task) {
        return (struct compare){.task = task,
                                .metric = (enum kvd_memshare_metric)(
                                        1 + (int)task_setting(task, KVD_memshare_metric)),
                                .shape = shape_of(task, task->shape.layers)};
}

static int do_compare(struct task *task) {
        struct compare c = comparison(task);
        int r = task_needs_numbers(task);

        if (r == 0)
                r = check_steps(task);
        if (r < 0)
                return r;
        c.limit = limit_of(task, 0) ?: task_setting(task, KVD_memshare_tau_block);
        c.limit_same = limit_of(task, 1);
        r = find_steps(&c);
        if (r == 0 && c.n_steps)
                r = find_blocks(&c);
        return r < 0 ? r : tell(&c);
}

/* ---- CALIBRATE ------------------------------------------------------------------------------- */

struct pairs {
        struct compare c;
        float *result; /* [pair] */
};

static void measure(void *data, uint32_t i, uint32_t thread) {
        struct pairs *all = data;
        bool there = all->c.blocks[2 * i] && all->c.blocks[2 * i + 1];

        all->result[i] = there ? (float)distance(&all->c, 2 * i, 2 * i + 1, all->c.limit, thread) :
                                 INFINITY;
}

static int begin_calibration(struct task *task, struct pairs *all) {
        int r = task_needs_numbers(task);

        if (r < 0)
                return r;
        if (task->job->n_items % 2)
                return task_refuse(task, -EPROTO, "an odd number of items makes no pairs");
        *all = (struct pairs){.c = comparison(task)};
        all->c.limit = (double)INFINITY;
        all->result = task_results(task, task->job->n_items / 2, sizeof *all->result);
        return all->result ? make_rooms(&all->c) : -E2BIG;
}

static int do_calibrate(struct task *task) {
        struct pairs all;
        int r = begin_calibration(task, &all);

        if (r < 0)
                return r;
        task_share(task, task->job->n_items, task->shape.block_bytes, prepare, &all.c);
        task_share(task, task->job->n_items / 2, 2 * task->shape.block_bytes, measure, &all);
        return 0;
}

static int do_calibrate_on_device(struct task *task) {
        struct pairs all;
        int r = begin_calibration(task, &all);

        return r < 0 ? r : calibrate_on_device(&all.c, all.result);
}

const struct job_kind job_compare = {.name = "compare", .access = TASK_NONE, .call = do_compare};
const struct job_kind job_calibrate = {.name = "calibrate",
                                       .access = TASK_READ,
                                       .call = do_calibrate,
                                       .on_device = do_calibrate_on_device};
