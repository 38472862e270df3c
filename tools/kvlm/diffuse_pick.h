/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DIFFUSE_PICK_H
#define KVLM_DIFFUSE_PICK_H

/*
 * Chooses the masked tokens that a denoising step fixes (LLaDA's low-confidence remasking, without
 * randomness): every masked position predicts its most likely token, and the most probable
 * predictions are kept.
 */

#include <stdint.h>

/*
 * Number of tokens fixed in step t of steps, t from 1: length / steps, and one more in the first
 * length % steps of them.
 */
static inline uint32_t pick_count(uint32_t length, uint32_t steps, uint32_t t) {
        return length / steps + (t <= length % steps);
}

struct guess {
        uint32_t position, token;
        double confidence; /* log odds of the token */
};

/*
 * The most likely token other than the mask, which is ignored entirely; ties go to the lower id.
 * vocab must be at least 2.
 */
struct guess guess_token(const float *logits, uint32_t vocab, uint32_t mask, uint32_t position);

/* Sorts by confidence, the highest first; ties by position. */
void guesses_sort(struct guess *, uint32_t n);

#endif
