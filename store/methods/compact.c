/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compaction packs a range of entries: each layer and KV head keeps its tokens of highest score, by
 * KeyDiff or by the client, in as few blocks as possible. A worker fills the new blocks, which no
 * client has seen yet. Then all changes are proposed to the client together: the first entries of
 * the range get the new blocks, the others are dropped. Nothing changes until the client has taken
 * them, nor if it does not take them, or if something fails.
 *
 * Room for the new blocks is allocated with the request, so that a full pool refuses the request.
 * An entry that waits (COMPACT_WANTED) has its new block in `other`; once the job is written, the
 * job owns that block.
 *
 * The client's scores are in blocks that it is filling. If it gives up one of them before a worker
 * has the job, nothing is compacted; the worker's job holds them.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/sys.h"
#include "store/hooks.h"
#include "store/methods/methods.h"
#include "store/summaries.h"

struct scores {
        uint32_t n;
        kvd_ref blocks[];
};

static int refuse(struct attachment *a, int error, const char *what) {
        return store_refuse(space_store(a->space), error, "compacting in space '%s': %s",
                            space_name(a->space), what);
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Why the entry cannot be compacted; NULL: it can. */
static const char *obstacle(const struct entry *e) {
        if (e->busy != IDLE)
                return "is busy: wait until its change is complete";
        if (!e->ref)
                return "is not resident";
        if (!entry_is_own(e))
                return "is borrowed or shared";
        return e->flags & KVD_ENTRY_APPROX ? "is approximate" : NULL;
}

static bool can_compact(const struct entry *e) {
        return !obstacle(e);
}

static int check_space(struct attachment *a, bool scored) {
        const struct kvd_index *ix = space_index(a->space);

        if (!scored && !kvd_setting_on(ix->settings, KVD_keydiff_on))
                return refuse(a, -EOPNOTSUPP, "keydiff is off");
        if (ix->geometry.rope == KVD_rope_pre)
                return refuse(
                        a, -EOPNOTSUPP,
                        "keys are stored before rotation, and a packed block has no positions");
        if (!scored && ix->geometry.dtype == KVD_dtype_i8)
                return refuse(a, -EOPNOTSUPP, "8-bit values without a scale cannot be compared");
        return MIN(space_summary_fd(a->space, true),
                   0); /* workers need it, also if keydiff is off */
}

static int check_range(struct attachment *a, const struct sequence *q,
                       const struct compact_request *req) {
        if (!req->n || req->first > q->n_entries || req->n > q->n_entries - req->first)
                return refuse(a, -EINVAL, "the range is empty, or beyond the sequence's entries");
        if (req->n > KVD_SYNC_CHANGES)
                return refuse(a, -E2BIG, "at most 1024 entries at once");
        if (!req->keep)
                return refuse(a, -EINVAL, "nothing is kept; drop the entries instead");
        if (q->compact.n || job_pending(&q->compacting))
                return refuse(a, -EBUSY, "the previous request is not complete; wait for it");
        return 0;
}

/* A column of the scores is a token of the range, so none may be left out. Dropped entries have none. */
static int check_entries(struct attachment *a, const struct sequence *q,
                         const struct compact_request *req) {
        for (uint32_t i = req->first; i < req->first + req->n; i++) {
                const struct entry *e = &q->entries[i];

                if (obstacle(e) && !(e->busy == IDLE && e->flags & KVD_ENTRY_DROPPED))
                        return store_refuse(space_store(a->space),
                                            e->busy != IDLE ? -EBUSY : -EINVAL,
                                            "compacting in space '%s' by given scores: entry %u %s",
                                            space_name(a->space), i, obstacle(e));
        }
        return 0;
}

/* Counts the entries of the range that can be compacted, and their tokens. */
static uint32_t count(const struct sequence *q, const struct compact_request *req,
                      uint64_t *tokens) {
        uint32_t entries = 0;

        *tokens = 0;
        for (uint32_t i = req->first; i < req->first + req->n; i++)
                if (can_compact(&q->entries[i])) {
                        entries++;
                        *tokens += q->entries[i].slots;
                }
        return entries;
}

static int check_scores(struct attachment *a, const struct sequence *q,
                        const struct compact_request *req) {
        const struct kvd_index *ix = space_index(a->space);
        const struct kvd_shape *g = &ix->geometry;
        uint64_t tokens;
        uint32_t entries = count(q, req, &tokens),
                 n_to = (uint32_t)DIV_UP(MIN(req->keep, tokens), g->block_tokens);
        uint64_t bytes = tokens * (g->layers / g->layer_groups) * g->kv_heads * sizeof(float);

        if (bytes > req->n_scores * ix->block_bytes)
                return refuse(a, -EINVAL, "the scores do not fit into the blocks");
        if (entries + n_to + req->n_scores > KVD_JOB_ITEMS)
                return refuse(
                        a, -E2BIG,
                        "the blocks to pack, the packed ones and those of the scores are more than 3840");
        if (!blocks_filled_by(a, req->scores, req->n_scores))
                return refuse(
                        a, -ESTALE,
                        "a block of scores is not (or no longer) one that this client is filling");
        return 0;
}

static int check(struct attachment *a, const struct sequence *q,
                 const struct compact_request *req) {
        int r = check_space(a, req->n_scores);

        if (r == 0)
                r = check_range(a, q, req);
        if (r == 0 && req->n_scores)
                r = check_entries(a, q, req);
        return r == 0 && req->n_scores ? check_scores(a, q, req) : r;
}

/* ---- asking ---------------------------------------------------------------------------------- */

static void put_away(struct sequence *q, struct entry *e) {
        e->busy = IDLE;
        entry_drop_room(q, e);
}

static void want(struct sequence *q, uint32_t at, kvd_ref to) {
        struct entry *e = &q->entries[at];

        e->busy = COMPACT_WANTED;
        e->other = to;
        list_push(q, &q->compact, at);
}

static void put_all_away(struct sequence *q) {
        while (q->compact.n)
                put_away(q, &q->entries[list_pop(q, &q->compact)]);
}

/* Takes room for all new blocks, or for none. */
static int take_rooms(struct attachment *a, struct sequence *q, const struct compact_request *req,
                      uint32_t n_to) {
        uint32_t reads = KVD_PIN_READS;

        for (uint32_t i = req->first; i < req->first + req->n; i++) {
                kvd_ref to = 0;

                if (!can_compact(&q->entries[i]))
                        continue;
                if (n_to && !(to = room_take(q->space, q->attachment->arena, &reads)))
                        goto full;
                n_to -= n_to != 0;
                want(q, i, to);
        }
        return 0;
full:
        put_all_away(q);
        space_count(a->space, KVD_SPACE_REFUSED_FULL, 1);
        return refuse(
                a, -ENOBUFS,
                "there is no room for the packed blocks in addition to those that they replace; compact smaller ranges, or raise pool or quota");
}

static void drop_scores(struct sequence *q) {
        free(q->scores);
        q->scores = NULL;
}

static int note_scores(struct attachment *a, struct sequence *q,
                       const struct compact_request *req) {
        size_t bytes = req->n_scores * sizeof *req->scores;

        if (!req->n_scores)
                return 0;
        q->scores = sys->calloc(1, sizeof *q->scores + bytes);
        if (!q->scores)
                return refuse(a, -ENOMEM, "out of memory");
        q->scores->n = req->n_scores;
        memcpy(q->scores->blocks, req->scores, bytes);
        return 0;
}

int sequence_compact(struct attachment *a, uint32_t number, const struct compact_request *req) {
        struct sequence *q = sequence_find(a, number);
        uint32_t bt = space_block_tokens(a->space), entries, n_to;
        uint64_t tokens;
        int r = q ? check(a, q, req) : -ENOENT;

        if (r < 0)
                return r;
        entries = count(q, req, &tokens);
        n_to = (uint32_t)DIV_UP(MIN(req->keep, tokens), bt);
        if (!entries || (tokens <= req->keep && n_to == entries))
                return 0;
        r = note_scores(a, q, req);
        if (r == 0)
                r = take_rooms(a, q, req, n_to);
        if (r < 0) {
                drop_scores(q);
                return r;
        }
        q->keep = (uint32_t)MIN(req->keep, tokens);
        job_ask(&q->compacting);
        return (int)entries;
}

/* ---- the job --------------------------------------------------------------------------------- */

static void add(struct job *job, const struct sequence *q, kvd_ref block, uint32_t at,
                uint32_t flags) {
        struct kvd_job_item *item = job_add(job, block, at);

        if (!item) /* only for blocks that merely add to the anchor */
                return;
        item->position = (int32_t)q->entries[at].position;
        item->n_tokens = q->entries[at].slots;
        item->flags = job->items[job->n_items - 1].flags = flags;
}

static void add_others(struct job *job, const struct sequence *q) {
        for (uint32_t i = q->n_entries; i-- > 0 && job->n_items < KVD_JOB_ITEMS;) {
                const struct entry *e = &q->entries[i];

                if (e->ref && e->busy != COMPACTING && block_current(q->space, e->ref))
                        add(job, q, e->ref, i, 0);
        }
}

static void add_scores(struct job *job, const struct scores *scores) {
        for (uint32_t i = 0; i < scores->n; i++)
                job_add(job, scores->blocks[i], i)->flags = KVD_JOB_SCORES;
        job_param(job, 3, scores->n);
}

static bool scores_are_there(struct sequence *q) {
        if (!q->scores || blocks_filled_by(q->attachment, q->scores->blocks, q->scores->n))
                return true;
        put_all_away(q);
        drop_scores(q);
        return false;
}

/*
 * Writes the blocks that are read, those that are written, and then the scores, or, for the anchor,
 * the rest of the sequence.
 */
static bool write_compact(struct ticket *t, struct job *job) {
        struct sequence *q = t->owner;
        uint32_t slots[KVD_SYNC_CHANGES], n = 0, n_to = 0;

        if (!scores_are_there(q))
                return false;
        while (q->compact.n)
                slots[n++] = list_pop(q, &q->compact);
        for (uint32_t i = 0; i < n; i++) {
                q->entries[slots[i]].busy = COMPACTING;
                add(job, q, q->entries[slots[i]].ref, slots[i], KVD_JOB_SOURCE);
        }
        for (; n_to < n && q->entries[slots[n_to]].other; n_to++) {
                struct entry *e = &q->entries[slots[n_to]];

                add(job, q, e->other, slots[n_to], KVD_JOB_DEST);
                e->other = 0;
        }
        if (q->scores)
                add_scores(job, q->scores);
        else
                add_others(job, q);
        job_param(job, 0, n);
        job_param(job, 1, n_to);
        job_param(job, 2, q->keep);
        job_results(job, 1);
        return n > 0;
}

/* ---- the result ------------------------------------------------------------------------------ */

static uint32_t count_items(const struct job *job, uint32_t flag) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < job->n_items; i++)
                n += job->items[i].flags == flag;
        return n;
}

/* The i-th source's entry gets the i-th new block, if there is one. */
static void offer_all(struct sequence *q, struct job *job) {
        uint32_t n = count_items(job, KVD_JOB_SOURCE), n_to = count_items(job, KVD_JOB_DEST);
        uint32_t bt = space_block_tokens(q->space);

        for (uint32_t i = 0; i < n; i++) {
                uint32_t at = job->items[i].at;
                struct offer offer = {.kind = KVD_CHANGE_COMPACT,
                                      .delta = (int32_t)(n - 1 - i),
                                      .flags = KVD_ENTRY_OWN | KVD_ENTRY_DROPPED};

                if (i < n_to) {
                        offer.block = job->items[n + i].held;
                        offer.flags = KVD_ENTRY_OWN | KVD_ENTRY_COMPACT;
                        offer.slots = MIN(bt, q->keep - i * bt);
                        entry_seal(q, offer.block, at, offer.slots, KVD_DESC_COMPACT);
                }
                change_offer(q, at, &offer);
                if (offer.block)
                        summary_want(q->space, kvd_ref_id(offer.block));
        }
        sync_news(q->space);
}

static void take_back(struct sequence *q, struct job *job, bool again) {
        uint32_t n = count_items(job, KVD_JOB_SOURCE), n_to = count_items(job, KVD_JOB_DEST);

        for (uint32_t i = 0; i < n; i++) {
                if (again)
                        want(q, job->items[i].at, i < n_to ? job->items[n + i].held : 0);
                else
                        q->entries[job->items[i].at].busy = IDLE;
        }
}

static void discard(struct job *job) {
        for (uint32_t i = 0; i < job->n_items; i++)
                if (job->items[i].flags == KVD_JOB_DEST)
                        block_discard(job->space, kvd_ref_id(job->items[i].held));
}

/* A lost worker writes no more, so the next one can fill the same blocks. */
static void settle_compact(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct sequence *q = job->ticket ? job->ticket->owner : NULL;
        bool done = end == JOB_DONE && *(const uint32_t *)results == 0;

        if (q && done)
                offer_all(q, job);
        else if (q)
                take_back(q, job, end == JOB_AGAIN);
        if (!q || (!done && end != JOB_AGAIN))
                discard(job);
        if (q && end != JOB_AGAIN)
                drop_scores(q);
}

static const struct job_kind job_compact = {.number = KVD_JOB_COMPACT,
                                            .rests = true,
                                            .result_bytes = sizeof(uint32_t),
                                            .urgent = true,
                                            .write = write_compact,
                                            .settle = settle_compact};

/* ---- the client's decision ------------------------------------------------------------------- */

/* Sketch and copy of the old contents are useless now; dropped blocks cannot come back. */
static void taken(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];

        if (e->other) {
                entry_take_block(q, e);
                e->slots = e->new_slots;
                q->n_unscored++;
        } else {
                entry_drop_block(q, e);
                space_count(q->space, KVD_SPACE_COMPACTED, 1);
        }
        entry_set_flags(q, e, e->new_flags);
        sketch_leave(q, e, false);
        entry_erase_copy(q, e);
}

static void begin(struct sequence *q) {
        ticket_init(&q->compacting, &job_compact, q->space, q);
}

static bool pending(struct sequence *q) {
        return q->compact.n || job_pending(&q->compacting);
}

static void end(struct sequence *q) {
        job_withdraw(&q->compacting);
        drop_scores(q);
}

const struct hooks compact_hooks = {.sequence_begins = begin,
                                    .sequence_pending = pending,
                                    .sequence_ends = end,
                                    .change = KVD_CHANGE_COMPACT,
                                    .taken = taken};
