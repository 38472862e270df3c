/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_COMPACT_H
#define KVD_DAEMON_PROCESS_WORKER_COMPACT_H

/*
 * The data of a COMPACT job: job_compact.c does it on the processor, compact_device.c on a GPU.
 */

#include "daemon/process/worker/task.h"

struct packing {
        struct task *task;
        const float *anchors; /* [layer][head][dim] */
        uint8_t **from, **to; /* blocks */
        uint32_t n_from, n_to;
        uint32_t keep, n_tokens; /* number of tokens to keep; of tokens in the sources */
        uint32_t *place;         /* [token]: block * tokens of a block + slot */
        /* [thread]: scores [head][token], scratch of the kernels, chosen tokens */
        uint8_t *rooms;
        size_t room, scratch; /* bytes of a thread's room; floats of its scratch */
};

/* Packs on the GPU. -ENOSYS: the GPU cannot do it, and nothing was done. */
int pack_on_device(struct packing *p);

#endif
