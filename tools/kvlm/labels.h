/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_LABELS_H
#define KVLM_LABELS_H

/*
 * Labels of all tokens of a sequence, whether their keys are still there or not: a few channels at 4 bit
 * (kernels/hshare.h), by position. They say which tokens a query wants.
 */

#include "kernels/hshare.h"
#include "tools/kvlm/relief.h"

struct labels {
        bool ready;
        uint32_t n_channels;
        uint16_t *channels; /* [layer][head][n_channels] */
        size_t bytes;       /* of one head */
        uint8_t *data;      /* [layer][head][bytes] */
        size_t width;       /* floats of a head's queries: group * head_dim */
        float *queries;     /* [layer][head][CALIBRATION][width]: the last ones; position p is at p % CALIBRATION */
        struct label_desk { /* scratch memory of a head */
                struct kvd_label_query *query; /* [group] */
                float *scores;                 /* [group][room], then [room] */
                uint32_t *numbers;             /* [3 room] */
        } *desks;
        uint32_t room; /* positions */
        uint32_t group;
};

int labels_new(const struct relief *, struct labels **ret);
struct labels *labels_free(struct labels *, uint32_t heads);

/* During a step: keeps its last queries, and labels its tokens once labels are ready. */
void labels_follow(struct labels *, const struct relief *, uint32_t layer, uint32_t head,
                   const struct kvd_attention *a);

/* Between steps: chooses the channels from the last queries and what is in the slots, and labels that. */
int labels_make(struct labels *, const struct relief *, uint8_t *const *blocks);

/*
 * Aggregated scores (hshare->aggregate) of positions [from, from + n) for one query of the heads that share a KV
 * head. They lie in the head's desk until the next call for it.
 */
float *labels_score(struct labels *, const struct relief *, uint32_t layer, uint32_t head, const float *q,
                    uint32_t from, uint32_t n);

uint64_t labels_bytes(const struct labels *, const struct relief *);

static inline const float *labels_query(const struct labels *l, const struct relief *r, uint32_t layer, uint32_t head,
                                        uint32_t position) {
        return l->queries + (relief_index(r, layer, head) * CALIBRATION + position % CALIBRATION) * l->width;
}

#endif
