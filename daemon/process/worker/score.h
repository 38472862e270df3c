/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_SCORE_H
#define KVD_DAEMON_PROCESS_WORKER_SCORE_H

/* KeyDiff's anchors, which SCORE and COMPACT share. */

#include "daemon/process/worker/task.h"
#include "kernels/cuda/keydiff.h"

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
