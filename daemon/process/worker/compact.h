/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_COMPACT_H
#define KVD_DAEMON_PROCESS_WORKER_COMPACT_H

/*
 * The data of a COMPACT job: job_compact.c does it on the processor, compact_device.c on a GPU.
 */

#include "daemon/process/worker/task.h"

struct packing {
        struct task *task;
        const float *anchors;            /* [layer][head][dim] */
        uint8_t **from, **to, **scores;  /* blocks */
        uint32_t n_from, n_to, n_scores; /* no scores: by the anchor */
        uint32_t keep, n_tokens;         /* number of tokens to keep; of tokens in the sources */
        uint32_t *place;                 /* [token]: block * tokens of a block + slot */
        /* [thread]: scores [head][token], scratch of the kernels, chosen tokens */
        uint8_t *rooms;
        size_t room, scratch; /* bytes of a thread's room; floats of its scratch */
};

/* A piece of the client's scores that lies in one block. */
struct score_piece {
        uint32_t block; /* among those of the scores */
        uint64_t offset, bytes;
};

/* The longest piece of the bytes from `from` to before `to` of the scores. */
static inline struct score_piece score_piece(const struct packing *p, uint64_t from, uint64_t to) {
        uint64_t each = p->task->shape.block_bytes, offset = from % each;

        return (struct score_piece){(uint32_t)(from / each), offset, MIN(to - from, each - offset)};
}

/* Bytes of a layer's scores [head][token]. */
static inline uint64_t score_bytes(const struct packing *p) {
        return (uint64_t)p->task->shape.heads * p->n_tokens * sizeof(float);
}

/* Packs on the GPU. -ENOSYS: the GPU cannot do it, and nothing was done. */
int pack_on_device(struct packing *p);

#endif
