/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_CUDA_ATTEND_CASE_H
#define KVD_TESTS_KERNELS_CUDA_ATTEND_CASE_H

/*
 * One attention on a device, and the same by kernels/attend.h. For members that are 0, see their
 * comments.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct attend_case {
        uint32_t number, q_number, out_number; /* 0: F32 */
        uint32_t dim, group;
        uint32_t kv_heads;     /* 0: 2 */
        uint32_t block_tokens; /* 0: 16 */
        uint32_t pad; /* elements (bytes, if they are narrow) between a slot's row and the next */
        bool nhd;
        uint32_t n; /* sequences; 0: 3 */
        const uint32_t *lengths;
        /* prefill: of the first sequence; the others have fewer. 0: decode */
        uint32_t tokens;
        bool bidirectional;
        uint32_t absent;    /* every absent-th block is not resident; 0: all are resident */
        uint32_t rotations; /* number of distinct rotations of blocks; 0: none */
        uint32_t chosen;    /* one of this many positions is chosen; 0: all */
        uint32_t spoilt;    /* one of this many values has a NaN among its numbers; 0: none */
        uint32_t split;
        bool mass;
        float sharp;         /* factor for queries; 0: 4 */
        size_t shared_bytes; /* shared memory that the device pretends to have; 0: its own */
};

/*
 * Checks that results and masses agree with the reference within its tolerances, and that two runs
 * give the same bits.
 */
void attend_check(struct attend_case c);

/*
 * Checks that the first sequence has the same bits if it is alone and, in prefill, if only its last
 * tokens are in the call.
 */
void attend_check_alone(struct attend_case c);

#endif
