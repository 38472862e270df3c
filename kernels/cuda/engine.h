/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ENGINE_H
#define KVD_KERNELS_CUDA_ENGINE_H

/*
 * The transformer operations other than matrix products (cublas.h) and attention (attend.h). Rows
 * are tokens, and are contiguous; numbers are fp32 unless a member gives the type. Embedding,
 * rotation, storing and SwiGLU give the bits of kernels/ops.h; norms sum in a different order.
 *
 * Members number, to_number: 1 fp32, 2 fp16, 3 bf16 (enum kvd_number). Keys and values may be of
 * the other types, too.
 */

#include "kernels/cuda/gpu.h"

/* to[r] = table[tokens[r]] */
struct gpu_embed {
        cu_address to, table; /* [n][width], [vocabulary][width] of number */
        cu_address tokens;    /* const uint32_t [n], each below the size of the vocabulary */
        uint32_t n, width, number;
};

/* x[r] += change[r]; to[r] = x[r] / sqrt(mean of squares + eps) * weights */
struct gpu_norm {
        cu_address to;        /* [n][width] of to_number; 0: only the addition */
        cu_address x, change; /* [n][width]; change 0: none */
        cu_address weights;   /* [width] */
        uint32_t n, width, to_number;
        float eps;
};

/*
 * Rotates queries in place and keys on their way into the blocks, and stores the values next to
 * them. Pairs are (i, i + half), as in ops.h. Row r has position first + r, which is slot position
 * % block_tokens of block ids[position / block_tokens]. Positions below stored, and those whose
 * block is GPU_NO_BLOCK, are not written.
 */
struct gpu_rotate {
        cu_address qkv;          /* [n][heads + 2 kv_heads][2 half] */
        cu_address cosine, sine; /* [n][half] */
        struct gpu_blocks blocks;
        uint64_t k_offset, v_offset;       /* bytes from a block's start to the layer's planes */
        uint64_t head_stride, slot_stride; /* bytes */
        uint32_t n, first, stored;
        uint32_t heads, kv_heads, half;
        uint32_t block_tokens, number; /* number: of keys and values */
};

/* to[r] = silu(gate[r]) * up[r], with gate and up side by side in gate_up[r] */
struct gpu_swiglu {
        cu_address to, gate_up; /* [n][width] of to_number, [n][2 width] */
        uint32_t n, width, to_number;
};

int gpu_embed(struct gpu *gpu, cu_stream stream, const struct gpu_embed *a);
int gpu_norm(struct gpu *gpu, cu_stream stream, const struct gpu_norm *a);
int gpu_rotate(struct gpu *gpu, cu_stream stream, const struct gpu_rotate *a);
int gpu_swiglu(struct gpu *gpu, cu_stream stream, const struct gpu_swiglu *a);

#endif
