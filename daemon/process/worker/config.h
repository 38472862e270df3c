/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_CONFIG_H
#define KVD_DAEMON_PROCESS_WORKER_CONFIG_H

/*
 * The data of a CONFIG job. job_config.c does the job, and config_device.c compares rows of bits on
 * a GPU.
 */

#include "daemon/process/worker/task.h"
#include "kernels/cuda/hshare.h"
#include "kernels/hshare.h"

struct config {
        struct task *task;
        uint32_t layers, heads, queries, words;
        uint32_t dense; /* number of first layers that are not sparse */
        enum kvd_share how;
        /*
         * to[pair][row] = number of bits that are set in both rows of a pair. 0 or negative errno.
         */
        int (*compare)(const struct config *c, const struct gpu_overlap_pair *pairs, uint32_t n,
                       uint32_t rows, uint32_t *to);
        const uint8_t **blocks; /* [item]; only on the processor */
        struct gpu *gpu;        /* only on the GPU, as are the addresses: */
        cu_address d_ids, d_pairs, d_both;
        uint32_t *counts; /* [layer][head][query]: number of bits set */
        uint32_t room;    /* number of rows that are compared at a time */
        uint32_t *both;   /* [room] */
        struct gpu_overlap_pair *pairs;
        float *similar; /* [n][n] for n layers or heads, then n floats of scratch */
        uint32_t *plan; /* [layers] or [heads] */
        uint8_t *layer_result, *head_result;
};

/* Prepares compare on the GPU. -ENOSYS: the GPU cannot do it, and nothing was done. */
int config_on_device(struct config *c);

#endif
