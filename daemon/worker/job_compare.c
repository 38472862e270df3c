/* SPDX-License-Identifier: Apache-2.0 */

/*
 * MemShare. Stage 1: earlier steps whose bags of words are like the new one's (step 0). Stage 2: for each block of the
 * new step that may be replaced, the nearest block of those steps that may stand in, if it is near enough. Under
 * memshare.align = rope the candidate's keys are rotated to the target's position first; whoever uses it then rotates
 * queries.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "daemon/worker/compare.h"

#define NONE COMPARE_NONE

/* ---- stage 1 ----------------------------------------------------------------------------------------------------- */

static int check_steps(struct run *run) {
        if (run->job->n_steps == 0)
                return run_refuse(run, -EPROTO, "nothing to compare");
        for (uint32_t i = 0; i < run->job->n_steps; i++) {
                const struct kvd_job_step *s = &run->steps[i];

                if ((uint64_t)s->first_item + s->n_items > run->job->n_items ||
                    (uint64_t)s->first_token + s->n_tokens > run->job->n_tokens)
                        return run_refuse(run, -EPROTO, "a step beyond the job's items or tokens");
        }
        return 0;
}

static int make_bag(struct run *run, uint32_t step, struct kvd_bag *bag) {
        const struct kvd_job_step *s = &run->steps[step];
        uint32_t *ids = run_room(run, s->n_tokens, sizeof *ids);
        uint16_t *counts = run_room(run, s->n_tokens, sizeof *counts);

        if (!ids || !counts)
                return -ENOMEM;
        kvd_bag_make(bag, run->tokens + s->first_token, s->n_tokens, ids, counts);
        return 0;
}

/* Keeps the list in order, best first, earlier before later; at most so many. */
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

static int find_steps(struct compare *c) {
        struct run *run = c->run;
        uint32_t most = (uint32_t)run_setting(run, KVD_memshare_top_steps) ?: UINT32_MAX;
        double tau = run_setting(run, KVD_memshare_tau_step);
        struct kvd_bag new, other;
        int r;

        c->steps = run_room(run, run->job->n_steps, sizeof *c->steps);
        r = c->steps ? make_bag(run, 0, &new) : -ENOMEM;
        for (uint32_t i = 1; r == 0 && i < run->job->n_steps; i++) {
                double similarity;

                r = make_bag(run, i, &other);
                if (r < 0)
                        break;
                similarity = kvd_bag_cosine(&new, &other);
                if (similarity > tau)
                        keep_best(c, (struct candidate){i, (float)similarity}, most);
        }
        return r;
}

/* ---- stage 2 ----------------------------------------------------------------------------------------------------- */

/* Norms of the summary, or made now. */
static void prepare(void *data, uint32_t i, uint32_t thread) {
        struct compare *c = data;
        const struct run *run = c->run;
        const struct kvd_job_item *item = &run->items[i];
        const uint8_t *block = run_block(run, i);
        const uint8_t *row = run_summary(run, item->row, kvd_ref_generation(item->ref));
        float *norms = c->norms + (size_t)i * 2 * c->shape.layers;

        c->blocks[i] = item->n_tokens == run->shape.tokens ? block : NULL;
        if (!c->blocks[i])
                return;
        if (row)
                memcpy(norms, row + run->space->summary.norms_off, 2 * c->shape.layers * sizeof *norms);
        else
                run->ops->memshare->norms(&c->shape, block, norms);
}

bool compare_may(const struct compare *c, uint32_t target, uint32_t source) {
        const struct kvd_job_item *items = c->run->items;

        return items[target].flags & KVD_JOB_TARGET && items[source].flags & KVD_JOB_SOURCE &&
               kvd_ref_id(items[source].ref) != kvd_ref_id(items[target].ref);
}

void compare_keep(struct compare *c, uint32_t target, uint32_t source, float similarity, double distance) {
        struct kvd_match *best = &c->found[target - c->run->steps[0].first_item];

        if (!(distance <= c->limit) || (best->source != NONE && !(distance < (double)best->distance)))
                return;
        *best = (struct kvd_match){target, source, (float)distance, similarity};
}

static double distance(struct compare *c, uint32_t target, uint32_t source, double limit, uint32_t thread) {
        const struct run *run = c->run;
        int64_t delta = (int64_t)run->items[target].position - run->items[source].position;
        float *cosine = c->angles + (size_t)thread * 2 * c->half;
        struct kvd_memshare_query q = {.shape = &c->shape, .metric = c->metric, .cosine = cosine,
                                       .sine = cosine + c->half, .half = delta ? c->half : 0,
                                       .limit = limit};
        const struct kvd_memshare_block a = {c->blocks[target], c->norms + (size_t)target * 2 * c->shape.layers};
        const struct kvd_memshare_block b = {c->blocks[source], c->norms + (size_t)source * 2 * c->shape.layers};

        if (q.half)
                kvd_memshare_angles(c->frequencies, c->half, delta, cosine, cosine + c->half);
        return run->ops->memshare->distance(&q, &a, &b);
}

static void compare_pair(struct compare *c, uint32_t target, uint32_t source, float similarity, uint32_t thread) {
        const struct kvd_match *best = &c->found[target - c->run->steps[0].first_item];
        double limit = best->source == NONE ? c->limit : MIN(c->limit, (double)best->distance);

        compare_keep(c, target, source, similarity, distance(c, target, source, limit, thread));
}

static void find_nearest(void *data, uint32_t i, uint32_t thread) {
        struct compare *c = data;
        const struct run *run = c->run;
        uint32_t target = run->steps[0].first_item + i;

        if (!c->blocks[target])
                return;
        for (uint32_t k = 0; k < c->n_steps; k++) {
                const struct kvd_job_step *s = &run->steps[c->steps[k].step];

                for (uint32_t source = s->first_item; source < s->first_item + s->n_items; source++)
                        if (c->blocks[source] && compare_may(c, target, source))
                                compare_pair(c, target, source, c->steps[k].similarity, thread);
        }
}

/* Keys that were stored before rotation are alike wherever they lie. */
static int prepare_rotation(struct compare *c) {
        const struct run *run = c->run;
        uint32_t dims = (uint32_t)run_setting(run, KVD_model_rope_dims) ?: run->shape.dim;
        uint32_t threads = team_threads(run->team);

        if (!run_setting(run, KVD_memshare_align) || run->space->ix->geometry.rope != KVD_ROPE_POST)
                return 0;
        c->half = MIN(dims, run->shape.dim) / 2;
        c->frequencies = run_room((struct run *)run, c->half, sizeof *c->frequencies);
        c->angles = run_room((struct run *)run, (size_t)threads * 2 * c->half, sizeof *c->angles);
        if (!c->frequencies || !c->angles)
                return -ENOMEM;
        kvd_memshare_frequencies(c->frequencies, c->half, run_setting(run, KVD_model_rope_theta));
        return 0;
}

static int make_rooms(struct compare *c) {
        struct run *run = c->run;

        c->norms = run_room(run, (size_t)run->job->n_items * 2 * c->shape.layers, sizeof *c->norms);
        c->blocks = run_room(run, run->job->n_items, sizeof *c->blocks);
        return c->norms && c->blocks ? prepare_rotation(c) : -ENOMEM;
}

static int find_blocks(struct compare *c) {
        struct run *run = c->run;
        uint32_t n = run->steps[0].n_items;
        int r = make_rooms(c);

        if (r < 0)
                return r;
        c->found = run_room(run, n, sizeof *c->found);
        if (!c->found)
                return -ENOMEM;
        for (uint32_t i = 0; i < n; i++)
                c->found[i].source = NONE;
        r = run_on_device(run) ? compare_on_device(c) : -ENOSYS;
        if (r == -ENOSYS)
                r = run_stage(run, RUN_READ);
        else
                return r;
        if (r < 0)
                return r;
        team_run(run->team, run->job->n_items, prepare, c);
        team_run(run->team, n, find_nearest, c);
        return 0;
}

/* ---- the job ----------------------------------------------------------------------------------------------------- */

static int tell(struct compare *c) {
        uint32_t n = c->n_steps ? c->run->steps[0].n_items : 0, found = 0;
        struct kvd_match *to;

        for (uint32_t i = 0; i < n; i++)
                found += c->found[i].source != NONE;
        to = run_results(c->run, found, sizeof *to);
        if (!to)
                return -E2BIG;
        for (uint32_t i = 0; i < n; i++)
                if (c->found[i].source != NONE)
                        *to++ = c->found[i];
        return 0;
}

static double limit_of(const struct run *run) {
        float tau;

        memcpy(&tau, &run->job->param[0], sizeof tau);
        return tau > 0 ? (double)tau : run_setting(run, KVD_memshare_tau_block);
}

static struct compare comparison(struct run *run) {
        const struct shape *s = &run->shape;

        return (struct compare){.run = run, .metric = (enum kvd_memshare_metric)(1 + (int)run_setting(
                                                            run, KVD_memshare_metric)),
                                .shape = {.layers = s->layers, .heads = s->heads, .tokens = s->tokens, .dim = s->dim,
                                          .type = s->type}};
}

int run_compare(struct run *run) {
        struct compare c = comparison(run);
        int r = run_needs_numbers(run);

        if (r == 0)
                r = check_steps(run);
        if (r < 0)
                return r;
        c.limit = limit_of(run);
        r = find_steps(&c);
        if (r == 0 && c.n_steps)
                r = find_blocks(&c);
        return r < 0 ? r : tell(&c);
}

/* ---- CALIBRATE --------------------------------------------------------------------------------------------------- */

struct pairs {
        struct compare c;
        float *result; /* [pair] */
};

static void measure(void *data, uint32_t i, uint32_t thread) {
        struct pairs *all = data;
        bool there = all->c.blocks[2 * i] && all->c.blocks[2 * i + 1];

        all->result[i] = there ? (float)distance(&all->c, 2 * i, 2 * i + 1, (double)INFINITY, thread) : INFINITY;
}

int run_calibrate(struct run *run) {
        struct pairs all = {.c = comparison(run)};
        int r = run_needs_numbers(run);

        if (r < 0)
                return r;
        if (run->job->n_items % 2)
                return run_refuse(run, -EPROTO, "a pair of one");
        all.result = run_results(run, run->job->n_items / 2, sizeof *all.result);
        if (!all.result)
                return -E2BIG;
        r = make_rooms(&all.c);
        if (r < 0)
                return r;
        team_run(run->team, run->job->n_items, prepare, &all.c);
        team_run(run->team, run->job->n_items / 2, measure, &all);
        return 0;
}
