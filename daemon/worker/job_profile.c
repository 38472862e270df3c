/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's similarity of a prefix's keys and values computed alone with those computed as part of the whole input,
 * layer by layer, in two readings:
 *
 *      token_mean   mean over tokens of the cosines of their keys (all heads together) and of their values
 *      flat         cosine of all keys and values as one vector
 *
 *      items   [layer group][alone, whole][block]      param   tokens
 *      result  float [layers of all groups][2]: token_mean, flat
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "daemon/worker/job.h"

struct profile {
        struct run *run;
        uint32_t groups, n_blocks, n_tokens; /* blocks of one side of one group */
        const uint8_t **blocks;
        float *rooms;        /* [thread][2][dim] */
        float (*result)[2];
};

struct sums {
        double dot, a, b;
};

static double cosine(const struct sums *s) {
        return s->a > 0 && s->b > 0 ? s->dot / sqrt(s->a * s->b) : 0;
}

static const float *floats(const struct run *run, const uint8_t *from, float *room) {
        if (run->shape.type == KVD_NUMBER_F32)
                return (const float *)from;
        run->ops->widen(room, (const uint16_t *)from, run->shape.dim, run->shape.type);
        return room;
}

/* One token's keys, or values, of all heads. */
static struct sums compare_token(const struct run *run, const uint8_t *a, const uint8_t *b, float *room) {
        const struct shape *s = &run->shape;
        struct sums sums = {0};

        for (uint32_t h = 0; h < s->heads; h++) {
                const float *x = floats(run, a + h * s->head_stride * s->element, room);
                const float *y = floats(run, b + h * s->head_stride * s->element, room + s->dim);

                for (uint32_t d = 0; d < s->dim; d++) {
                        sums.dot += (double)x[d] * y[d];
                        sums.a += (double)x[d] * x[d];
                        sums.b += (double)y[d] * y[d];
                }
        }
        return sums;
}

static void compare_layer(void *data, uint32_t at, uint32_t thread) {
        const struct profile *p = data;
        const struct run *run = p->run;
        const struct shape *s = &run->shape;
        const uint8_t **alone = p->blocks + (size_t)(at / s->layers) * 2 * p->n_blocks, **whole = alone + p->n_blocks;
        float *room = p->rooms + (size_t)thread * 2 * s->dim;
        struct sums all = {0};
        double mean = 0;

        for (uint32_t t = 0; t < p->n_tokens; t++)
                for (uint32_t v = 0; v < 2; v++) {
                        size_t off = (at % s->layers * 2 + v) * s->plane + t % s->tokens * s->token_stride * s->element;
                        uint32_t i = t / s->tokens;
                        struct sums one = compare_token(run, alone[i] + off, whole[i] + off, room);

                        mean += cosine(&one);
                        all.dot += one.dot;
                        all.a += one.a;
                        all.b += one.b;
                }
        p->result[at][0] = (float)(mean / (2.0 * p->n_tokens));
        p->result[at][1] = (float)cosine(&all);
}

int run_profile(struct run *run) {
        struct profile p = {.run = run, .groups = run->space->ix->geometry.layer_groups,
                            .n_tokens = run->job->param[0]};
        int r = run_needs_numbers(run);

        if (r < 0)
                return r;
        p.n_blocks = run->job->n_items / p.groups / 2;
        if (!p.n_tokens || run->job->n_items != p.groups * 2 * p.n_blocks ||
            p.n_tokens > (uint64_t)p.n_blocks * run->shape.tokens)
                return run_refuse(run, -EINVAL, "%u tokens in %u blocks of %u groups", p.n_tokens, run->job->n_items,
                                  p.groups);
        p.blocks = run_room(run, run->job->n_items, sizeof *p.blocks);
        p.result = run_results(run, (size_t)p.groups * run->shape.layers, sizeof *p.result);
        p.rooms = run_room(run, (size_t)team_threads(run->team) * 2 * run->shape.dim, sizeof(float));
        if (!p.blocks || !p.result || !p.rooms)
                return -ENOMEM;
        for (uint32_t i = 0; i < run->job->n_items; i++) {
                p.blocks[i] = run_block(run, run->items[i].ref);
                if (!p.blocks[i])
                        return run_refuse(run, -ESTALE, "a block of the sample is gone");
        }
        team_run(run->team, p.groups * run->shape.layers, compare_layer, &p);
        return 0;
}
