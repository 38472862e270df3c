/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_METHODS_READER_H
#define KVD_CLIENT_METHODS_READER_H

/*
 * A reader: what kvd_attend.h declares, in three parts. Columns are the slots of the sequence's
 * entries that hold tokens, resident or not, in order.
 */

#include "client/kvd_methods.h"
#include "client/reader.h"
#include "ipc/base/geometry.h"
#include "kernels/attend.h"
#include "kernels/hshare.h"

enum { READER_PIECE = 16 }; /* queries that wait for blocks together */

struct kvd_reader {
        struct kvd_sequence *sequence;
        const struct kvd_shape *geometry;
        const struct kvd_ops *ops;
        uint32_t group; /* query heads of a KV head */
        float scale;
        float *frequencies; /* [head_dim / 2]; NULL if unknown */
        uint64_t timeout_ns;
        uint32_t max_blocks, slots; /* of the sequence, at most */

        /* the sequence's entries as of the last refresh */
        const struct kvd_entry *entries;
        uint32_t n_entries;
        uint64_t *rows; /* [max_blocks] row and generation of an entry's labels */
        uint32_t *fill; /* [max_blocks] slots that hold tokens */
        uint32_t *used; /* [slots] slot of each column */
        uint32_t n_used;
        bool gaps;           /* some entry is not full */
        uint32_t renumbered; /* number of times that slots went out of use */
        bool packed;     /* heads keep tokens of their own, so that a slot is another one in each */
        int32_t *deltas; /* [max_blocks] */
        uint32_t *rotation; /* [max_blocks] */
        float *rotations;   /* [max_blocks][head_dim] */
        bool rotated;       /* some delta is not 0 */

        uint32_t behind, n; /* tokens behind the entries with those of the pass, and of the pass */
        uint32_t tokens;    /* of all passes before */
        uint32_t decoded;   /* passes since decoding began */
        bool ready;         /* decoding has begun */
        bool late;          /* the pool did not answer in time: do not wait until it does */
        int failed;         /* result of the last wait, if negative: the daemon is gone */
        bool measures;      /* this pass */
        float *mass;        /* [max_blocks] attention of the pass */
        uint32_t *hits;     /* [max_blocks] scratch */

        struct selection *selection; /* NULL if nothing needs to know which tokens matter */
        struct residency *residency; /* NULL if blocks stay unless the daemon moves them */
        struct rounds *rounds;       /* NULL without residency */
        bool in_rounds;              /* what there is no room for is fetched after this round */
        struct bounds *bounds;       /* NULL until kvd_reader_select needs them */
        struct kvd_reader_stats stats;
};

double reader_setting(const struct kvd_reader *, const char *name);
/* 0; -ECHILD; -EINVAL: no such layer */
int reader_check(const struct kvd_reader *, uint32_t layer);
/* Takes entries and labels as they are now. No attention must be running. */
void reader_refresh(struct kvd_reader *);
/* Waits for requested blocks. Returns how many entries have changed, or 1 if that is unknown. */
int reader_wait(struct kvd_reader *);

/* ---- reader_labels.c: estimates ---- */

struct choice;

struct desk { /* of a KV head; used by the thread that processes that head */
        struct kvd_label_query *query; /* [group] */
        float *rotated;                /* [group][dim] */
        float *scores, *total;         /* [group][slots], [slots] */
        uint32_t *numbers, *list;      /* scratch [2 slots]; [slots]: columns or slots */
        float *share;                  /* [max_blocks] of the attention of the pass, estimated */
        bool looked;                   /* share is that of the current layer */
        uint64_t selections, ns;
};

struct selection {
        bool hshare;
        struct kvd_window window;
        uint32_t every; /* queries in a group: the first one selects */
        uint32_t dense; /* number of first layers that attend to all tokens */
        uint32_t slots;
        const struct kvd_hshare_ops *ops;
        struct kvd_label_shape shape;
        const uint8_t **rows;     /* [max_blocks] labels in the daemon's memory; NULL if none */
        uint8_t *labels;          /* [layer][head][slot] of labelled entries */
        uint32_t complete;        /* entries before this one have labels, or never will */
        uint32_t labelled;        /* one past the last entry with labels */
        bool holes;               /* some entry before that has no labels yet */
        bool absent;              /* some entry before that has none */
        uint32_t *layers, *heads; /* the source of each selection: [layers], [layers][kv_heads] */
        /* [layer][head][READER_CALIBRATION][group * dim]: token t is at t % READER_CALIBRATION */
        float *queries;
        struct choice *choices;  /* [layer][head] */
        struct desk *desks;      /* [head] */
        struct kvd_block *asked; /* with the bits from which a worker makes a configuration */
        uint32_t n_asked;
        const uint32_t **lists; /* [head] */
        uint32_t *n_lists;
};

static inline size_t reader_index(const struct kvd_reader *r, uint32_t layer, uint32_t head) {
        return (size_t)layer * r->geometry->kv_heads + head;
}

/* Labels of new entries; changed: entries from this one on have changed. */
void labels_refresh(struct kvd_reader *, uint32_t changed);
/* Computes one score per slot of a labelled entry, for the query heads of a KV head. */
void labels_score(struct kvd_reader *, uint32_t layer, uint32_t head, const float *q);
/*
 * After labels_score: raises each entry's share to what this query gives it, relative to its
 * attention to all entries in [from, to).
 */
void labels_share(struct kvd_reader *, uint32_t head, uint32_t from, uint32_t to);
/*
 * After labels_score: ranks slots without a label above all others, among columns [from, from + n).
 * Returns how many there are.
 */
uint32_t labels_prefer_holes(struct kvd_reader *, uint32_t head, uint32_t from, uint32_t n);
/* Selects the z slots of highest score among these columns, ascending. Returns how many. */
uint32_t labels_top(struct kvd_reader *, uint32_t head, uint32_t from, uint32_t n, uint32_t z,
                    uint32_t *to);

/* ---- reader_bounds.c: Quest ---- */

struct bounds;

/* Prepares a layer, with the keys that are in the pool now. -EINVAL: on a GPU; -ENOMEM */
int bounds_prepare(struct kvd_reader *, uint32_t layer);
/* After that: selects the z entries of highest bound, ascending. Returns how many. */
uint32_t bounds_top(struct kvd_reader *, uint32_t layer, uint32_t head, const float *q, uint32_t z,
                    uint32_t *to);
void bounds_free(struct kvd_reader *);

/* ---- reader_select.c: HShare ---- */

/* As reader_look, for n tokens from q on. */
void reader_look_at(struct kvd_reader *, uint32_t layer, uint32_t head, const float *q, size_t ldq,
                    uint32_t n);

int selection_new(struct kvd_reader *, bool hshare);
/* After the entries have changed: heads whose slots are other tokens share no selection. */
void selection_refresh(struct kvd_reader *);
void selection_free(struct kvd_reader *);
int selection_begin(struct kvd_reader *); /* the prompt is in the table; decoding begins */
void selection_take(struct kvd_reader *); /* takes a configuration that was asked for */
/* adds, per entry [max_blocks], the tokens that current choices select */
void selection_hits(const struct kvd_reader *, uint32_t *hits);

/* ---- reader_keep.c: KVReviver ---- */

int residency_new(struct kvd_reader *);
void residency_free(struct kvd_reader *);
void residency_forget(struct kvd_reader *); /* what earlier queries needed */
/* entries [first, end) may leave: all but the first and the newest ones; there may be none */
uint32_t residency_first(const struct kvd_reader *);
uint32_t residency_end(const struct kvd_reader *);
/* share [n_entries]: of each entry, as labels_share() computes it for those that may leave */
void residency_share(struct kvd_reader *, const float *share);
int residency_fetch(struct kvd_reader *); /* missing blocks that are needed since the last call */
int residency_settle(struct kvd_reader *);
/*
 * What the layer's queries need and have not seen yet: marks the entries that are here as seen, and
 * fetches some others that are needed. Returns whether any came, or -errno.
 */
int residency_fetch_more(struct kvd_reader *, bool *seen);

/* ---- reader_rounds.c: attention in rounds ---- */

struct rounds;

int rounds_new(struct kvd_reader *);
void rounds_free(struct kvd_reader *);
/*
 * Attention over what is here, and then over what queries need and there was no room for: as in
 * kvd_sequence_attention, of READER_PIECE tokens at most.
 */
int rounds_attend(struct kvd_reader *, uint32_t layer, const struct kvd_table *,
                  const struct kvd_heads *, const float *q, size_t ldq, float *out, size_t ldo);

#endif
