/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_CONFIG_H
#define KVD_DAEMON_PROCESS_WORKER_CONFIG_H

/*
 * The data of a CONFIG job: job_config.c has what it does, and config_device.c how rows of bits are
 * compared on a GPU.
 */

#include "daemon/process/worker/task.h"
#include "kernels/cuda/hshare.h"
#include "kernels/hshare.h"

struct config {
        struct task *task;
        uint32_t layers, heads, queries, words;
        uint32_t dense;          /* first layers that are not sparse */
        enum kvd_share how;
        /*
         * to[pair][row] = bits that the rows of each of n pairs have in common. 0 or negative
         * errno.
         */
        int (*compare)(const struct config *c, const struct gpu_overlap_pair *pairs, uint32_t n,
                       uint32_t rows, uint32_t *to);
        const uint8_t **blocks;  /* [item]: for the processor */
        struct gpu *gpu;         /* for the GPU, as the addresses: */
        cu_address d_ids, d_pairs, d_both;
        uint32_t *counts;        /* [layer][head][query]: bits set */
        uint32_t room;           /* rows that are compared at a time */
        uint32_t *both;          /* [room] */
        struct gpu_overlap_pair *pairs;
        float *similar;          /* [layers][layers] or [heads][heads], and as many as one of them */
        uint32_t *plan;          /* [layers] or [heads] */
        uint8_t *layer_result, *head_result;
};

/*
 * What compare needs, where the blocks are; -ENOSYS: it is not done there, and nothing was done.
 */
int config_on_device(struct config *c);

#endif
