/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_BACKEND_H
#define KVD_DAEMON_CHILDREN_BACKEND_H

/*
 * Where the pool is: host memory, or a GPU, found out by doing with it once what will be done with
 * it. The daemon has no CUDA context: cuInit, and making and exporting memory, need none; what
 * needs one is the worker's, or the exporter's. Nothing here is asked twice: the answer holds for
 * the daemon's life.
 */

#include "daemon/base/config.h"
#include "ipc/base/device.h"


struct backend {
        enum kvd_backend backend;
        const struct kvd_cuda *cuda; /* NULL: host */
        cu_device ordinal;
        struct cu_uuid uuid;
        uint64_t bytes;              /* all of its memory */
        char device[192];            /* "NVIDIA H200, UUID GPU-...", or empty */
        struct kvd_why why;                /* why this backend, one line */
};

/*
 * Follows the configuration. Negative: it asks for something that cannot be had, and ret->why says
 * what.
 */
int backend_choose(const struct config *config, struct backend *ret);

const char *backend_name(enum kvd_backend backend); /* "host", "cuda (vmm)", "cuda (legacy)" */

/*
 * A pool that was given as a share is one of that memory. -EINVAL: the pool is larger than the
 * GPU's, or what depends on the pool's size does not fit (why).
 */
int backend_size_pool(const struct backend *b, struct config *config, struct kvd_why *why);

#endif
