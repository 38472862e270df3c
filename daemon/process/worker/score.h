/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_SCORE_H
#define KVD_DAEMON_PROCESS_WORKER_SCORE_H

/* KeyDiff: what its jobs share (job_score.c), and scoring on a GPU (score_device.c). */

#include "daemon/process/worker/task.h"
#include "kernels/cuda/keydiff.h"

/*
 * The sum of the directions of all items' keys, [layer][head][dim], but of KVD_JOB_DEST; NULL: no
 * memory.
 */
float *score_anchors(struct task *task);

/* The same on a GPU (anchor_device.c), and where the job's keys are there. */
struct device_anchor {
        struct task *task;
        uint32_t *ids;          /* [2][item]: all, and those whose keys are read for it */
        float *sums;            /* [layer][head][dim]: what summaries say */
        uint32_t *zeros;        /* [layer][head] */
        struct gpu_keydiff keys; /* without scores; its ids are all */
};

/* -ENOSYS: no kernel takes such keys. -ENOMEM. */
int anchor_find(struct device_anchor *a, struct task *task);
/* In a room that is laid out twice (device_part), and anew there before it is made. */
void anchor_lay_out(struct device_anchor *a, cu_address *next);
/* 0, or a negative errno: of the driver -EIO; others: not in this way. */
int anchor_make(struct device_anchor *a, struct gpu *gpu);

/* SCORE by the GPU. -ENOSYS: not in this way, and nothing was done. */
int score_on_device(struct task *task);

#endif
