/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_HSHARE_RUN_H
#define KVD_KERNELS_CUDA_HSHARE_RUN_H

/* What the kernels of HShare are given beyond the caller's arguments, and sizes that both sides know. */

#include "kernels/cuda/hshare.h"

enum {
        GPU_SCORE_THREADS = 256,
        GPU_SCORE_EACH = 4,           /* positions of a thread */
        GPU_AGGREGATE_PART = 4096,    /* positions that one block of threads has the weights of */
        GPU_AGGREGATE_GROUP = 128,    /* query heads at most */
        GPU_LABEL_THREADS = 256,

        GPU_TOP_TILE = 4096,          /* scores that one block of threads looks through */
        GPU_TOP_ROOM = 2048,          /* of which so many may be left */
        GPU_TOP_SHORT = 512,          /* scores that a warp ranks at a time where none were left out before */
        GPU_TOP_SAMPLE = 1024,        /* scores that say how far the top is from the others */
        GPU_TOP_THREADS = 512,
        GPU_TOP_COLLECT_THREADS = 256,
};

struct gpu_top_run {
        struct gpu_top a;
        uint32_t sampled;       /* 0: all scores are ranked at once */
        uint32_t tiles, shorts; /* of the longest row */
        cu_address bounds;      /* float[row]: what the others are below, by the sample */
        cu_address counts;      /* uint32_t[row][tiles] that are not; UINT32_MAX: there was no room */
        cu_address values;      /* float[row][tiles][GPU_TOP_ROOM] */
        cu_address places;      /* uint16_t, likewise: where in its tile */
        cu_address marks;       /* uint32_t[row][shorts][2]: in a tile, those above the limit, and at it */
};

#endif
