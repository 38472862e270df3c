/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_METHODS_METHODS_H
#define KVD_STORE_METHODS_METHODS_H

/*
 * Interfaces between the methods. The rest of the store calls methods only by their rows in
 * hooks.c.
 */

#include "store/sequence/sequence.h"

static inline double setting(const struct space *space, enum kvd_setting which) {
        return kvd_setting_get(space_index(space)->settings, which);
}

static inline bool is_on(const struct space *space, enum kvd_setting which) {
        return kvd_setting_on(space_index(space)->settings, which);
}

/* The threshold of similar blocks of a space, as measured. */
struct calibration {
        struct ticket calibrate;
        float tau;           /* measured threshold; 0: not measured */
        uint64_t calibrated; /* n_steps when it was measured */
        uint64_t n_steps;    /* number of steps of all sequences so far; numbers the steps */
        uint64_t random;     /* state of the random number generator */
};

static inline struct calibration *calibration_of(const struct space *space) {
        return space->parts.calibration;
}

/* A space's sketches that no sequence has any more, and the number of the newest of all. */
struct sketches {
        struct sketch *dead; /* owned; list of sketches whose memory is being freed */
        uint32_t last_number;
};

static inline struct sketches *sketches_of(const struct space *space) {
        return space->parts.sketches;
}

/* ---- sketches -------------------------------------------------------------------------------- */
struct sketch *sketch_find(struct sequence *sequence, uint32_t number);
/* a sketch with room for n_tokens, created if necessary; NULL: none */
struct sketch *sketch_for(struct sequence *sequence, uint32_t n_tokens);
/* bytes of the new one that sketch_for would need; 0: none */
uint64_t sketch_wanted(const struct sequence *sequence, uint32_t n_tokens);
bool sketch_fits(const struct sequence *sequence, uint64_t bytes); /* is there memory for it? */
/* frees the sketch if it is empty; it may be NULL */
void sketch_drop_unused(struct sequence *sequence, struct sketch *sketch);
/* like job_blocks, for jobs that use a sketch */
uint32_t sketch_blocks(const struct sequence *sequence, const struct job *job);
/* assigns ordinals to the entry's tokens */
void sketch_enter(struct sequence *sequence, struct entry *entry, struct sketch *sketch);
/* is its load below the limit? */
bool sketch_answers(const struct sequence *sequence, const struct sketch *sketch);
/* the entry is no longer in its sketch; taken_out: its tokens were removed from the cells */
void sketch_leave(struct sequence *sequence, struct entry *entry, bool taken_out);
void sketch_broken(struct sequence *sequence, struct sketch *sketch);
/* the entry is exact again; its copy stays */
void entry_forget_sketch(struct sequence *sequence, uint32_t at);

/* ---- blocks that leave the pool -------------------------------------------------------------- */
enum kvd_cool cool_means(struct space *space); /* how blocks may leave; 0: they may not */
/* blocks that the sequence may lose: the recent and candidate parts of its budget stay */
uint64_t cool_most(const struct sequence *sequence);
/* tokens from here on are recent: the daemon itself never removes them */
uint64_t cool_recent_from(const struct sequence *sequence);
struct cool_room {        /* of one request; zeros at first */
        uint64_t missing; /* bytes for a copy or sketch that there was no memory for */
        uint64_t sketch;  /* looked: bytes of the sketch that is to be made; 0: none */
        bool looked;
};

/*
 * Lets an entry leave the pool. False: it cannot, or must not, or room->missing. The caller must
 * call sync_news if changes were offered.
 */
bool cool_entry(struct sequence *sequence, uint32_t at, enum kvd_cool how, struct cool_room *room);

/* ---- similar blocks -------------------------------------------------------------------------- */
bool sequence_compare_all(struct sequence *sequence);
/* maximum distance of two blocks that may share */
float share_distance(const struct space *space);
float share_distance_same(const struct space *space); /* for blocks of the same tokens; or 0 */
void calibrate_look(struct space *space); /* call when a step has ended: measures if it is time */

/* ---- priorities ------------------------------------------------------------------------------ */
#define PRIORITY_MOST UINT16_MAX               /* the daemon itself never removes the entry */
void priority_rank(struct sequence *sequence); /* ranks the next piece of it: sequence->ranked */
bool priority_lacks_scores(const struct sequence *sequence);

/* ---- relief ---------------------------------------------------------------------------------- */
/*
 * lets up to n entries of lowest priority leave; returns their number; -EAGAIN: not all were looked
 * at
 */
int relief_swap(struct sequence *sequence, uint32_t n);

#endif
