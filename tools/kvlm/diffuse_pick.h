/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DIFFUSE_PICK_H
#define KVLM_DIFFUSE_PICK_H

/*
 * Which masked tokens a denoising step makes known (LLaDA's low-confidence remasking, without
 * randomness): every masked position predicts its most likely token, and those whose prediction has
 * the most probability stay.
 */

#include <stdint.h>

/*
 * Tokens made known in step t of steps, t from 1: length / steps, and one more in the first length
 * % steps of them.
 */
static inline uint32_t pick_count(uint32_t length, uint32_t steps, uint32_t t) {
        return length / steps + (t <= length % steps);
}

struct guess {
        uint32_t position, token;
        double confidence; /* logarithm of the token's odds */
};

/*
 * The most likely token other than the mask, which is left out of all; the lower of equals. vocab
 * is 2 or more.
 */
struct guess guess_token(const float *logits, uint32_t vocab, uint32_t mask, uint32_t position);

/* The most confident first; of equals the lower position. */
void guesses_sort(struct guess *, uint32_t n);

#endif
