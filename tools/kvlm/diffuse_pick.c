/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chooses the masked tokens that a denoising step fixes. Probabilities are compared as log odds, so
 * that two very certain guesses do not round to the same number.
 */

#include "tools/kvlm/diffuse_pick.h"

#include <math.h>
#include <stdlib.h>

/* The id of the largest logit other than those of mask and other, which may be equal. */
static uint32_t largest(const float *logits, uint32_t vocab, uint32_t mask, uint32_t other) {
        uint32_t best = UINT32_MAX;

        for (uint32_t i = 0; i < vocab; i++)
                if (i != mask && i != other && (best == UINT32_MAX || logits[i] > logits[best]))
                        best = i;
        return best;
}

/* Used instead of the probability, which rounds to 1 for many tokens if the model is certain. */
static double log_odds(const float *logits, uint32_t vocab, uint32_t mask, uint32_t token) {
        uint32_t second = largest(logits, vocab, mask, token);
        double sum = 0.0;

        if (second == UINT32_MAX)
                return INFINITY;
        for (uint32_t i = 0; i < vocab; i++)
                if (i != mask && i != token)
                        sum += exp((double)logits[i] - (double)logits[second]);
        return (double)logits[token] - (double)logits[second] - log(sum);
}

struct guess guess_token(const float *logits, uint32_t vocab, uint32_t mask, uint32_t position) {
        uint32_t token = largest(logits, vocab, mask, mask);

        return (struct guess){position, token, log_odds(logits, vocab, mask, token)};
}

static int more_confident(const void *a, const void *b) {
        const struct guess *x = a, *y = b;

        if (x->confidence != y->confidence)
                return x->confidence > y->confidence ? -1 : 1;
        return x->position < y->position ? -1 : 1;
}

void guesses_sort(struct guess *guesses, uint32_t n) {
        qsort(guesses, n, sizeof *guesses, more_confident);
}
