/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_METHODS_METHODS_H
#define KVD_STORE_METHODS_METHODS_H

/*
 * What the methods call of each other. The rest of the store knows them by their rows in hooks.c
 * alone.
 */

#include "store/sequence/sequence.h"

/* What MemShare keeps for a space. */
struct memshare {
        struct ticket calibrate;
        float tau;             /* threshold as it was measured; 0: it was not */
        uint64_t calibrated;   /* n_steps then */
        uint64_t n_steps;      /* of all sequences, so far: their numbers */
        uint64_t random;
};

static inline struct memshare *memshare_of(const struct space *space) {
        return space->parts.memshare;
}

/* What KVReviver keeps for a space, beside its sequences' sketches. */
struct sketches {
        struct sketch *dead;   /* owned; their memory is being freed */
        uint32_t last_number;
};

static inline struct sketches *sketches_of(const struct space *space) {
        return space->parts.sketches;
}

/* kvreviver_sketch.c */
struct sketch *sketch_find(struct sequence *sequence, uint32_t number);
/* takes them; made if need be; NULL: none */
struct sketch *sketch_for(struct sequence *sequence, uint32_t n_tokens);
/* if nothing is in it; NULL is fine */
void sketch_drop_unused(struct sequence *sequence, struct sketch *sketch);
/* in place of job_blocks */
uint32_t sketch_blocks(const struct sequence *sequence, const struct job *job);
/* gives it its ordinals */
void sketch_enter(struct sequence *sequence, struct entry *entry, struct sketch *sketch);
bool sketch_answers(const struct sequence *sequence, const struct sketch *sketch); /* load guard */
/* its ordinals are no more */
void sketch_leave(struct sequence *sequence, struct entry *entry, bool taken_out);
void sketch_broken(struct sequence *sequence, struct sketch *sketch);
void entry_forget_sketch(struct sequence *sequence, uint32_t at); /* exact again; its copy stays */

/* kvreviver_cool.c */
/*
 * False: it cannot, or must not. full: false for the first of several, then handed on. What it
 * offers is not told yet: sync_news.
 */
bool cool_entry(struct sequence *sequence, uint32_t at, enum kvd_cool how, bool *full);

/* memshare.c */
bool sequence_compare_all(struct sequence *sequence);

/* memshare_calibrate.c */
/* the largest distance of two blocks that are alike */
float memshare_tau(const struct space *space);
void calibrate_look(struct space *space);   /* a step has ended: is it time to measure? */

/* keydiff_priority.c */
#define PRIORITY_MOST UINT16_MAX /* never let go by the daemon itself */
void priority_rank(struct sequence *sequence); /* of a piece of it: sequence->ranked */

/* relief.c */
/* up to n entries that are worth least leave: how many; -EAGAIN: not all were looked at */
int relief_swap(struct sequence *sequence, uint32_t n);

/* summaries.c: memory of the file that workers write and clients read, once there is one */
uint64_t summaries_bytes(const struct space *space);

#endif
