/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Picks the next token from logits: the most likely one, or a random one. The random numbers of
 * each request start from the seed again.
 */

#include "tools/kvlm/sample.h"

#include <errno.h>
#include <math.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

struct candidate {
        uint32_t id;
        float logit;
        double weight;
};

struct sampler {
        struct sampling options;
        uint64_t state;
        uint32_t vocab;
        struct candidate candidates[];
};

int sampler_new(const struct sampling *options, uint32_t vocab, struct sampler **ret) {
        struct sampler *s = calloc(1, sizeof *s + vocab * sizeof *s->candidates);

        if (!s)
                return refuse(-ENOMEM, "out of memory");
        s->options = *options;
        s->vocab = vocab;
        sampler_restart(s);
        *ret = s;
        return 0;
}

struct sampler *sampler_free(struct sampler *s) {
        free(s);
        return NULL;
}

void sampler_restart(struct sampler *s) {
        s->state = s->options.seed;
}

/* SplitMix64: 53 bits of it, in [0, 1) */
static double random_unit(struct sampler *s) {
        uint64_t z = s->state += UINT64_C(0x9e3779b97f4a7c15);

        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static uint32_t largest(const float *logits, uint32_t n) {
        uint32_t best = 0;

        for (uint32_t i = 1; i < n; i++)
                if (logits[i] > logits[best])
                        best = i;
        return best;
}

static int more_likely(const void *a, const void *b) {
        const struct candidate *x = a, *y = b;

        if (x->logit != y->logit)
                return x->logit > y->logit ? -1 : 1;
        return x->id < y->id ? -1 : 1;
}

/*
 * Sorts the candidates, computes their weights, and cuts them to top_k and top_p. Returns how many
 * remain, and their total weight.
 */
static uint32_t shortlist(struct sampler *s, const float *logits, double *total) {
        uint32_t n = s->options.top_k ? MIN(s->options.top_k, s->vocab) : s->vocab;
        double all = 0.0, sum = 0.0;

        for (uint32_t i = 0; i < s->vocab; i++)
                s->candidates[i] = (struct candidate){i, logits[i], 0.0};
        qsort(s->candidates, s->vocab, sizeof *s->candidates, more_likely);
        for (uint32_t i = 0; i < n; i++) {
                struct candidate *c = s->candidates + i;

                c->weight = exp((double)(c->logit - s->candidates[0].logit) /
                                (double)s->options.temperature);
                all += c->weight;
        }
        for (uint32_t i = 0; i < n; i++) {
                sum += s->candidates[i].weight;
                if (sum >= (double)s->options.top_p * all)
                        n = i + 1;
        }
        *total = sum;
        return n;
}

uint32_t sampler_pick(struct sampler *s, const float *logits) {
        double left, total;
        uint32_t n;

        if (s->options.temperature <= 0.0f)
                return largest(logits, s->vocab);
        n = shortlist(s, logits, &total);
        left = random_unit(s) * total;
        for (uint32_t i = 0; i < n; i++) {
                left -= s->candidates[i].weight;
                if (left < 0.0)
                        return s->candidates[i].id;
        }
        return s->candidates[n - 1].id;
}
