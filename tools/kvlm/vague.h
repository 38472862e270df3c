/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_VAGUE_H
#define KVLM_VAGUE_H

/*
 * What is left of tokens that have no slot: an approximation (a count sketch per layer, or 4 bits a number), and, if
 * they are spilled, their exact keys and values in memory that is not the cache's.
 *
 * A row is what a token has in one layer: of each KV head its key, then its value, in the cache's type.
 */

#include "tools/kvlm/relief.h"

struct vague_layer {
        uint32_t *tokens; /* [n] of which there is an approximation, in no order */
        uint32_t *index;  /* [capacity] where a token is in tokens */
        uint32_t n;

        /* sketch */
        float *cells;     /* [row][column][key of each head, value of each head] */
        float *mean;      /* [head][dim] of the keys; frozen at the first insertion; NULL: none is taken off */
        uint32_t *places; /* [token of tokens][rows] */
        uint64_t inserted, deleted;

        uint8_t *packed;  /* 4 bits: [token of tokens][packed_bytes] */
        uint8_t *spilled; /* [capacity][row_bytes] by position; NULL: nothing is spilled */
};

struct vague {
        bool sketch;          /* or 4 bits */
        uint32_t rows, columns; /* of a sketch; 0 columns: it has no room, and knows nothing */
        size_t row_bytes, packed_bytes;
        uint32_t limit;       /* tokens that may have an approximation; UINT32_MAX: all */
        struct vague_layer *layers;
};

int vague_new(const struct relief *, uint32_t limit, struct vague **ret);
struct vague *vague_free(struct vague *, uint32_t layers);

/* mean: [head][dim], used before the first vague_put of a layer if keys are to be centred. */
bool vague_wants_mean(const struct vague *, const struct relief *, uint32_t layer);

void vague_put(struct vague *, const struct relief *, uint32_t layer, uint32_t token, const uint8_t *row);
void vague_remove(struct vague *, const struct relief *, uint32_t layer, uint32_t token); /* its approximation only */

/* The best row there is of a token that has an approximation, and whether that is exact. */
bool vague_row(struct vague *, const struct relief *, uint32_t layer, uint32_t token, uint8_t *row);

/* May approximations be used? A sketch that holds too much may not. */
bool vague_answers(const struct vague *, const struct relief *, uint32_t layer);
double vague_load(const struct vague *, uint32_t layer); /* tokens per cell */
static inline bool vague_has(const struct vague *v, uint32_t layer, uint32_t token) {
        const struct vague_layer *l = v->layers + layer;

        return l->index[token] < l->n && l->tokens[l->index[token]] == token;
}

/* Keys and values of one head as floats, [n][dim] each: approximate (of tokens that have it), or spilled. */
void vague_read(const struct vague *, const struct relief *, uint32_t layer, uint32_t head, const uint32_t *tokens,
                uint32_t n, float *keys, float *values, uint32_t *places);
void vague_read_spilled(const struct vague *, const struct relief *, uint32_t layer, uint32_t head, uint32_t token,
                        float *key, float *value);

uint64_t vague_bytes(const struct vague *, const struct relief *); /* of approximations */

#endif
