/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Computes priorities of blocks, from attention mass and selections, which clients report in their
 * pin pages, and from KeyDiff's score, which a worker computes. In a sequence, each signal counts
 * by its rank among the sequence's blocks. A signal without values is ignored, and its weight goes
 * to the others. A client that reports wrong values only affects the order in which blocks leave.
 * Blocks of chains are not ranked (cache/worth.c).
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/hooks.h"
#include "store/methods/methods.h"

/* State for scoring a space's chains with KeyDiff, one leaf at a time. */
struct chain_scores {
        struct ticket ticket;
        uint32_t hand; /* next block to look at */
        kvd_ref leaf;  /* end of the chain to score */
};

static struct chain_scores *chain_scores_of(const struct space *space) {
        return space->parts.chain_scores;
}

/* ---- priorities in a sequence ---------------------------------------------------------------- */

enum signal { MASS, HITS, KEYDIFF, N_SIGNALS };

static const enum kvd_setting weight_of[] =
        {[MASS] = KVD_pressure_mass, [HITS] = KVD_pressure_hits, [KEYDIFF] = KVD_pressure_keydiff};

static uint16_t signal_of(const struct sequence *q, const struct entry *e, enum signal which) {
        struct kvd_use use;

        if (which == KEYDIFF)
                return e->score;
        use = block_use(q->attachment, kvd_ref_id(e->ref));
        return which == MASS ? use.mass : use.hits;
}

/* Counts in counts[v] the entries whose signal is v. Returns whether the signal has any values. */
static bool count_signal(const struct sequence *q, enum signal which, uint32_t *counts) {
        bool given = false;

        memset(counts, 0, STORE_RANKS * sizeof *counts);
        for (uint32_t i = q->ranked.from; i < q->ranked.to; i++) {
                uint16_t v = q->entries[i].ref ? signal_of(q, &q->entries[i], which) : 0;

                counts[v] += q->entries[i].ref != 0;
                given |= v != 0;
        }
        return given;
}

/*
 * Replaces counts[v] by twice the rank of v: the number of entries below it and half of those equal
 * to it. Returns twice the number of entries.
 */
static uint32_t counts_to_ranks(uint32_t *counts) {
        uint32_t below = 0;

        for (uint32_t v = 0; v < STORE_RANKS; v++) {
                uint32_t n = counts[v];

                counts[v] = 2 * below + n;
                below += n;
        }
        return 2 * below;
}

/* Only these settings protect entries: with the paper's profile there may be none. */
static void protect(struct sequence *q, double weights) {
        double sink_blocks = setting(q->space, KVD_keydiff_sink_blocks);
        uint64_t recent = cool_recent_from(q);

        for (uint32_t i = q->ranked.from; i < q->ranked.to; i++) {
                struct entry *e = &q->entries[i];
                double p = weights > 0 ? e->value / weights : 0.5;

                e->priority = i < sink_blocks || e->position + e->n_tokens > recent ?
                                      PRIORITY_MOST :
                                      (uint16_t)(MIN(p, 1) * (PRIORITY_MOST - 1));
        }
}

#define RANKED 4096u /* entries at once */
#define UNSCORED 8u  /* one in UNSCORED entries may lack a score */

/* Moves on to the next entries, and from the last ones to the first. */
static void next_piece(struct sequence *q) {
        struct ranked *r = &q->ranked;

        r->from = r->to < q->n_entries ? r->to : 0;
        r->to = r->from + MIN(RANKED, q->n_entries - r->from);
        r->in_vain += r->to - r->from;
        for (uint32_t i = r->from; i < r->to; i++)
                q->entries[i].value = 0;
}

/*
 * Sets the priority of resident entries, 0 to PRIORITY_MOST. A long sequence is ranked in pieces,
 * each entry among those of its piece.
 */
void priority_rank(struct sequence *q) {
        uint32_t *ranks = space_store(q->space)->ranks;
        double weights = 0;

        next_piece(q);
        for (enum signal k = 0; k < N_SIGNALS; k++) {
                double weight = setting(q->space, weight_of[k]);
                uint32_t all;

                if (weight == 0 || !count_signal(q, k, ranks))
                        continue;
                weights += weight;
                all = counts_to_ranks(ranks);
                for (uint32_t i = q->ranked.from; i < q->ranked.to; i++)
                        if (q->entries[i].ref)
                                q->entries[i].value +=
                                        (float)(weight * ranks[signal_of(q, &q->entries[i], k)] /
                                                all);
        }
        protect(q, weights);
}

bool priority_lacks_scores(const struct sequence *q) {
        return q->n_unscored > q->n_entries / UNSCORED &&
               setting(q->space, KVD_pressure_keydiff) > 0;
}

/* ---- SCORE: KeyDiff's scores ----------------------------------------------------------------- */

/* Returns 1 to 65535, or 0 if the score is invalid. */
static uint16_t from_float(float score) {
        return isfinite(score) && score >= 0 && score <= 1 ?
                       (uint16_t)(1 + score * (UINT16_MAX - 1)) :
                       0;
}

static bool write_score_sequence(struct ticket *t, struct job *job) {
        struct sequence *q = t->owner;
        uint32_t i = q->n_entries > KVD_JOB_ITEMS ? q->n_entries - KVD_JOB_ITEMS : 0;

        for (; i < q->n_entries; i++) {
                const struct entry *e = &q->entries[i];
                struct kvd_job_item *item;

                if (!e->ref || (e->flags & (KVD_ENTRY_SHARED | KVD_ENTRY_APPROX)) ||
                    !block_current(q->space, e->ref))
                        continue;
                item = job_add(job, e->ref, i);
                if (!item)
                        break;
                item->position = (int32_t)e->position;
                item->n_tokens = e->slots;
        }
        q->n_unscored = 0;
        return job->n_items > 0;
}

static void settle_score_sequence(struct job *job, enum job_end end, const void *results,
                                  uint32_t n) {
        struct sequence *q = job->ticket ? job->ticket->owner : NULL;
        const float *score = results;

        for (uint32_t i = 0; q && end == JOB_DONE && i < job->n_items; i++)
                q->entries[job->items[i].at].score = from_float(score[i]);
}

static const struct job_kind job_score_sequence = {.number = KVD_JOB_SCORE,
                                                   .rests = true,
                                                   .result_bytes = sizeof(float),
                                                   .write = write_score_sequence,
                                                   .settle = settle_score_sequence};

/* Writes the chain that ends with the leaf; of a very long chain only the last blocks. */
static bool write_score_chain(struct ticket *t, struct job *job) {
        struct space *space = t->space;
        uint32_t ids[KVD_JOB_ITEMS], n = 0;

        if (!block_current(space, chain_scores_of(space)->leaf) ||
            block_of(space, kvd_ref_id(chain_scores_of(space)->leaf))->private)
                return false;
        for (uint32_t id = kvd_ref_id(chain_scores_of(space)->leaf);
             id != NONE && n < KVD_JOB_ITEMS; id = block_of(space, id)->parent) {
                if (block_of(space, id)->pending || block_of(space, id)->poisoned)
                        return false;
                ids[n++] = id;
        }
        while (n-- > 0) {
                struct kvd_job_item *item = job_add(job, block_ref(space, ids[n]), ids[n]);

                if (!item)
                        break;
                item->position = (int32_t)block_position(space, ids[n]);
                item->n_tokens = block_desc(space, ids[n])->n_tokens;
        }
        return true;
}

/* A block that cannot be scored gets the middle score, and is not scored again. */
static void settle_score_chain(struct job *job, enum job_end end, const void *results, uint32_t n) {
        const float *score = results;

        for (uint32_t i = 0; end != JOB_AGAIN && i < job->n_items; i++) {
                uint16_t s = end == JOB_DONE ? from_float(score[i]) : 0;

                job->space->blocks[job->items[i].at].score = s ? s : UINT16_MAX / 2;
                block_restamp(job->space, job->items[i].at);
        }
}

static const struct job_kind job_score_chains = {.number = KVD_JOB_SCORE,
                                                 .rests = true,
                                                 .result_bytes = sizeof(float),
                                                 .write = write_score_chain,
                                                 .settle = settle_score_chain};

#define LOOKS 1024u /* blocks that one call looks at if the space has one client */

/*
 * If the policy evicts by worth, scans the leaves in turn, corrects their order in the heap, and
 * asks for scores of those without one.
 */
static bool idle(struct space *space) {
        uint32_t n = space_ids(space), looks = LOOKS / (1 + space_seats(space) / 4);

        if (!policy_goes_by_worth(space_index(space)->policy) || !n)
                return false;
        for (uint32_t i = 0; i < MIN(n, looks); i++) {
                uint32_t id = chain_scores_of(space)->hand++ % n;
                const struct block *b = block_of(space, id);

                if (!b->heap || b->private)
                        continue;
                block_restamp(space, id);
                if (b->score || chain_scores_of(space)->ticket.waiting.in || !space->parts.watched)
                        continue;
                chain_scores_of(space)->leaf = block_ref(space, id);
                job_ask(&chain_scores_of(space)->ticket);
        }
        return false;
}

/* ---- life ------------------------------------------------------------------------------------ */

static int begin_space(struct space *space) {
        struct chain_scores *scores = space->parts.chain_scores = sys->calloc(1, sizeof *scores);

        if (!scores)
                return -ENOMEM;
        ticket_init(&scores->ticket, &job_score_chains, space, NULL);
        return 0;
}

static void leave_space(struct space *space) {
        job_withdraw(&chain_scores_of(space)->ticket);
}

static void end_space(struct space *space) {
        free(chain_scores_of(space));
}

static void begin(struct sequence *q) {
        ticket_init(&q->scoring, &job_score_sequence, q->space, q);
}

static void end(struct sequence *q) {
        job_withdraw(&q->scoring);
}

const struct hooks priority_hooks = {.space_begins = begin_space,
                                     .space_leaves = leave_space,
                                     .space_ends = end_space,
                                     .idle = idle,
                                     .sequence_begins = begin,
                                     .sequence_ends = end};
