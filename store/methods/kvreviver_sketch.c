/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVReviver's sketches, which belong to sequences: how entries get into a sketch and out of it, and
 * how a sketch is repaired if a worker dies while it writes one.
 *
 * A sketch takes the tokens of one epoch; its size is the vague part of the sequence's budget.
 * Sequences never share a sketch. Tokens are identified by ordinals, which are assigned in order
 * and never reused. An entry's tokens are removed with its exact copy (job FORGET). Without a copy
 * they stay as noise, and count in the sketch's load.
 *
 * A sketch takes tokens only up to the load kvreviver.max_load, above which it could not return
 * them. Other blocks leave with only their exact copy, and a sketch that stays empty is freed. A
 * sequence has at most one sketch for each epoch of its tokens, so the memory of sketches is
 * bounded by kvreviver.vague and kvreviver.budget.
 */

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/below/carry.h"
#include "store/hooks.h"
#include "store/methods/methods.h"

/* ---- one sketch ------------------------------------------------------------------------------ */

/* The number of tokens of an epoch: at most the blocks that one REBUILD job can take. */
static uint32_t epoch_tokens(const struct sequence *q) {
        uint32_t bt = space_block_tokens(q->space);
        double most = MIN((double)q->max_blocks, KVD_JOB_ITEMS) * bt;

        return (uint32_t)MIN(MAX(setting(q->space, KVD_kvreviver_epoch), bt), most);
}

static uint32_t cell_floats(const struct kvd_shape *g) {
        return g->layers / g->layer_groups * g->kv_heads * g->head_dim;
}

/* Columns for the vague share of the budget of an epoch's tokens. 0: there is no such share. */
static uint32_t columns(const struct sequence *q, uint32_t rows) {
        double cells = setting(q->space, KVD_kvreviver_vague) *
                       setting(q->space, KVD_kvreviver_budget) * epoch_tokens(q);

        return cells > 0 ? (uint32_t)MAX(cells / rows, 1) : 0;
}

/*
 * Fewer blocks than in other jobs: each may be added or removed row by row, and the job cannot
 * pause.
 */
uint32_t sketch_blocks(const struct sequence *q, const struct job *job) {
        uint32_t rows = (uint32_t)setting(q->space, KVD_kvreviver_rows), n = job_blocks(job);

        return columns(q, rows) ? MAX(n / (1 + rows), 1) : n;
}

static int write_header(const struct sketch *s, uint32_t floats) {
        struct kvd_sketch_header header = {.rows = s->rows,
                                           .columns = s->columns,
                                           .cell_floats = floats};
        void *at;
        int r;

        if (sys->getrandom(&header.salt, sizeof header.salt, 0) != (ssize_t)sizeof header.salt)
                return -EIO;
        r = shared_file_map(s->fd, sizeof header, PROT_READ | PROT_WRITE, &at);
        if (r < 0)
                return r;
        memcpy(at, &header, sizeof header);
        munmap(at, sizeof header);
        return 0;
}

static int make_memory(struct sketch *s, uint32_t floats) {
        struct shared_file file;
        int r = shared_file_new("kvd-sketch", s->bytes, 0, &file);

        if (r < 0)
                return r;
        s->fd = file.fd;
        return write_header(s, floats);
}

/* Frees the sketch; its memory is freed in pieces, as idle work. */
static void sketch_close(struct space *space, struct sketch *s) {
        s->next = sketches_of(space)->dead;
        sketches_of(space)->dead = s;
        space_is_busy(space);
}

#define BURY_BYTES (UINT64_C(2) << 20) /* freed in one piece: about half a millisecond */

static bool bury_one(struct space *space) {
        struct sketch *s = sketches_of(space)->dead;
        uint64_t n = s ? MIN(s->bytes, BURY_BYTES) : 0;

        if (!s)
                return false;
        s->bytes -= n;
        spill_discharge(space, n);
        if (s->bytes) {
                sys->fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)s->bytes,
                               (off_t)n);
                return true;
        }
        sketches_of(space)->dead = s->next;
        closep(&s->fd);
        free(s);
        account_discharge(space, KVD_COST_sketches, 1);
        account_discharge(space, KVD_COST_files, 1);
        return true;
}

static uint64_t sketch_bytes(const struct sequence *q) {
        uint32_t rows = (uint32_t)setting(q->space, KVD_kvreviver_rows);

        return ALIGN_UP(kvd_sketch_bytes(rows, columns(q, rows),
                                         cell_floats(space_geometry(q->space))),
                        sys_page_bytes());
}

bool sketch_fits(const struct sequence *q, uint64_t bytes) {
        return account_room(space_domain(q->space), KVD_COST_sketches) &&
               account_room(space_domain(q->space), KVD_COST_files) &&
               carry_spares(q->space, bytes);
}

static struct sketch *sketch_new(struct sequence *q) {
        uint32_t rows = (uint32_t)setting(q->space, KVD_kvreviver_rows), b = columns(q, rows);
        uint64_t bytes = sketch_bytes(q);
        struct sketch *s;

        if (!b || !sketch_fits(q, bytes) || !spill_charge(q->space, bytes))
                return NULL;
        s = sys->calloc(1, sizeof *s);
        if (!s) {
                spill_discharge(q->space, bytes);
                return NULL;
        }
        account_add(q->space, KVD_COST_sketches, 1);
        account_add(q->space, KVD_COST_files, 1);
        *s = (struct sketch){.next = q->sketches,
                             .fd = -1,
                             .bytes = bytes,
                             .rows = rows,
                             .columns = b};
        if (make_memory(s, cell_floats(space_geometry(q->space))) < 0) {
                sketch_close(q->space, s);
                return NULL;
        }
        s->number = sketches_of(q->space)->last_number =
                sketches_of(q->space)->last_number % (UINT32_MAX - 1) + 1;
        return q->sketches = s;
}

struct sketch *sketch_find(struct sequence *q, uint32_t number) {
        struct sketch *s = q->sketch_found;

        if (s && s->number == number)
                return s;
        for (s = q->sketches; s && s->number != number; s = s->next)
                ;
        q->sketch_found = s ?: q->sketch_found;
        return s;
}

static bool answers_for(const struct sequence *q, double n_tokens, double cells) {
        return n_tokens <= setting(q->space, KVD_kvreviver_max_load) * cells;
}

bool sketch_answers(const struct sequence *q, const struct sketch *s) {
        return !s->broken && answers_for(q, s->n_tokens, (double)s->rows * s->columns);
}

static bool has_ordinals(const struct sequence *q, const struct sketch *s, uint32_t n_tokens) {
        return s->n_ordinals + n_tokens <= epoch_tokens(q);
}

/*
 * Is a new sketch useful and due? It is due if the newest one has used up its epoch, or if there
 * are fewer sketches than epochs.
 */
static bool wants_another(const struct sequence *q, uint32_t n_sketches, uint32_t n_tokens) {
        uint32_t rows = (uint32_t)setting(q->space, KVD_kvreviver_rows);

        if (!answers_for(q, n_tokens, (double)rows * columns(q, rows)))
                return false;
        return !q->sketches || !has_ordinals(q, q->sketches, n_tokens) ||
               n_sketches < DIV_UP(q->n_tokens, epoch_tokens(q));
}

/* One that takes the tokens. NULL: *another says whether a new one would be made. */
static struct sketch *sketch_with_room(const struct sequence *q, uint32_t n_tokens, bool *another) {
        uint32_t n = 0;

        for (struct sketch *s = q->sketches; s; s = s->next, n++)
                if (!s->broken && has_ordinals(q, s, n_tokens) &&
                    answers_for(q, (double)s->n_tokens + n_tokens, (double)s->rows * s->columns))
                        return s;
        *another = wants_another(q, n, n_tokens);
        return NULL;
}

struct sketch *sketch_for(struct sequence *q, uint32_t n_tokens) {
        bool another = false;
        struct sketch *s = sketch_with_room(q, n_tokens, &another);

        return another ? sketch_new(q) : s;
}

uint64_t sketch_wanted(const struct sequence *q, uint32_t n_tokens) {
        bool another = false;

        sketch_with_room(q, n_tokens, &another);
        return another ? sketch_bytes(q) : 0;
}

static void sketch_free_if_empty(struct sequence *q, struct sketch *s) {
        struct sketch **at = &q->sketches;

        if (s->n_entries)
                return;
        while (*at && *at != s)
                at = &(*at)->next;
        assert(*at);
        *at = s->next;
        if (q->sketch_found == s)
                q->sketch_found = NULL;
        sketch_close(q->space, s);
}

void sketch_drop_unused(struct sequence *q, struct sketch *s) {
        if (s)
                sketch_free_if_empty(q, s);
}

static void close_all(struct sequence *q) {
        while (q->sketches) {
                struct sketch *s = q->sketches;

                q->sketches = s->next;
                sketch_close(q->space, s);
        }
        q->sketch_found = NULL;
}

int space_sketch_fd(struct space *space, uint32_t number, uint64_t *bytes) {
        for (uint32_t i = 0; i < KVD_MAX_SEQUENCES; i++) {
                struct sequence *q = sequences_of(space)->at[i];
                struct sketch *s = q ? sketch_find(q, number) : NULL;

                if (!s)
                        continue;
                *bytes = s->bytes;
                return s->fd;
        }
        return store_refuse(space_store(space), -ENOENT, "space '%s' has no sketch %u",
                            space_name(space), number);
}

/* ---- an entry and its sketch ----------------------------------------------------------------- */

void sketch_enter(struct sequence *q, struct entry *e, struct sketch *s) {
        uint32_t at = (uint32_t)(e - q->entries);

        e->sketch = s->number;
        e->ordinal = s->n_ordinals;
        e->sketch_prev = NONE;
        e->sketch_next = s->n_entries ? s->first : NONE;
        if (e->sketch_next != NONE)
                q->entries[e->sketch_next].sketch_prev = at;
        s->first = at;
        s->n_ordinals += e->n_tokens;
        s->n_tokens += e->n_tokens;
        s->n_entries++;
}

static void leave_list(struct sequence *q, struct entry *e, struct sketch *s) {
        if (e->sketch_next != NONE)
                q->entries[e->sketch_next].sketch_prev = e->sketch_prev;
        *(e->sketch_prev == NONE ? &s->first :
                                   &q->entries[e->sketch_prev].sketch_next) = e->sketch_next;
        s->n_entries--;
}

void sketch_leave(struct sequence *q, struct entry *e, bool taken_out) {
        struct sketch *s = e->ordinal == KVD_NO_ORDINAL ? NULL : sketch_find(q, e->sketch);

        e->ordinal = KVD_NO_ORDINAL;
        e->sketch = 0;
        if (!s)
                return;
        if (taken_out)
                s->n_tokens -= e->n_tokens;
        leave_list(q, e, s);
        sketch_free_if_empty(q, s);
}

static bool deletes_estimates(const struct space *space) {
        return setting(space, KVD_kvreviver_delete) == 0;
}

/*
 * The entry is resident and exact: removes its tokens from the sketch, if that is possible. Its
 * copy stays until its memory is needed (entry_copies.c), so that the entry can leave again without
 * a job.
 */
void entry_forget_sketch(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];
        bool in_sketch = e->ordinal != KVD_NO_ORDINAL;

        if (in_sketch && !sketch_find(q, e->sketch)->broken &&
            (e->place != KVD_NOWHERE || deletes_estimates(q->space))) {
                e->busy = FORGET_WANTED;
                list_push(q, &q->forget, at);
                job_ask(&q->forgetting);
                return;
        }
        sketch_leave(q, e, false);
        copies_clean(q->space);
}

/* ---- FORGET: removing tokens from a sketch --------------------------------------------------- */

static void forgotten(struct sequence *q, struct entry *e, bool taken_out) {
        sketch_leave(q, e, taken_out);
        e->busy = IDLE;
        copies_clean(q->space);
}

static bool add_forget(struct sequence *q, uint32_t at, struct job *job) {
        struct entry *e = &q->entries[at];
        struct kvd_job_item *item = job_add(job, 0, at);
        bool estimate = deletes_estimates(q->space);

        if (!item)
                return false;
        item->row = NONE;
        item->checksum = e->checksum;
        item->place = estimate ? NONE : e->place;
        item->flags = estimate ? KVD_ENTRY_APPROX : 0;
        item->ordinal = e->ordinal;
        item->position = (int32_t)e->position;
        item->n_tokens = e->n_tokens;
        e->busy = FORGETTING;
        return true;
}

/* Writes entries of one sketch, in order of arrival. */
static bool write_forget(struct ticket *t, struct job *job) {
        struct sequence *q = t->owner;
        uint32_t room = sketch_blocks(q, job), at;

        while (job->n_items < room && (at = list_pop(q, &q->forget)) != NONE) {
                struct entry *e = &q->entries[at];
                struct sketch *s = e->ordinal == KVD_NO_ORDINAL ? NULL : sketch_find(q, e->sketch);

                if (!s || s->broken) { /* REBUILD leaves it out */
                        forgotten(q, e, false);
                        continue;
                }
                if ((job->sketch && job->sketch != s->number) || !add_forget(q, at, job)) {
                        list_push_first(q, &q->forget, at);
                        break;
                }
                job->sketch = s->number;
        }
        if (q->forget.n)
                job_ask(t);
        return job->n_items > 0;
}

static void settle_forget(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct sequence *q = job->ticket ? job->ticket->owner : NULL;
        const uint32_t *error = results;

        if (!q)
                return;
        if (end != JOB_DONE)
                sketch_broken(q, sketch_find(q, job->sketch));
        for (uint32_t i = 0; i < job->n_items; i++)
                forgotten(q, &q->entries[job->items[i].at], end == JOB_DONE && error[i] == 0);
}

static const struct job_kind job_forget = {.number = KVD_JOB_FORGET,
                                           .result_bytes = sizeof(uint32_t),
                                           .write = write_forget,
                                           .settle = settle_forget};

/* ---- REBUILD: after a worker was lost while it wrote a sketch -------------------------------- */

void sketch_broken(struct sequence *q, struct sketch *s) {
        s->broken = true;
        job_ask(&q->rebuilding);
}

static uint32_t without_sketch(const struct entry *e, uint32_t flags) {
        uint32_t kept = flags &
                        ~(uint32_t)(KVD_ENTRY_VAGUE | KVD_ENTRY_SPILLED | KVD_ENTRY_DROPPED);

        return kept | (e->place != KVD_NOWHERE ? KVD_ENTRY_SPILLED : KVD_ENTRY_DROPPED);
}

/*
 * The entry's contents in the sketch are lost. If its block has left, the client is told. If it was
 * about to leave without a copy, it stays, unless the client was already told.
 */
static void degrade(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];

        sketch_leave(q, e, false);
        if (e->busy == OFFERED && e->change == KVD_CHANGE_LEAVE &&
            (e->new_flags & KVD_ENTRY_VAGUE)) {
                if (e->place == KVD_NOWHERE && change_withdraw(q, at))
                        return;
                e->new_flags = (uint16_t)without_sketch(e, e->new_flags);
        } else if (!e->ref && (e->flags & KVD_ENTRY_VAGUE)) {
                entry_set_flags(q, e, without_sketch(e, e->flags));
                e->untold = true;
                change_tell(q, at);
        }
}

/* Only with a copy in memory: an entry whose copy is in a file can be revived exactly. */
static bool can_be_rebuilt(const struct space *space, const struct entry *e) {
        return e->place != KVD_NOWHERE && place_is_here(space, e->place) &&
               e->busy != FORGET_WANTED;
}

static struct sketch *first_broken(struct sequence *q) {
        struct sketch *s = q->sketches;

        while (s && !s->broken)
                s = s->next;
        return s;
}

static void add_rebuild(struct sequence *q, uint32_t at, struct job *job) {
        struct entry *e = &q->entries[at];
        struct kvd_job_item *item = job_add(job, 0, at);

        if (!item) {
                degrade(q, at);
                return;
        }
        item->row = NONE;
        item->place = e->place;
        item->checksum = e->checksum;
        item->ordinal = e->ordinal;
        item->position = (int32_t)e->position;
        item->n_tokens = e->n_tokens;
}

static bool write_rebuild(struct ticket *t, struct job *job) {
        struct sequence *q = t->owner;
        struct sketch *s = first_broken(q);
        uint32_t number = s ? s->number : 0, next;

        if (!s)
                return false;
        next = s->n_entries ? s->first : NONE;
        s->n_entries++; /* so that it is not freed while entries leave it */
        for (uint32_t i = next; i != NONE; i = next) {
                struct entry *e = &q->entries[i];

                next = e->sketch_next;
                if (can_be_rebuilt(q->space, e))
                        add_rebuild(q, i, job);
                else if (e->busy == FORGET_WANTED)
                        sketch_leave(q, e, false);
                else
                        degrade(q, i);
        }
        s->n_entries--;
        sketch_free_if_empty(q, s);
        job->sketch = number;
        if (q->changes.n)
                sync_news(q->space);
        if (!job->n_items && first_broken(q))
                job_ask(t);
        return job->n_items > 0;
}

static void rebuilt(struct job *job, struct sequence *q, const uint32_t *error) {
        struct sketch *s = sketch_find(q, job->sketch);

        if (!s)
                return;
        s->n_tokens = 0;
        s->n_entries++;
        s->broken = error == NULL;
        for (uint32_t i = 0; i < job->n_items; i++) {
                struct entry *e = &q->entries[job->items[i].at];

                s->n_tokens += e->n_tokens;
                if (error && error[i] == 0)
                        continue;
                s->n_tokens -= e->n_tokens;
                degrade(q, job->items[i].at);
        }
        s->n_entries--;
        sketch_free_if_empty(q, s);
}

static void settle_rebuild(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct sequence *q = job->ticket ? job->ticket->owner : NULL;

        if (!q || end == JOB_AGAIN)
                return;
        rebuilt(job, q, end == JOB_DONE ? results : NULL);
        sync_news(q->space);
        if (first_broken(q))
                job_ask(&q->rebuilding);
        if (q->cool.n)
                job_ask(&q->cooling);
}

static const struct job_kind job_rebuild = {.number = KVD_JOB_REBUILD,
                                            .rests = true,
                                            .result_bytes = sizeof(uint32_t),
                                            .urgent = true,
                                            .write = write_rebuild,
                                            .settle = settle_rebuild};

/* ---- life ------------------------------------------------------------------------------------ */

static int begin_space(struct space *space) {
        space->parts.sketches = sys->calloc(1, sizeof *sketches_of(space));
        return sketches_of(space) ? 0 : -ENOMEM;
}

static void end_space(struct space *space) {
        while (sketches_of(space) && bury_one(space))
                ;
        free(sketches_of(space));
}

static void begin(struct sequence *q) {
        ticket_init(&q->forgetting, &job_forget, q->space, q);
        ticket_init(&q->rebuilding, &job_rebuild, q->space, q);
}

static bool pending(struct sequence *q) {
        return job_pending(&q->forgetting) || job_pending(&q->rebuilding);
}

static void end(struct sequence *q) {
        job_withdraw(&q->forgetting);
        job_withdraw(&q->rebuilding);
        close_all(q);
}

const struct hooks kvreviver_sketch_hooks = {.space_begins = begin_space,
                                             .idle = bury_one,
                                             .space_buried = bury_one,
                                             .space_ends = end_space,
                                             .sequence_begins = begin,
                                             .sequence_pending = pending,
                                             .sequence_ends = end};
