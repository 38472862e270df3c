/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KVLM_REFERENCE_H
#define KVD_TESTS_KVLM_REFERENCE_H

/*
 * A Llama model in double precision, a range of rows at a time. What it returns is valid until
 * folder_remove().
 */

#include "tests/kvlm/folder.h"

struct reference {
        const struct random_model *m;
        bool causal;           /* or every row sees n_keys keys */
        uint32_t n;            /* rows */
        double *x;             /* [n][hidden] */
        double *k[16], *v[16]; /* per layer: [n][kv_heads * head_dim] */
};

struct reference reference_new(const struct random_model *, uint32_t n, bool causal);

/* Makes x the embeddings of rows [from, to). */
void reference_embed(struct reference *, const uint32_t *tokens, uint32_t from, uint32_t to);

/* Runs layers [layer, end) for rows [from, to): replaces their x, keys and values. */
void reference_layers(struct reference *, uint32_t layer, uint32_t end, uint32_t from, uint32_t to,
                      uint32_t n_keys);

/* Logits [n - from][vocab] of the rows from there on. */
double *reference_logits(const struct reference *, uint32_t from);

#endif
