/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_RELIEF_H
#define KVLM_RELIEF_H

/*
 * What the methods (methods.h) do to one sequence: which tokens keep their keys and values, in what form, and which of
 * them a query attends to. forward.c asks during a step, generate.c settles after it.
 *
 * Every layer and KV head has as many slots as any other, in the sequence's block table, in order of position; which
 * tokens they hold is its own. Until something is lost, slot and position are the same.
 */

#include "kernels/attend.h"
#include "tools/kvlm/cache.h"
#include "tools/kvlm/methods.h"

enum { CALIBRATION = 32 }; /* last queries of a prompt that HShare's configuration is made from */

struct relief_setup {
        const struct methods *methods;
        const struct kvd_ops *ops;
        struct block_shape shape;
        uint32_t layers, group; /* group: query heads per KV head */
        uint32_t prompt, capacity; /* tokens; of the prompt, those after its decode_tail are not counted */
};

struct relief_stats {
        uint64_t kv_bytes_peak, kv_bytes; /* in the cache, in any form */
        uint64_t spill_bytes, label_bytes;
        uint64_t evictions;    /* times */
        uint64_t evicted;      /* tokens, per layer and head */
        uint64_t selections;   /* of a layer and head */
        uint64_t revived_exact, revived_approximate; /* tokens without a slot that a query attended to, per head */
        uint64_t swapped_exact, swapped_approximate; /* tokens that got a slot back, per layer */
        uint64_t refused;      /* times that a sketch was not asked because it held too much */
        double load;           /* of the sketch, tokens per cell; its largest */
        double selection_ms;
};

struct labels;
struct tiers;
struct critical;

struct desk { /* of one KV head: who attends for it owns it */
        float *scratch;
        size_t room;
        float *mass; /* by slot */
        struct relief_stats stats; /* its part */
};

struct relief {
        struct relief_setup setup;
        const struct methods *m;
        uint32_t budget;
        uint32_t heads; /* of keys and values */
        uint32_t n;       /* tokens computed */
        uint32_t n_slots; /* of each layer and head */
        uint32_t seen_from; /* the first position whose query ran here: earlier ones were found stored */
        bool lossy;
        uint32_t *positions; /* [layer][head][capacity]: of each slot */
        float *mass;         /* [layer][head][capacity]: attention that each position drew; NULL: nobody wants it */
        struct desk *desks;  /* [heads] */
        struct labels *labels; /* NULL: none */
        struct tiers *tiers;   /* NULL: none */
        struct critical *critical; /* NULL: dense */
        struct relief_stats stats;
};

int relief_new(const struct relief_setup *, struct relief **ret);
struct relief *relief_free(struct relief *);

/* At most so many tokens may be computed at once from position first on. */
uint32_t relief_step_limit(const struct relief *, uint32_t first);
uint32_t relief_not_found(const struct relief *); /* last tokens of the prompt that must be computed, stored or not */

void relief_found(struct relief *, uint32_t n_computed); /* tokens up to there were stored, and are in the table */

/* During a step; a: attention of all its tokens. relief_attend is called by one thread per head. */
int relief_prepare(struct relief *, const struct kvd_attention *a); /* -ENOMEM */
void relief_attend(struct relief *, uint32_t layer, uint32_t head, struct kvd_attention *a);

/* After a step: tokens up to n_computed are in the blocks. loses: will something be lost now, for the first time? */
bool relief_loses(const struct relief *, uint32_t n_computed);
int relief_settle(struct relief *, struct sequence *, uint32_t n_computed);
struct relief_stats relief_stats(const struct relief *, const struct sequence *);

/* What HShare's choices in force name, by block of so many positions: added to hits. Nothing without HShare. */
void relief_hits(const struct relief *, uint32_t block_tokens, uint32_t *hits);

/* ---- for the parts of it ---- */

static inline size_t relief_index(const struct relief *r, uint32_t layer, uint32_t head) {
        return (size_t)layer * r->heads + head;
}

static inline uint32_t *relief_positions(const struct relief *r, uint32_t layer, uint32_t head) {
        return r->positions + relief_index(r, layer, head) * r->setup.capacity;
}

static inline float *relief_mass(const struct relief *r, uint32_t layer, uint32_t head) {
        return r->mass + relief_index(r, layer, head) * r->setup.capacity;
}

/* Bytes from a block's start to this head's keys; its values are plane_bytes behind. */
static inline size_t relief_keys(const struct relief *r, uint32_t layer, uint32_t head) {
        const struct block_shape *s = &r->setup.shape;

        return 2 * layer * s->plane_bytes + head * s->head_bytes;
}

/* Attention per query that could see it. */
float relief_score(const struct relief *, uint32_t layer, uint32_t head, uint32_t position);

#endif
