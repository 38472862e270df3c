/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_COMPARE_H
#define KVD_DAEMON_PROCESS_WORKER_COMPARE_H

/*
 * The data of a COMPARE job. job_compare.c has its two stages, and compare_device.c does the second
 * one on a GPU.
 */

#include "daemon/process/worker/task.h"
#include "kernels/cuda/memshare.h"
#include "kernels/memshare.h"

struct candidate {
        uint32_t step;
        float similarity;
};

struct compare {
        struct task *task;
        struct kvd_memshare_shape shape;
        enum kvd_memshare_metric metric;
        double limit, limit_same; /* for blocks of other tokens, and of the same */
        uint32_t half;            /* pairs of dimensions that are rotated; 0: no alignment */
        double *frequencies;      /* [half] */
        float *angles;            /* [thread]: cosine [half], sine [half] */
        float *norms;             /* [item][layer][K, V] */
        const uint8_t **blocks;   /* [item]; NULL: not compared */
        struct candidate *steps;  /* candidates, best first */
        uint32_t n_steps;
        struct kvd_match *found; /* [item of step 0]; source is COMPARE_NONE if none matches */
};

#define COMPARE_NONE UINT32_MAX

/* Norms of the planes of so many layers, [layer][K, V]. */
void compare_norms(const struct task *task, uint32_t layers, const uint8_t *planes, float *to);

/* The rotation by delta positions: cosine [half], sine [half]. */
void compare_angles(const struct compare *c, int64_t delta, float *to);

/* May the source replace the target? */
bool compare_may(const struct compare *c, uint32_t target, uint32_t source);

/* The greatest distance at which it may. */
double compare_limit(const struct compare *c, uint32_t target, uint32_t source);

/* Stores the pair in found if it is near enough, and nearer than the target's pair so far. */
void compare_keep(struct compare *c, uint32_t target, uint32_t source, float similarity,
                  double distance);

/* Fills found on the GPU. -ENOSYS: the GPU cannot do it, and nothing was done. */
int compare_on_device(struct compare *c);
/* result[i]: distance of items 2 i and 2 i + 1; INFINITY if one is gone. -ENOSYS: as above. */
int calibrate_on_device(struct compare *c, float *result);

#endif
