/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_COMPARE_H
#define KVD_DAEMON_PROCESS_WORKER_COMPARE_H

/*
 * The data of a COMPARE job: job_compare.c has its stages, and compare_device.c the second one on a
 * GPU.
 */

#include "daemon/process/worker/task.h"
#include "kernels/memshare.h"

struct candidate {
        uint32_t step;
        float similarity;
};

struct compare {
        struct task *task;
        struct kvd_memshare_shape shape;
        enum kvd_memshare_metric metric;
        double limit;
        uint32_t half;            /* pairs that are rotated; 0: not aligned */
        double *frequencies;      /* [half] */
        float *angles;            /* [thread]: cosine [half], sine [half] */
        float *norms;             /* [item][layer][K, V] */
        const uint8_t **blocks;   /* [item]; NULL: out of the question */
        struct candidate *steps;  /* candidates, best first */
        uint32_t n_steps;
        struct kvd_match *found;  /* [item of step 0]; source COMPARE_NONE: nothing */
};

#define COMPARE_NONE UINT32_MAX

/* May this item stand in for that one? */
bool compare_may(const struct compare *c, uint32_t target, uint32_t source);

/* Notes the pair if it is near enough, and nearer than the one before. */
void compare_keep(struct compare *c, uint32_t target, uint32_t source, float similarity,
                  double distance);

/* Fills found, where the blocks are. -ENOSYS: not in this way, and nothing was done. */
int compare_on_device(struct compare *c);
/* result[i]: distance of items 2 i and 2 i + 1; INFINITY where one is gone. -ENOSYS: as above. */
int calibrate_on_device(struct compare *c, float *result);

#endif
