/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_SKETCH_H
#define KVD_KERNELS_CUDA_SKETCH_H

/*
 * KVReviver's sketch on a GPU: the operations of kernels/sketch.h for keys and values of all layers and heads at once.
 * A cell's numbers belong to one thread, which takes the cell's tokens in their order: all of it has the reference's
 * bits (NaN: a NaN).
 *
 * A cell of the device is that of all layers and heads: number (layer, head, d) is at (layer heads + head) dim + d.
 */

#include "kernels/cuda/gpu.h"

/* places[i * rows + r], as kvd_sketch_place. Reads 8 n bytes, writes 4 n rows. */
struct gpu_sketch_place {
        uint32_t family, rows, columns; /* as struct kvd_sketch_hash */
        uint32_t n;
        uint64_t salt;
        cu_address ordinals, places; /* const uint64_t [n], uint32_t [n][rows] */
};

int gpu_sketch_place(struct gpu *gpu, cu_stream stream, const struct gpu_sketch_place *a);

/* A token: slot of the block at index block of blocks.ids. One whose block is not resident is passed over. */
struct gpu_sketch_token {
        uint32_t block;
        uint32_t slot; /* in a plan: with the signs of its place, KVD_SKETCH_KEY_SIGN and KVD_SKETCH_VALUE_SIGN */
};

/* Tokens of one cell: those of a plan from first to the next run's first. */
struct gpu_sketch_run {
        uint32_t cell; /* row * columns + column */
        uint32_t first;
};

/*
 * For the host: tokens in the order of cells, each cell's in the order in which they were. runs has room for n * rows
 * + 1, planned for n * rows, counts for rows * columns. Returns the number of runs; the one behind the last has only a
 * first. Places must be below columns.
 */
uint32_t gpu_sketch_plan(const uint32_t *places, const struct gpu_sketch_token *tokens, uint32_t n, uint32_t rows,
                         uint32_t columns, struct gpu_sketch_run *runs, struct gpu_sketch_token *planned,
                         uint32_t *counts);

struct gpu_sketch_plane { /* keys, or values */
        cu_address cells; /* float [row][column][cell_stride] */
        cu_address mean;  /* 0, or const float [layer][head][dim] */
        uint64_t offset;  /* bytes from a block's start to layer 0, head 0, slot 0 */
        uint32_t sign;    /* as struct kvd_sketch_part */
};

struct gpu_sketch_parts {
        struct gpu_blocks blocks;
        uint64_t layer_stride;              /* bytes */
        uint64_t head_stride, token_stride; /* elements */
        uint64_t cell_stride;               /* floats, at least layers heads dim */
        struct gpu_sketch_plane planes[2];
        uint32_t n_planes;
        uint32_t layers, heads, dim, number;
        uint32_t rows, columns;
};

struct gpu_sketch_insert {
        struct gpu_sketch_parts parts;
        cu_address runs, planned; /* of a plan, on the device */
        uint32_t n_runs;
        float weight;             /* 1 or -1 */
};

struct gpu_sketch_query {
        struct gpu_sketch_parts parts; /* blocks are written */
        cu_address tokens, places;     /* const struct gpu_sketch_token [n], const uint32_t [n][rows] */
        uint32_t n;
        float shrink;                  /* 1: none */
};

int gpu_sketch_insert(struct gpu *gpu, cu_stream stream, const struct gpu_sketch_insert *a);
int gpu_sketch_query(struct gpu *gpu, cu_stream stream, const struct gpu_sketch_query *a);

/*
 * Bytes that they must move: each vector once (the other rows find it in the L2) and touched cells there and back;
 * rows cells and the vector for each token. n: tokens; cells: n_runs.
 */
uint64_t gpu_sketch_insert_bytes(const struct gpu_sketch_parts *s, uint32_t n, uint32_t cells);
uint64_t gpu_sketch_query_bytes(const struct gpu_sketch_parts *s, uint32_t n);

/* out[i] = median over r < rows of x[r * ld + i]. Reads 4 rows n bytes, writes 4 n. */
struct gpu_sketch_median {
        cu_address out, x; /* float */
        uint64_t ld, n;
        uint32_t rows;
};

int gpu_sketch_median(struct gpu *gpu, cu_stream stream, const struct gpu_sketch_median *a);

#endif
