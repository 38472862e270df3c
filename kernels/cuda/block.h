/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_BLOCK_H
#define KVD_KERNELS_CUDA_BLOCK_H

/*
 * What all methods do with blocks, on a GPU: the operations of kernels/block.h, for all heads and layers in one launch,
 * with the same bytes. Gathering and scattering are copy.h.
 */

#include "kernels/cuda/gpu.h"

/* Of each of rows rows of scores: the indices of the k largest, ascending (ties and NaN as in kernels/block.h). */
struct gpu_topk {
        cu_address indices;  /* uint32_t[rows][min(k, n)] */
        cu_address scores;   /* const float[rows][stride], n of each count */
        uint64_t stride;     /* floats */
        uint32_t rows, n, k;
        uint32_t later;      /* of equal scores at the cut: 1 the ones with larger indices, 0 with lower */
};

/* Where tokens lie: slot s of plane p and head h is at offset + p * plane + h * head + s * slot of its block. */
struct gpu_slots {
        struct gpu_blocks blocks;
        uint64_t offset, plane, head, slot; /* bytes */
        uint32_t per_block;
        uint32_t reserved; /* 0 */
};

/*
 * Of every plane and head: token index[j] of from becomes token j of to, j < n. Rows of indices ascend; row
 * p / planes_per_index * heads + h is for plane p and head h (2: keys and values move together). In place if to is
 * from, or where both have the same block at the same place. Tokens in blocks that are not resident are passed over.
 */
struct gpu_compact {
        struct gpu_slots to, from;
        cu_address index;           /* const uint32_t[planes / planes_per_index][heads][index_stride] */
        uint64_t index_stride;      /* numbers */
        uint32_t planes, heads, planes_per_index;
        uint32_t n;                 /* tokens */
        uint32_t bytes;             /* of a token */
        uint32_t apart;             /* 1: no slot is in both, so that they may be copied in any order */
};

/* Rows of dim numbers in 4 bits each, and back; packed rows (kernels/block.h) lie one behind the other. */
struct gpu_pack_4 {
        cu_address rows;            /* of number, stride elements apart */
        cu_address packed;
        uint64_t stride;
        uint32_t n, dim, group;     /* group 0: the whole row */
        uint32_t number;            /* enum kvd_number */
        uint32_t unpack;            /* 0: rows into packed; 1: packed into rows */
};

int gpu_topk(struct gpu *gpu, cu_stream stream, const struct gpu_topk *a);
int gpu_compact(struct gpu *gpu, cu_stream stream, const struct gpu_compact *a);
int gpu_pack_4(struct gpu *gpu, cu_stream stream, const struct gpu_pack_4 *a);

#endif
