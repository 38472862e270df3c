/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_PROFILE_H
#define KVD_DAEMON_PROCESS_WORKER_PROFILE_H

/*
 * The data of a PROFILE job. job_profile.c does the job, and profile_device.c compares a layer on a
 * GPU.
 */

#include "daemon/process/worker/task.h"
#include "kernels/bicache.h"

struct profile {
        struct task *task;
        uint32_t groups, n_blocks, n_tokens; /* blocks of one side of one group */
        uint32_t layer;                      /* being compared; counted over all groups */
        /* Fills keys and values with the layer's products. 0 or negative errno. */
        int (*compare)(const struct profile *p);
        const uint8_t **blocks; /* [item]; only on the processor */
        struct gpu *gpu;        /* only on the GPU, as are the addresses: */
        cu_address d_ids, d_products;
        struct kvd_products *keys, *values; /* [token] of the layer; values follows keys */
        float (*result)[2];
};

/* Prepares compare on the GPU. -ENOSYS: the GPU cannot do it, and nothing was done. */
int profile_on_device(struct profile *p);

#endif
