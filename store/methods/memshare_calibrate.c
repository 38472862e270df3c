/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Measures MemShare's threshold. How much unrelated blocks differ depends on the model, the metric
 * and the alignment, so no fixed number separates similar from unrelated blocks everywhere. With
 * memshare.calibrate, a worker measures the distances of random pairs of the space's blocks, except
 * pairs that have half of their tokens in common. The threshold is that quantile of the distances
 * instead of memshare.tau_block, so that this share of unrelated pairs would be taken for similar.
 * It is measured again whenever the number of steps has doubled.
 */

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/hooks.h"
#include "store/methods/methods.h"

#define PAIRS 128u
#define PAIRS_LEAST 8u
#define BLOCKS_LEAST 16u /* private blocks of the space: fewer make too few pairs */
#define TRIES (16u * PAIRS)

#define RELATIVE 2 /* memshare.metric */

/* ---- the threshold --------------------------------------------------------------------------- */

static void tell(struct space *space) {
        atomic_store_explicit((shm_u64 *)&space->ix->counters[KVD_SPACE_TAU_BLOCK],
                              (uint64_t)(1e6 * (double)share_distance(space) + 0.5),
                              memory_order_relaxed);
}

float share_distance(const struct space *space) {
        bool measured = calibration_of(space)->tau > 0 &&
                        setting(space, KVD_memshare_calibrate) > 0;

        return measured ? calibration_of(space)->tau :
                          (float)setting(space, KVD_memshare_tau_block);
}

/* The relative metric means the same for all models, so that one number suits all. */
float share_distance_same(const struct space *space) {
        return setting(space, KVD_memshare_metric) == RELATIVE ?
                       (float)setting(space, KVD_memshare_tau_same) :
                       0;
}

void calibrate_look(struct space *space) {
        tell(space);
        if (setting(space, KVD_memshare_calibrate) > 0 &&
            calibration_of(space)->n_steps >= 2 * calibration_of(space)->calibrated)
                job_ask(&calibration_of(space)->calibrate);
}

static void forget(struct space *space) {
        calibration_of(space)->tau = 0;
        calibration_of(space)->calibrated = 0;
        tell(space);
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static uint32_t draw(struct space *space, uint32_t n) {
        calibration_of(space)->random = calibration_of(space)->random *
                                                UINT64_C(6364136223846793005) +
                                        UINT64_C(1442695040888963407);
        return (uint32_t)((calibration_of(space)->random >> 32) * n >> 32);
}

static bool is_measured(const struct sequence *q, const struct entry *e) {
        return entry_is_own(e) && e->ref && !(e->flags & (KVD_ENTRY_APPROX | KVD_ENTRY_COMPACT)) &&
               e->n_tokens == space_block_tokens(q->space) && block_current(q->space, e->ref);
}

struct draw {
        struct sequence *q;
        uint32_t at;
};

static bool draw_block(struct space *space, struct draw *ret) {
        uint32_t from = draw(space, KVD_MAX_SEQUENCES);

        for (uint32_t i = 0; i < KVD_MAX_SEQUENCES; i++) {
                struct sequence *q = sequences_of(space)->at[(from + i) % KVD_MAX_SEQUENCES];

                if (!q || !q->n_entries)
                        continue;
                *ret = (struct draw){q, draw(space, q->n_entries)};
                return is_measured(q, &q->entries[ret->at]);
        }
        return false;
}

static const uint32_t *tokens_of(const struct draw *p) {
        return p->q->tokens + p->q->entries[p->at].position;
}

static bool are_strangers(const struct draw *a, const struct draw *b) {
        const uint32_t *x = tokens_of(a), *y = tokens_of(b);
        uint32_t bt = space_block_tokens(a->q->space), common = 0;

        for (uint32_t i = 0; i < bt; i++)
                for (uint32_t k = 0; k < bt; k++)
                        if (x[i] == y[k]) {
                                common++;
                                break;
                        }
        return a->q->group == b->q->group && 2 * common < bt;
}

static void add(struct job *job, const struct draw *p) {
        const struct entry *e = &p->q->entries[p->at];
        struct kvd_job_item *item = job_add(job, e->ref, p->at);

        item->position = (int32_t)e->position;
        item->n_tokens = e->n_tokens;
}

/* ---- the job --------------------------------------------------------------------------------- */

static bool write_calibrate(struct ticket *t, struct job *job) {
        uint32_t most = MIN(MAX(job_blocks(job) / 2, PAIRS_LEAST), PAIRS), n = 0;
        struct draw a, b;

        if (t->space->private.n < BLOCKS_LEAST)
                return false;
        for (uint32_t i = 0; i < TRIES && n < most; i++) {
                job->looks++;
                if (!draw_block(t->space, &a) || !draw_block(t->space, &b) ||
                    !are_strangers(&a, &b))
                        continue;
                add(job, &a);
                add(job, &b);
                n++;
        }
        job_results(job, n);
        return n >= PAIRS_LEAST;
}

static int by_size(const void *a, const void *b) {
        float x = *(const float *)a, y = *(const float *)b;

        return x < y ? -1 : x > y;
}

/* Ignores results that are not finite. */
static void settle_calibrate(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct space *space = job->space;
        float distances[PAIRS];
        uint32_t found = 0;

        for (uint32_t i = 0; end == JOB_DONE && i < n; i++) {
                float x = ((const float *)results)[i];

                if (isfinite(x) && x >= 0)
                        distances[found++] = x;
        }
        if (found < PAIRS_LEAST)
                return;
        qsort(distances, found, sizeof *distances, by_size);
        calibration_of(space)->tau =
                distances[MIN((uint32_t)(setting(space, KVD_memshare_calibrate) * found),
                              found - 1)];
        calibration_of(space)->calibrated = MAX(calibration_of(space)->n_steps, 1);
        space_count(space, KVD_SPACE_CALIBRATED, found);
        tell(space);
}

static const struct job_kind job_calibrate = {.number = KVD_JOB_CALIBRATE,
                                              .rests = true,
                                              .result_bytes = sizeof(float),
                                              .write = write_calibrate,
                                              .settle = settle_calibrate};

static int begin(struct space *space) {
        struct calibration *m = space->parts.calibration = sys->calloc(1, sizeof *m);

        if (!m)
                return -ENOMEM;
        ticket_init(&m->calibrate, &job_calibrate, space, NULL);
        return 0;
}

static void leave(struct space *space) {
        job_withdraw(&calibration_of(space)->calibrate);
}

static void end(struct space *space) {
        free(calibration_of(space));
}

const struct hooks memshare_calibrate_hooks = {.space_begins = begin,
                                               .setting_changed = forget,
                                               .space_leaves = leave,
                                               .space_ends = end};
