/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_PROFILE_H
#define KVD_DAEMON_PROCESS_WORKER_PROFILE_H

/*
 * The data of a PROFILE job: job_profile.c has what it does, and profile_device.c how a layer is
 * compared on a GPU.
 */

#include "daemon/process/worker/task.h"
#include "kernels/bicache.h"

struct profile {
        struct task *task;
        uint32_t groups, n_blocks, n_tokens; /* blocks of one side of one group */
        uint32_t layer;                      /* of all groups: the one that is compared */
        /* Fills keys and values with the layer's. 0 or negative errno. */
        int (*compare)(const struct profile *p);
        const uint8_t **blocks;              /* [item]: for the processor */
        struct gpu *gpu;                     /* for the GPU, as the addresses: */
        cu_address d_ids, d_products;
        struct kvd_products *keys, *values;  /* [token] of that layer; values behind keys */
        float (*result)[2];
};

/*
 * What compare needs, where the blocks are; -ENOSYS: it is not done there, and nothing was done.
 */
int profile_on_device(struct profile *p);

#endif
