/* SPDX-License-Identifier: Apache-2.0 */

/*
 * MemShare: chooses the blocks that a worker compares, and proposes changes from its results. A
 * step that has ended is compared with older ones. Its full blocks may be replaced (targets),
 * except for the sequence's first and newest ones (memshare.recent_guard; the paper's profile
 * spares none). Full blocks of older steps may replace them (sources), unless they are
 * approximations or replacements themselves. A target is a private block of the sequence. A source
 * may also be a block of the prefix cache, or of another sequence of the space (cross_seq).
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "store/hooks.h"
#include "store/methods/methods.h"

/* ---- steps ----------------------------------------------------------------------------------- */

/* A step consists of the blocks that lie completely inside it. */
static struct step make_step(const struct sequence *q, uint32_t first, uint32_t n) {
        struct step s = {.first_token = first,
                         .n_tokens = n,
                         .first_entry = sequence_entry_at(q, first)};
        uint32_t end;

        if (s.first_entry < q->n_entries && q->entries[s.first_entry].position < first)
                s.first_entry++;
        end = sequence_entry_at(q, first + n);
        s.n_entries = end > s.first_entry ? end - s.first_entry : 0;
        return s;
}

#define LOOKS_BACK 256u /* a client may create any number of steps */

/* Its last blocks are among the sequence's newest ones, which are not replaced. */
static bool is_guarded(const struct sequence *q, const struct step *s) {
        return s->first_entry + s->n_entries + setting(q->space, KVD_memshare_recent_guard) >
               q->n_entries;
}

/* Steps whose last blocks were spared when they were compared, and are old enough by now. */
static void look_again(struct sequence *q) {
        for (uint32_t i = q->n_steps, looks = LOOKS_BACK; i-- > 0 && looks-- > 0;) {
                if (!q->steps[i].again || is_guarded(q, &q->steps[i]))
                        continue;
                q->steps[i].again = false;
                q->steps[i].wanted = true;
                q->n_compared = MIN(q->n_compared, i);
        }
}

int sequence_share(struct attachment *a, uint32_t number, uint32_t first, uint32_t n) {
        struct sequence *q = sequence_find(a, number);
        struct step step;

        if (!q)
                return -ENOENT;
        if (!n || first > q->n_tokens || n > q->n_tokens - first)
                return store_refuse(
                        space_store(a->space), -EINVAL,
                        "sequence in space '%s': it has %u tokens, not the %u from %u on",
                        space_name(a->space), q->n_tokens, n, first);
        if (!setting(a->space, KVD_memshare_on) ||
            n < setting(a->space, KVD_memshare_min_step_tokens) || q->n_steps == q->max_blocks)
                return 0;
        step = make_step(q, first, n);
        if (!step.n_entries)
                return 0;
        look_again(q);
        step.number = ++calibration_of(a->space)->n_steps;
        step.wanted = true;
        q->steps[q->n_steps++] = step;
        calibrate_look(a->space);
        job_ask(&q->comparing);
        return 1;
}

/* For relief: by now there may be more steps that are similar to those compared before. */
bool sequence_compare_all(struct sequence *q) {
        q->n_compared = 0;
        q->n_again = q->n_steps;
        if (q->n_steps > 1)
                job_ask(&q->comparing);
        return q->n_steps > 1;
}

/* ---- targets and sources --------------------------------------------------------------------- */

static bool is_full(const struct space *space, const struct entry *e) {
        return e->n_tokens == space_block_tokens(space);
}

static bool is_target(const struct sequence *q, uint32_t at) {
        const struct entry *e = &q->entries[at];
        bool paper = setting(q->space, KVD_memshare_profile) == KVD_PAPER;

        return (at > 0 || paper) &&
               at + setting(q->space, KVD_memshare_recent_guard) < q->n_entries &&
               e->busy == IDLE && entry_is_own(e) &&
               !(e->flags & (KVD_ENTRY_APPROX | KVD_ENTRY_COMPACT)) && is_full(q->space, e) &&
               block_of(q->space, kvd_ref_id(e->ref))->refs == 1;
}

static bool is_source(const struct sequence *q, const struct sequence *of, const struct entry *e) {
        bool untouched = e->busy == IDLE || e->busy == FORGET_WANTED || e->busy == FORGETTING;
        bool known = q == of && (e->flags & KVD_ENTRY_BORROWED);

        return e->ref && untouched && (known || entry_is_own(e)) &&
               !(e->flags & (KVD_ENTRY_APPROX | KVD_ENTRY_COMPACT)) && is_full(q->space, e) &&
               block_current(q->space, e->ref);
}

/* ---- the job --------------------------------------------------------------------------------- */

#define COMPARE_STEPS 1024u       /* steps of one job */
#define COMPARE_TOKENS (1u << 20) /* tokens of one job: they are copied without a pause */
/* entries and steps looked at for one job: a client may create any number of steps */
#define COMPARE_LOOKS 16384u

struct gathering {
        struct sequence *q;
        struct job *job;
        uint32_t n_steps;
        uint32_t looks; /* left */
        uint64_t n_tokens;
        const uint32_t *tokens[COMPARE_STEPS];
};

static bool add_block(struct gathering *g, const struct step *s, const struct entry *e, uint32_t at,
                      uint32_t flags) {
        struct kvd_job_item *item = job_add(g->job, e->ref, at);

        if (!item)
                return false;
        item->position = (int32_t)block_position(g->q->space, kvd_ref_id(e->ref));
        item->n_tokens = e->n_tokens;
        item->ordinal = (uint32_t)g->n_tokens + e->position - s->first_token;
        item->flags = g->job->items[g->job->n_items - 1].flags = flags;
        return true;
}

static bool look(struct gathering *g) {
        return g->looks && g->looks--;
}

/*
 * Adds the step's blocks that can be targets or sources, up to entry `before`. Returns false if
 * there is no more room.
 */
static bool add_step(struct gathering *g, struct sequence *of, const struct step *s, bool is_new,
                     uint32_t before) {
        struct kvd_job_step *to = &g->job->steps[g->n_steps];
        uint32_t end = MIN(s->first_entry + s->n_entries, before);
        bool room = true;

        *to = (struct kvd_job_step){.first_item = g->job->n_items,
                                    .first_token = (uint32_t)g->n_tokens,
                                    .n_tokens = s->n_tokens};
        if (g->n_steps == COMPARE_STEPS || g->n_tokens + s->n_tokens > COMPARE_TOKENS ||
            job_token_room(g->job, g->n_steps + 1) < g->n_tokens + s->n_tokens)
                return false;
        for (uint32_t i = s->first_entry; room && i < end; i++) {
                room = look(g);
                if (!room)
                        break;
                if (is_new ? !is_target(of, i) : !is_source(g->q, of, &of->entries[i]))
                        continue;
                room = job_token_room(g->job, g->n_steps + 2) >
                               g->n_tokens + s->n_tokens +
                                       sizeof(struct kvd_job_item) / sizeof(uint32_t) &&
                       add_block(g, s, &of->entries[i], i,
                                 is_new ? KVD_JOB_TARGET : KVD_JOB_SOURCE);
        }
        to->n_items = g->job->n_items - to->first_item;
        if (!to->n_items)
                return room;
        g->tokens[g->n_steps++] = of->tokens + s->first_token;
        g->n_tokens += s->n_tokens;
        return room;
}

static bool add_older(struct gathering *g, uint32_t at) {
        const struct step *s = &g->q->steps[at];

        for (uint32_t i = g->q->n_steps; i-- > 0;)
                if (!look(g) || (g->q->steps[i].number < s->number &&
                                 !add_step(g, g->q, &g->q->steps[i], false, s->first_entry)))
                        return false;
        return true;
}

static void add_others(struct gathering *g, uint64_t before) {
        struct space *space = g->q->space;

        for (uint32_t k = 0; k < KVD_MAX_SEQUENCES; k++) {
                struct sequence *of = sequences_of(space)->at[k];

                if (!of || of == g->q || of->group != g->q->group)
                        continue;
                for (uint32_t i = of->n_steps; i-- > 0;)
                        if (!look(g) || (of->steps[i].number < before &&
                                         !add_step(g, of, &of->steps[i], false, NONE)))
                                return;
        }
}

/*
 * Gathers the new step, then older ones, latest first. Returns false if there is nothing to
 * compare.
 */
static bool gather(struct gathering *g, uint32_t at) {
        const struct step *s = &g->q->steps[at];
        uint32_t targets;

        add_step(g, g->q, s, true, NONE);
        targets = g->job->n_items;
        if (!targets)
                return false;
        if (add_older(g, at) && setting(g->q->space, KVD_memshare_cross_seq))
                add_others(g, s->number);
        job_results(g->job, (uint32_t)MIN(targets, JOB_RESULT_BYTES / sizeof(struct kvd_match)));
        return g->job->n_items > targets;
}

static void write_steps(struct gathering *g) {
        const float tau[] = {share_distance(g->q->space), share_distance_same(g->q->space)};
        uint32_t bits[ARRAY_SIZE(tau)];

        memcpy(bits, tau, sizeof bits);
        job_param(g->job, 0, bits[0]);
        job_param(g->job, 1, bits[1]);
        job_steps(g->job, g->job->steps, g->n_steps);
        for (uint32_t i = 0; i < g->n_steps; i++)
                job_tokens(g->job, g->tokens[i], g->job->steps[i].n_tokens);
}

/* Returns the first step that must be compared, or n_steps. Moves n_compared to it. */
static uint32_t first_wanted(struct sequence *q) {
        uint32_t *at = &q->n_compared;

        while (*at < q->n_steps && !q->steps[*at].wanted && (*at == 0 || *at >= q->n_again))
                ++*at;
        return *at;
}

static void count_step(struct sequence *q) {
        struct step *s = &q->steps[q->compared];

        if (!s->counted)
                space_count(q->space, KVD_SPACE_STEPS, 1);
        s->counted = true;
}

static bool write_compare(struct ticket *t, struct job *job) {
        struct gathering g = {.q = t->owner, .job = job, .looks = COMPARE_LOOKS};
        uint32_t at = first_wanted(g.q);

        if (at == g.q->n_steps)
                return false;
        g.q->steps[at].wanted = false;
        g.q->steps[at].again = is_guarded(g.q, &g.q->steps[at]);
        g.q->compared = at;
        g.q->n_compared = at + 1;
        if (first_wanted(g.q) < g.q->n_steps)
                job_ask(t);
        if (!gather(&g, at)) {
                job->looks = COMPARE_LOOKS - g.looks;
                count_step(g.q);
                return false;
        }
        write_steps(&g);
        return true;
}

/* ---- the result ------------------------------------------------------------------------------ */

static bool makes_sense(const struct job *job, const struct kvd_match *m) {
        return m->target < job->n_items && m->source < job->n_items &&
               job->items[m->target].flags == KVD_JOB_TARGET &&
               job->items[m->source].flags == KVD_JOB_SOURCE && isfinite(m->distance) &&
               m->distance <= MAX(share_distance(job->space), share_distance_same(job->space));
}

static void propose(struct job *job, struct sequence *q, const struct kvd_match *m) {
        const struct job_item *target = &job->items[m->target];
        kvd_ref source = job->items[m->source].held;
        struct entry *e = &q->entries[target->at];
        struct offer offer = {.kind = KVD_CHANGE_REMAP,
                              .block = source,
                              .flags = KVD_ENTRY_OWN | KVD_ENTRY_SHARED,
                              .distance = m->distance};

        /* only the first match: after that the entry is busy */
        if (e->ref != target->held || !is_target(q, target->at))
                return;
        if (setting(q->space, KVD_memshare_align))
                offer.delta = (int32_t)(e->position - block_position(q->space, kvd_ref_id(source)));
        change_offer(q, target->at, &offer);
}

static void settle_compare(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct sequence *q = job->ticket ? job->ticket->owner : NULL;
        const struct kvd_match *matches = results;
        uint32_t before = q ? q->changes.n : 0;

        if (!q)
                return;
        if (end == JOB_AGAIN) {
                q->steps[q->compared].wanted = true;
                q->n_compared = MIN(q->n_compared, q->compared);
        }
        if (end != JOB_DONE)
                return;
        for (uint32_t i = 0; i < n; i++)
                if (makes_sense(job, &matches[i]))
                        propose(job, q, &matches[i]);
        count_step(q);
        if (q->changes.n > before)
                sync_news(q->space);
}

static const struct job_kind job_compare = {.number = KVD_JOB_COMPARE,
                                            .rests = true,
                                            .result_bytes = sizeof(struct kvd_match),
                                            .fewer = true,
                                            .write = write_compare,
                                            .settle = settle_compare};

/* ---- the client's decision ------------------------------------------------------------------- */

static void taken(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];

        entry_take_block(q, e);
        entry_set_flags(q, e, e->new_flags);
        entry_erase_copy(q, e); /* the copy is of the old contents */
        space_count(q->space, KVD_SPACE_SHARED, 1);
}

static void begin(struct sequence *q) {
        ticket_init(&q->comparing, &job_compare, q->space, q);
}

static bool pending(struct sequence *q) {
        return job_pending(&q->comparing);
}

static void end(struct sequence *q) {
        job_withdraw(&q->comparing);
}

const struct hooks memshare_hooks = {.sequence_begins = begin,
                                     .sequence_pending = pending,
                                     .sequence_ends = end,
                                     .change = KVD_CHANGE_REMAP,
                                     .taken = taken};
