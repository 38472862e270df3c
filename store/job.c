/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This is the queue of tickets and the one job in flight. A ticket's kind writes the job when a
 * worker is free and settles its answer; this file keeps the queue, holds the blocks that the job
 * names, and does not trust the answer.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/job.h"

#define READ_BYTES (UINT64_C(64) << 20) /* that one job reads: some 20 ms */

int jobs_new(struct store *store) {
        struct job *job = sys->calloc(1, sizeof *job);

        if (!job)
                return -ENOMEM;
        store->jobs.job = job;
        job->store = store;
        job->items = sys->calloc(KVD_JOB_ITEMS, sizeof *job->items);
        job->steps = sys->calloc(KVD_JOB_ITEMS, sizeof *job->steps);
        return job->items && job->steps ? 0 : -ENOMEM;
}

void jobs_free(struct store *store) {
        if (!store->jobs.job)
                return;
        free(store->jobs.job->items);
        free(store->jobs.job->steps);
        free(store->jobs.job);
        store->jobs.job = NULL;
}

uint32_t job_blocks(const struct job *job) {
        uint64_t n = MIN(MAX(READ_BYTES / job->space->ix->block_bytes, 1), KVD_JOB_ITEMS);

        return (uint32_t)(job->kind->result_bytes ?
                                  MIN(n, JOB_RESULT_BYTES / job->kind->result_bytes) :
                                  n);
}

/* ---- queue ----------------------------------------------------------------------------------- */

static struct kvd_list *queue_of(const struct ticket *t) {
        return &space_store(t->space)->jobs.waiting[t->kind->urgent ? 0 : 1];
}

static void enqueue(struct ticket *t, bool first) {
        struct kvd_list *queue = queue_of(t);

        kvd_list_insert(queue, first ? queue->first : NULL, &t->waiting);
        space_store(t->space)->jobs.n_waiting++;
}

static void dequeue(struct ticket *t) {
        if (kvd_list_remove(&t->waiting))
                space_store(t->space)->jobs.n_waiting--;
}

void job_ask(struct ticket *t) {
        struct store *store = space_store(t->space);

        if (t->waiting.in)
                return;
        enqueue(t, false);
        /* While a job is written or settled, its caller looks for the next one himself. */
        if (store->jobs.n_waiting == 1 && !store->jobs.job->at_work)
                jobs_want_worker(store);
}

bool job_pending(const struct ticket *t) {
        return t->waiting.in || space_store(t->space)->jobs.job->ticket == t;
}

void job_withdraw(struct ticket *t) {
        dequeue(t);
        if (t->space && space_store(t->space)->jobs.job->ticket == t)
                space_store(t->space)->jobs.job->ticket = NULL;
}

uint64_t store_jobs_waiting(const struct store *store) {
        return store->jobs.n_waiting;
}

void store_on_job(struct store *store, void (*called)(void *), void *data) {
        store->jobs.wanted = called;
        store->jobs.data = data;
}

void jobs_want_worker(struct store *store) {
        if (store->jobs.wanted)
                store->jobs.wanted(store->jobs.data);
}

/* ---- writing --------------------------------------------------------------------------------- */

static bool reserve(struct job *job, uint64_t bytes) {
        if (job->bytes + bytes > KVD_JOB_BYTES)
                return false;
        job->bytes += bytes;
        return true;
}

struct kvd_job_item *job_add(struct job *job, kvd_ref block, uint32_t at) {
        struct kvd_job_item *item = (struct kvd_job_item *)((uint8_t *)job->to + job->bytes);

        if (job->n_items == KVD_JOB_ITEMS || !reserve(job, sizeof *item))
                return NULL;
        if (block)
                block_hold(job->space, kvd_ref_id(block));
        job->items[job->n_items++] = (struct job_item){
                .held = block, .at = at, .place = KVD_NOWHERE, .ordinal = KVD_NO_ORDINAL};
        *item = (struct kvd_job_item){.ref = block, .row = kvd_ref_id(block), .to_row = NONE, .place = KVD_NOWHERE,
                                      .ordinal = KVD_NO_ORDINAL, .slot = at};
        return item;
}

bool job_steps(struct job *job, const struct kvd_job_step *steps, uint32_t n) {
        uint8_t *at = (uint8_t *)job->to + job->bytes;

        if (!reserve(job, n * sizeof *steps))
                return false;
        memcpy(at, steps, n * sizeof *steps);
        job->to->n_steps = n;
        return true;
}

bool job_tokens(struct job *job, const uint32_t *tokens, uint32_t n) {
        uint8_t *at = (uint8_t *)job->to + job->bytes;

        if (!reserve(job, n * sizeof *tokens))
                return false;
        memcpy(at, tokens, n * sizeof *tokens);
        job->n_tokens += n;
        return true;
}

uint64_t job_token_room(const struct job *job, uint32_t n_steps) {
        uint64_t used = job->bytes + n_steps * sizeof(struct kvd_job_step);

        return used < KVD_JOB_BYTES ? (KVD_JOB_BYTES - used) / sizeof(uint32_t) : 0;
}

void job_results(struct job *job, uint32_t n) {
        job->n_results = n;
}

void job_param(struct job *job, uint32_t which, uint32_t value) {
        job->to->param[which] = value;
}

static void begin(struct job *job, struct ticket *t, void *arguments) {
        job->kind = t->kind;
        job->ticket = t;
        job->space = t->space;
        job->sketch = job->n_items = job->n_tokens = job->looks = 0;
        job->n_results = NONE;
        job->to = arguments;
        job->bytes = sizeof *job->to;
        memset(job->to, 0, sizeof *job->to);
}

static void finish(struct job *job, struct store_job *ret) {
        if (job->n_results == NONE)
                job->n_results = job->n_items;
        job->id = ++job->store->jobs.last_id;
        job->to->kind = job->kind->number;
        job->to->space = job->space->number;
        job->to->id = job->id;
        job->to->n_items = job->n_items;
        job->to->n_tokens = job->n_tokens;
        job->to->n_results = job->n_results;
        job->to->sketch = job->sketch;
        *ret = (struct store_job){job->id, job->space, job->sketch, job->bytes};
        job->to = NULL;
}

static void end_holds(struct job *job) {
        for (uint32_t i = 0; i < job->n_items; i++)
                if (job->items[i].held)
                        block_let_go(job->space, kvd_ref_id(job->items[i].held));
        job->n_items = 0;
}

static struct ticket *first_waiting(struct store *store) {
        struct ticket *urgent = kvd_list_first(&store->jobs.waiting[0], struct ticket, waiting);

        return urgent ? urgent : kvd_list_first(&store->jobs.waiting[1], struct ticket, waiting);
}

/* of one call, in items: that there is nothing to do for a ticket takes time to find out */
#define EFFORT 4096u
#define EFFORT_TICKET 256u

bool store_next_job(struct store *store, void *arguments, struct store_job *ret) {
        struct job *job = store->jobs.job;
        struct ticket *t;

        if (job->id)
                return false;
        job->at_work = true;
        for (uint32_t spent = 0; spent < EFFORT && (t = first_waiting(store));
             spent += EFFORT_TICKET + job->looks) {
                dequeue(t);
                begin(job, t, arguments);
                if (t->kind->write(t, job)) {
                        finish(job, ret);
                        break;
                }
                job->looks += job->n_items;
                end_holds(job);
                job->ticket = NULL;
                job_news(job->space);
        }
        job->at_work = false;
        if (!job->id && store->jobs.n_waiting)
                jobs_want_worker(store); /* later: others want to be served, too */
        return job->id != 0;
}

/* ---- its end --------------------------------------------------------------------------------- */

static void settle(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct ticket *t = job->ticket;

        job->id = 0;
        if (!job->space)
                return;
        if (t)
                t->losses = end == JOB_AGAIN ? t->losses + 1 : 0;
        job->at_work = true;
        job->kind->settle(job, end, results, n);
        end_holds(job);
        job->at_work = false;
        job->ticket = NULL;
        job_news(job->space);
        if (end != JOB_AGAIN || !t)
                return;
        dequeue(t);
        enqueue(t, true);
}

static bool right_size(const struct job *job, size_t bytes, uint32_t *ret_n) {
        uint64_t n = job->kind->result_bytes ? bytes / job->kind->result_bytes : 0;

        *ret_n = (uint32_t)MIN(n, job->n_results);
        if (!job->kind->result_bytes)
                return bytes == 0;
        return bytes % job->kind->result_bytes == 0 &&
               (n == job->n_results || (job->kind->fewer && n < job->n_results));
}

void store_job_done(struct store *store, uint64_t id, int error, const void *result, size_t bytes) {
        struct job *job = store->jobs.job;
        uint32_t n = 0;

        if (!id || job->id != id)
                return;
        if (error || !right_size(job, bytes, &n))
                settle(job, JOB_FAILED, NULL, 0);
        else
                settle(job, JOB_DONE, result, n);
}

void store_job_lost(struct store *store, uint64_t id) {
        struct job *job = store->jobs.job;

        if (!id || job->id != id)
                return;
        if (job->space)
                space_count(job->space, KVD_SPACE_JOBS_LOST, 1);
        settle(job, job->ticket && job->ticket->losses == 0 ? JOB_AGAIN : JOB_FAILED, NULL, 0);
}

void jobs_forget_space(struct space *space) {
        struct job *job = space_store(space)->jobs.job;

        if (job->space != space)
                return;
        job->space = NULL;
        job->ticket = NULL;
        job->n_items = 0;
}
