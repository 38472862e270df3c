/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_WORKER_SCORE_H
#define KVD_DAEMON_WORKER_SCORE_H

/* KeyDiff: what its jobs share (job_score.c), and scoring on a GPU (score_device.c). */

#include "daemon/worker/task.h"

/*
 * The sum of the directions of all items' keys, [layer][head][dim], but of KVD_JOB_DEST; NULL: no
 * memory.
 */
float *score_anchors(struct task *task);

/* SCORE by the GPU. -ENOSYS: not in this way, and nothing was done. */
int score_on_device(struct task *task);

#endif
