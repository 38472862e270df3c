/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_SCORE_H
#define KVD_DAEMON_PROCESS_WORKER_SCORE_H

/* Anchors and scores of keys, which SCORE, COMPACT and SUMMARISE share. */

#include "daemon/process/worker/task.h"
#include "kernels/cuda/keydiff.h"

/* Floats that the next two functions use. */
size_t score_scratch(const struct task *task);

/* Adds the directions of a block's keys to sums [layer][head][dim]. */
void score_add_anchors(const struct task *task, const uint8_t *block, uint32_t n_tokens,
                       float *sums, float *scratch);

/* Scores of a block's keys in one layer; those of head h are at to[h * stride ...]. */
void score_layer(const struct task *task, const uint8_t *block, uint32_t n_tokens, uint32_t layer,
                 const float *anchors, float *to, size_t stride, float *scratch);

/*
 * Sum of the directions of the keys of all items except KVD_JOB_DEST, [layer][head][dim]. NULL: out
 * of memory.
 */
float *score_anchors(struct task *task);

/* The same on a GPU (anchor_device.c), and the addresses of the job's keys there. */
struct device_anchor {
        struct task *task;
        uint32_t *ids;          /* [2][item]: all, then those whose keys are read for the anchor */
        float *sums;            /* [layer][head][dim]: sums of the summaries' anchors */
        uint32_t *zeros;        /* [layer][head] */
        struct gpu_scores keys; /* without scores; its ids are those of all items */
};

/* Begins an anchor. 0; -ENOSYS: no kernel can read these keys; -ENOMEM. */
int anchor_find(struct device_anchor *a, struct task *task);
/* Allocates its parts of a room (device_part). */
void anchor_lay_out(struct device_anchor *a, cu_address *next);
/* Computes the anchor. 0; -EIO: driver error; other negative errno: the GPU cannot do it. */
int anchor_make(struct device_anchor *a, struct gpu *gpu);

#endif
