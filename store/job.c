/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The queues of tickets, one for each domain, and the jobs in flight. A ticket's kind writes the
 * job when the worker is free, and settles its result. This file decides whose turn it is, holds
 * the blocks that the job names, and checks the worker's reply.
 */

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/job.h"

#define READ_BYTES (UINT64_C(64) << 20)  /* bytes that one job reads: about 20 ms */
#define PIECE_BYTES (UINT64_C(64) << 20) /* bytes that a job processes before it pauses */
#define LEAST_BYTES (UINT64_C(64) << 10) /* added to each job's cost, for jobs that read nothing */
/* 4 TiB: a worker that has not finished a job by then will never do so */
#define MOST_PIECES 65536u
#define SKETCH_PASSES 8u /* passes over a block to add it to a sketch or remove it from one */

static void job_free(struct job *job) {
        if (!job)
                return;
        free(job->items);
        free(job->steps);
        free(job);
}

static struct job *job_new(struct store *store) {
        struct job *job = sys->calloc(1, sizeof *job);

        if (!job)
                return NULL;
        job->store = store;
        job->items = sys->calloc(KVD_JOB_ITEMS, sizeof *job->items);
        job->steps = sys->calloc(KVD_JOB_ITEMS, sizeof *job->steps);
        if (job->items && job->steps)
                return job;
        job_free(job);
        return NULL;
}

int jobs_new(struct store *store) {
        store->jobs.job = job_new(store);
        return store->jobs.job ? 0 : -ENOMEM;
}

void jobs_free(struct store *store) {
        while (store->jobs.spare) {
                struct job *job = store->jobs.spare;

                store->jobs.spare = job->next;
                job_free(job);
        }
        job_free(store->jobs.job);
        store->jobs.job = NULL;
}

/* While a job is at the worker there is a spare one, in case it pauses. */
static bool make_spare(struct jobs *jobs) {
        if (!jobs->spare)
                jobs->spare = job_new(jobs->job->store);
        return jobs->spare;
}

static void put_aside(struct jobs *jobs, struct job *job) {
        job->next = jobs->spare;
        jobs->spare = job;
}

uint32_t job_blocks(const struct job *job) {
        uint64_t n = MIN(MAX(READ_BYTES / space_block_bytes(job->space), 1), KVD_JOB_ITEMS);

        return (uint32_t)(job->kind->result_bytes ?
                                  MIN(n, JOB_RESULT_BYTES / job->kind->result_bytes) :
                                  n);
}

/* ---- queue ----------------------------------------------------------------------------------- */

/*
 * Start-time fair queueing between domains: each domain has a clock that advances by the cost of
 * its jobs, more slowly with a guarantee. The domain whose clock is furthest behind is next. The
 * clock of a domain that had no jobs is set forward to that of the domain served last.
 */
#define WEIGHT_LEAST 64u  /* weight of a domain without a guarantee */
#define WEIGHT_POOL 1024u /* added for a guarantee of the whole pool, else in proportion */

static struct domain *domain_of(struct kvd_list_node *node) {
        return container_of(node, struct domain, jobs.node);
}

/* Behind domains with the same cost, which came first. */
static void queue_domain(struct domain *domain) {
        struct jobs *jobs = &domain->store->jobs;
        struct kvd_list_node *before = NULL, *last;

        kvd_list_remove(&domain->jobs.node);
        for (last = jobs->domains.last; last && domain_of(last)->jobs.cost > domain->jobs.cost;
             last = last->prev)
                before = last;
        kvd_list_insert(&jobs->domains, before, &domain->jobs.node);
}

static void one_more(struct domain *domain) {
        struct jobs *jobs = &domain->store->jobs;

        jobs->n_waiting++;
        if (domain->jobs.node.in)
                return;
        domain->jobs.cost = MAX(domain->jobs.cost, jobs->now);
        queue_domain(domain);
}

static void one_less(struct domain *domain) {
        struct domain_jobs *of = &domain->jobs;

        domain->store->jobs.n_waiting--;
        if (!of->waiting[0].first && !of->waiting[1].first && !of->resting[0] && !of->resting[1])
                kvd_list_remove(&of->node);
}

static void enqueue(struct ticket *t, bool first) {
        struct domain *domain = space_domain(t->space);
        struct kvd_list *queue = &domain->jobs.waiting[t->kind->urgent ? 0 : 1];

        kvd_list_insert(queue, first ? queue->first : NULL, &t->waiting);
        one_more(domain);
}

static void dequeue(struct ticket *t) {
        if (kvd_list_remove(&t->waiting))
                one_less(space_domain(t->space));
}

static uint64_t weight_of(const struct domain *domain) {
        uint64_t pool = MAX(domain->store->config.pool_bytes, 1);

        return WEIGHT_LEAST +
               (uint64_t)((double)MIN(domain->config.guarantee, pool) / (double)pool * WEIGHT_POOL);
}

/*
 * The bytes that a job reads, or one piece if it can pause: go_on charges for each further piece.
 */
static uint64_t cost_of(const struct job *job) {
        uint64_t read = job->n_items * space_block_bytes(job->space);

        return LEAST_BYTES + (job->kind->rests ? MIN(read, PIECE_BYTES) :
                              job->sketch      ? SKETCH_PASSES * read :
                                                 read);
}

static void charge(struct domain *domain, uint64_t bytes) {
        domain->jobs.cost += MAX(bytes * WEIGHT_LEAST / weight_of(domain), 1);
        if (domain->jobs.node.in)
                queue_domain(domain);
}

void job_ask(struct ticket *t) {
        struct store *store = space_store(t->space);

        if (t->waiting.in)
                return;
        enqueue(t, false);
        /* while a job is written or settled, the caller asks for the next one afterwards */
        if (store->jobs.n_waiting == 1 && !store->jobs.at_work)
                jobs_want_worker(store);
}

bool job_pending(const struct ticket *t) {
        return t->waiting.in || t->job;
}

void job_withdraw(struct ticket *t) {
        dequeue(t);
        if (t->job)
                t->job->ticket = NULL;
        t->job = NULL;
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
        job->items[job->n_items++] = (struct job_item){.held = block,
                                                       .at = at,
                                                       .place = KVD_NOWHERE,
                                                       .ordinal = KVD_NO_ORDINAL};
        *item = (struct kvd_job_item){.ref = block,
                                      .row = kvd_ref_id(block),
                                      .to_row = NONE,
                                      .place = KVD_NOWHERE,
                                      .ordinal = KVD_NO_ORDINAL,
                                      .slot = at};
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
        t->job = job;
        job->kind = t->kind;
        job->ticket = t;
        job->space = t->space;
        job->sketch = job->n_items = job->n_tokens = job->looks = job->n_pieces = 0;
        job->n_results = NONE;
        job->to = arguments;
        job->bytes = sizeof *job->to;
        memset(job->to, 0, sizeof *job->to);
}

static void finish(struct job *job, struct store_job *ret) {
        if (job->n_results == NONE)
                job->n_results = job->n_items;
        job->id = ++job->store->jobs.last_id;
        space_changes(job->space);
        job->to->kind = job->kind->number;
        job->to->space = space_number(job->space);
        job->to->id = job->id;
        job->to->n_items = job->n_items;
        job->to->n_tokens = job->n_tokens;
        job->to->n_results = job->n_results;
        job->to->sketch = job->sketch;
        job->to->piece = job->kind->rests ? PIECE_BYTES : 0;
        *ret = (struct store_job){job->id, job->space, job->sketch, job->bytes};
        job->to = NULL;
}

/* limit of a call's effort in items, and effort for a ticket that turns out to have no work */
#define EFFORT 4096u
#define EFFORT_TICKET 256u

static void release(struct job *job) {
        if (job->ticket)
                job->ticket->job = NULL;
        job->ticket = NULL;
}

static void end_holds(struct job *job) {
        for (uint32_t i = 0; i < job->n_items; i++)
                if (job->items[i].held)
                        block_let_go(job->space, kvd_ref_id(job->items[i].held));
        job->n_items = 0;
}

/* The domain whose turn it is; NULL: none waits. */
static struct domain *first_domain(struct jobs *jobs) {
        struct domain *domain = jobs->domains.first ? domain_of(jobs->domains.first) : NULL;

        if (domain)
                jobs->now = domain->jobs.cost;
        return domain;
}

/* Resumes a paused job. A domain has at most one paused urgent job and one other paused job. */
static bool go_on(struct domain *domain, bool urgent, void *arguments, struct store_job *ret) {
        struct jobs *jobs = &domain->store->jobs;
        struct job **resting = &domain->jobs.resting[urgent ? 0 : 1], *job = *resting;

        if (!job)
                return false;
        *resting = NULL;
        put_aside(jobs, jobs->job);
        jobs->job = job;
        *(struct kvd_job *)arguments = (struct kvd_job){.kind = job->kind->number,
                                                        .space = space_number(job->space),
                                                        .id = job->id,
                                                        .turn = job->ticket ? KVD_JOB_GO_ON :
                                                                              KVD_JOB_END,
                                                        .piece = PIECE_BYTES};
        *ret = (struct store_job){job->id, job->space, 0, sizeof(struct kvd_job)};
        one_less(domain);
        charge(domain, PIECE_BYTES);
        return true;
}

/* If there is nothing to do, adds the effort, in items, to *spent. */
static bool write_job(struct job *job, struct ticket *t, void *arguments, uint32_t *spent) {
        bool written;

        dequeue(t);
        begin(job, t, arguments);
        written = t->kind->write(t, job);
        charge(space_domain(job->space), cost_of(job));
        if (written)
                return true;
        *spent += EFFORT_TICKET + job->looks + job->n_items;
        end_holds(job);
        release(job);
        job_news(job->space);
        return false;
}

static bool write_next(struct store *store, void *arguments, struct store_job *ret) {
        struct job *job = store->jobs.job;
        struct domain *domain;
        struct ticket *next;
        uint32_t spent = 0;

        while (spent < EFFORT && (domain = first_domain(&store->jobs))) {
                struct kvd_list *urgent = &domain->jobs.waiting[0], *other = urgent + 1;

                if (go_on(domain, true, arguments, ret))
                        return true;
                if (!urgent->first && go_on(domain, false, arguments, ret))
                        return true;
                next = kvd_list_first(urgent->first ? urgent : other, struct ticket, waiting);
                assert(next);
                if (!write_job(job, next, arguments, &spent))
                        continue;
                finish(job, ret);
                return true;
        }
        return false;
}

bool store_next_job(struct store *store, void *arguments, struct store_job *ret) {
        bool found;

        if (store->jobs.job->id || !make_spare(&store->jobs))
                return false;
        store->jobs.at_work = true;
        found = write_next(store, arguments, ret);
        store->jobs.at_work = false;
        if (!found && store->jobs.n_waiting)
                jobs_want_worker(store); /* later, so that other requests are served, too */
        return found;
}

/* ---- its end --------------------------------------------------------------------------------- */

static void settle(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct ticket *t = job->ticket;

        job->id = 0;
        if (!job->space)
                return;
        space_changes(job->space);
        if (t)
                t->losses = end == JOB_AGAIN ? t->losses + 1 : 0;
        job->store->jobs.at_work = true;
        job->kind->settle(job, end, results, n);
        end_holds(job);
        job->store->jobs.at_work = false;
        release(job);
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

/* The job is resumed when it is its domain's turn again. */
void store_job_rests(struct store *store, uint64_t id) {
        struct jobs *jobs = &store->jobs;
        struct job *job = jobs->job;
        struct domain *domain;

        if (!id || job->id != id)
                return;
        if (!job->space || !job->kind->rests || ++job->n_pieces == MOST_PIECES) {
                settle(job, JOB_FAILED, NULL, 0);
                return;
        }
        domain = space_domain(job->space);
        jobs->job = jobs->spare;
        jobs->spare = jobs->job->next;
        domain->jobs.resting[job->kind->urgent ? 0 : 1] = job;
        one_more(domain);
}

/* ---- its loss -------------------------------------------------------------------------------- */

static struct job *take_resting(struct job **resting) {
        struct job *job = *resting;

        *resting = NULL;
        one_less(space_domain(job->space));
        return job;
}

/* The job was paused when the worker was lost, so this does not count as a loss of the job. */
static void begin_again(struct job **resting) {
        struct job *job = take_resting(resting);
        struct ticket *t = job->ticket;
        uint32_t losses = t ? t->losses : 0;

        settle(job, t ? JOB_AGAIN : JOB_FAILED, NULL, 0);
        if (t)
                t->losses = losses;
        put_aside(&job->store->jobs, job);
}

static void begin_all_again(struct store *store) {
        for (struct domain *d = store->domains; d; d = d->next)
                for (uint32_t i = 0; i < ARRAY_SIZE(d->jobs.resting); i++)
                        if (d->jobs.resting[i])
                                begin_again(&d->jobs.resting[i]);
}

void store_job_lost(struct store *store, uint64_t id) {
        struct job *job = store->jobs.job;

        begin_all_again(store);
        if (!id || job->id != id)
                return;
        if (job->space)
                space_count(job->space, KVD_SPACE_JOBS_LOST, 1);
        settle(job, job->ticket && job->ticket->losses == 0 ? JOB_AGAIN : JOB_FAILED, NULL, 0);
}

static void forget(struct job *job) {
        release(job);
        job->space = NULL;
        job->n_items = 0;
}

void jobs_forget_space(struct space *space) {
        struct jobs *jobs = &space_store(space)->jobs;
        struct job **resting = space_domain(space)->jobs.resting, *job;

        for (uint32_t i = 0; i < ARRAY_SIZE(space_domain(space)->jobs.resting); i++) {
                if (!resting[i] || resting[i]->space != space)
                        continue;
                job = take_resting(&resting[i]);
                job->id = 0;
                forget(job);
                put_aside(jobs, job);
        }
        if (jobs->job->space == space)
                forget(jobs->job);
}

const struct job *job_in_flight(const struct space *space, const struct job *after) {
        const struct jobs *jobs = &space_store(space)->jobs;
        const struct job *all[] = {jobs->job, space_domain(space)->jobs.resting[0],
                                   space_domain(space)->jobs.resting[1]};
        bool past = !after;

        for (uint32_t i = 0; i < ARRAY_SIZE(all); i++) {
                if (past && all[i] && all[i]->id && all[i]->space == space)
                        return all[i];
                past |= all[i] == after;
        }
        return NULL;
}
