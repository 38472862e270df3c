/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_BACKEND_H
#define KVD_DAEMON_CHILDREN_BACKEND_H

/*
 * Chooses where the pool is: in host memory, or on a GPU. A GPU is tested by allocating and
 * exporting memory on it. The daemon itself has no CUDA context: cuInit, and allocating and
 * exporting memory, need none. The worker and the exporter do what needs one. The choice is made
 * once, for the daemon's life.
 */

#include "daemon/base/config.h"
#include "ipc/base/device.h"

struct backend {
        enum kvd_backend backend;
        const struct kvd_cuda *cuda; /* NULL: host */
        struct store_gpu gpus[KVD_SHARDS];
        uint32_t n_gpus;
        uint64_t bytes;     /* of memory on each of them, at least */
        char device[512];   /* "NVIDIA H200, UUID GPU-...", or empty */
        struct kvd_why why; /* why this backend was chosen, in one line */
};

/* Follows the configuration. Negative: that backend cannot be used; ret->why says why. */
int backend_choose(const struct config *config, struct backend *ret);

const char *backend_name(enum kvd_backend backend); /* "host", "cuda (vmm)", "cuda (legacy)" */

/*
 * On a GPU, computes pool if it is a share, and reserve and spill if they are 0. Checks the sizes:
 * -EINVAL: the pool is larger than the GPU's memory, or another setting does not fit (why).
 */
int backend_size_pool(const struct backend *b, struct config *config, struct kvd_why *why);

#endif
