/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_HSHARE_H
#define KVD_KERNELS_CUDA_HSHARE_H

/*
 * HShare's operations for all KV heads of a layer and many sequences at once; what they mean, and the label of a key,
 * is in kernels/hshare.h. Labels, scores, counts and choices are equal to those of the reference, bit for bit;
 * aggregates and weights are within its tolerances. The same call gives the same bits every time.
 */

#include "kernels/cuda/gpu.h"

/* Positions [from[s], from[s] + n[s]) of each sequence; from 0: all begin at 0. */
struct gpu_spans {
        uint32_t n_sequences;
        uint32_t most;          /* none has more */
        cu_address from, n;     /* const uint32_t * */
};

/*
 * Something of each KV head and slot in blocks: position i of sequence s is slot i % block_tokens of block
 * ids[s * ld + i / block_tokens]; head h's is offset + h * head_stride + slot * token_stride bytes into the block.
 */
struct gpu_slots {
        struct gpu_blocks blocks;
        uint64_t ld;
        uint64_t offset, head_stride, token_stride;
        uint32_t block_tokens;
};

/* Channels of KV head h: const uint16_t[n_channels] at channels + h * ld_channels; ld_channels 0: all have the same. */
struct gpu_channels {
        cu_address channels;
        uint32_t ld_channels;   /* elements */
        uint32_t n_channels;    /* up to KVD_LABEL_CHANNELS_MAX */
};

/* The labels of keys. Positions of which one or the other block is not resident are passed over. */
struct gpu_label {
        struct gpu_spans spans;
        struct gpu_slots keys, labels; /* labels.token_stride is 0: they lie one after the other */
        struct gpu_channels channels;
        uint32_t number;               /* of keys: enum kvd_number */
        uint32_t kv_heads;
};

int gpu_label(struct gpu *gpu, cu_stream stream, const struct gpu_label *a);

/* The labels of query heads: of row i (a sequence's token), head j, whose channels are those of KV head j / group. */
struct gpu_label_query {
        struct gpu_channels channels;
        uint32_t rows, kv_heads, group;
        uint32_t q_number;
        cu_address q;
        uint64_t q_row, q_head;  /* elements from row to row, from head to head */
        cu_address to;           /* struct kvd_label_query[rows][kv_heads * group] */
};

int gpu_label_query(struct gpu *gpu, cu_stream stream, const struct gpu_label_query *a);

/*
 * to[((s * kv_heads + h) * group + g) * ld + i]: inner product of the labels of query g and of the i-th position of the
 * span; -inf where the block is not resident.
 */
struct gpu_label_scores {
        struct gpu_spans spans;
        struct gpu_slots labels;
        uint32_t n_channels;
        uint32_t kv_heads, group;
        cu_address queries;      /* const struct kvd_label_query[n_sequences][kv_heads * group] */
        cu_address to;           /* float * */
        uint64_t ld;
};

int gpu_label_scores(struct gpu *gpu, cu_stream stream, const struct gpu_label_scores *a);

/*
 * to[row * ld_to + i], row = s * kv_heads + h: the sum (or the largest) over the group of softmax(scale * scores); of
 * one head the scores themselves. Scores lie as gpu_label_scores leaves them, and stay.
 */
struct gpu_aggregate {
        struct gpu_spans spans;
        uint32_t kv_heads, group;
        uint32_t largest;        /* not the sum */
        float scale;             /* > 0 */
        cu_address scores, to;   /* float * */
        uint64_t ld, ld_to;
        cu_address workspace;    /* gpu_aggregate_workspace() bytes, aligned to 256 */
        uint64_t workspace_bytes;
};

uint64_t gpu_aggregate_workspace(const struct gpu_aggregate *a);
int gpu_aggregate(struct gpu *gpu, cu_stream stream, const struct gpu_aggregate *a);

/*
 * Of row (s * rows + h) of scores, which has the n[s] numbers of a span: the positions of the z largest, from[s] + i,
 * ascending; of equal ones the earliest. -inf and NaN are never among them. At to + row * ld_to; found[row]: how many.
 */
struct gpu_top {
        struct gpu_spans spans;
        uint32_t rows;           /* of a sequence */
        uint32_t z;              /* ld_to at most */
        cu_address scores;       /* const float * */
        uint64_t ld;
        cu_address to, found;    /* uint32_t * */
        uint64_t ld_to;
        cu_address workspace;    /* gpu_top_workspace() bytes, aligned to 256 */
        uint64_t workspace_bytes;
};

uint64_t gpu_top_workspace(const struct gpu_top *a);
int gpu_top(struct gpu *gpu, cu_stream stream, const struct gpu_top *a);

/* to[r]: bits that row r of a and row r of b have in common. */
struct gpu_overlap {
        cu_address to;           /* uint32_t * */
        cu_address a, b;         /* const uint64_t[rows][words] */
        uint32_t rows, words;
};

int gpu_overlap(struct gpu *gpu, cu_stream stream, const struct gpu_overlap *a);

/* Calibration: weights[h * dim + d] += |q . k| of dimension d, over the tokens of one sequence and the group. */
struct gpu_weigh {
        struct gpu_slots keys;   /* of one sequence */
        uint32_t number, dim, kv_heads, group;
        uint32_t n;              /* tokens, from position 0 on; those that are not resident are passed over */
        uint32_t q_number;
        cu_address q;
        uint64_t q_row, q_head;  /* elements from token to token, from head to head */
        cu_address weights;      /* float * */
};

int gpu_weigh(struct gpu *gpu, cu_stream stream, const struct gpu_weigh *a);

/* Bytes that calls over so many positions in all (summed over sequences) must read and write. */
static inline uint64_t gpu_label_bytes(const struct gpu_label *a, uint64_t dim, uint64_t positions) {
        return positions * a->kv_heads * (dim * (a->number == 1 ? 4 : 2) + (a->channels.n_channels + 1) / 2 + 4);
}

static inline uint64_t gpu_label_scores_bytes(const struct gpu_label_scores *a, uint64_t positions) {
        return positions * a->kv_heads * ((a->n_channels + 1) / 2 + 4 + (uint64_t)a->group * 4);
}

static inline uint64_t gpu_aggregate_bytes(const struct gpu_aggregate *a, uint64_t positions) {
        return positions * a->kv_heads * ((uint64_t)a->group + 1) * 4;
}

static inline uint64_t gpu_top_bytes(const struct gpu_top *a, uint64_t positions) {
        return a->rows * (positions + (uint64_t)a->spans.n_sequences * a->z) * 4;
}

#endif
