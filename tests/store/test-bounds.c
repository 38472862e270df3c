/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The processor time of one call into the store, or of one piece of idle work, in the worst state
 * that default limits allow. The test measures its own processor time, and takes the shortest time
 * of each piece over all runs. The budget is that of a fast machine, times the slowness of this
 * one. So the test fails on neither a busy nor a slow machine. tests/daemon/hostile/test-budget.c
 * does the same for whole requests.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/kvd.h"
#include "client/kvd_methods.h"
#include "ipc/base/enums.h"
#include "ipc/base/job.h"
#include "ipc/base/key.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/below/below.h"
#include "store/below/place.h"
#include "store/cache/cache.h"
#include "store/remote_tier.h"
#include "store/sequence/sequence.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/suite.h"
#include "tests/lib/yard.h"

#define BUDGET_US (SANITIZED ? 60000u : 3000u) /* on a fast machine */
#define MOST_RUNS 60 /* the kernel may charge the work of another process to this one */
#define TINY 64u     /* bytes of a block */

static struct store *store;
static struct domain *domain;

/* ---- time ------------------------------------------------------------------------------------ */

#define PIECES (1u << 20)

/* The shortest time of each piece over all runs, which do the same. */
static struct piece {
        uint32_t ns;
        const char *what;
} pieces[PIECES];
static uint32_t n_pieces, n_known; /* in this run, and in earlier ones */
static uint64_t began;

static uint64_t own_time_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void piece_begins(void) {
        began = own_time_ns();
}

static void piece_ends(const char *what) {
        uint32_t ns = (uint32_t)MIN(own_time_ns() - began, UINT32_MAX);
        struct piece *p = &pieces[n_pieces++];

        ck_assert_uint_le(n_pieces, PIECES);
        *p = (struct piece){n_pieces <= n_known ? MIN(p->ns, ns) : ns, what};
}

#define PIECE(...) (piece_begins(), (void)(__VA_ARGS__), piece_ends(#__VA_ARGS__))

static const struct piece *dearest(void) {
        const struct piece *most = pieces;

        for (const struct piece *p = pieces; p < pieces + n_pieces; p++)
                most = p->ns > most->ns ? p : most;
        return most;
}

/* ---- the verdict ----------------------------------------------------------------------------- */

static void within_budget(const char *what, void (*run)(void)) {
        const struct piece *most;
        uint32_t budget_us;
        int runs = 0;

        n_known = 0;
        do {
                n_pieces = 0;
                run();
                n_known = MAX(n_known, n_pieces);
                most = dearest();
                budget_us = (uint32_t)(BUDGET_US * slowness());
        } while (most->ns / 1000 > budget_us && ++runs < MOST_RUNS);
        printf("%-40s %8u us of %u pieces, %u are allowed: %s\n", what, most->ns / 1000, n_pieces,
               budget_us, most->what);
        ck_assert_msg(most->ns / 1000 <= budget_us, "%s: %u us in %s, %u are allowed", what,
                      most->ns / 1000, most->what, budget_us);
}

/* ---- a store of tiny blocks ------------------------------------------------------------------ */

static int to_close[64];
static uint32_t n_to_close;

/* The daemon closes descriptors in another thread. */
static void close_later(void *data, int fd) {
        to_close[n_to_close++] = fd;
}

static void close_store(void) {
        store = store_free(store);
        while (n_to_close)
                close(to_close[--n_to_close]);
}

static uint64_t spill_bytes; /* of the next store */

static void open_store(uint64_t pool_bytes, uint64_t segment_bytes) {
        struct store_config c = {.pool_bytes = pool_bytes,
                                 .segment_bytes = segment_bytes,
                                 .pages = STORE_PAGES_SMALL,
                                 .overhead_bytes = UINT64_C(64) << 30,
                                 .spill_bytes = spill_bytes,
                                 .max_attachments = 256};

        ck_assert_int_eq(store_new(&c, &store), 0);
        store_on_close(store, close_later, NULL);
        ck_assert_int_eq(store_domain(store,
                                      &(struct domain_config){.name = "d",
                                                              .client_quota = UINT64_MAX},
                                      &domain),
                         0);
}

static struct space *make_space_of(const char *name, uint64_t max_blocks, uint32_t layers,
                                   uint32_t head_dim) {
        struct space_spec spec = {.geometry = {.layers = layers,
                                               .kv_heads = 1,
                                               .head_dim = head_dim,
                                               .block_tokens = 1,
                                               .dtype = KVD_F32,
                                               .vocab = UINT32_MAX},
                                  .options = {.max_blocks = max_blocks}};
        struct space *space;
        bool created;

        snprintf(spec.name, sizeof spec.name, "%s", name);
        ck_assert_msg(space_open(domain, &spec, true, &space, &created) == 0, "%s",
                      store_why(store));
        return space;
}

static struct space *make_space(const char *name, uint64_t max_blocks) {
        return make_space_of(name, max_blocks, 1, TINY / 8);
}

static struct attachment *attach(struct space *space) {
        static uint64_t processes = 1000;
        struct attachment *a;

        ck_assert_msg(attachment_new(space, NULL, processes++, NULL, &a) == 0, "%s",
                      store_why(store));
        return a;
}

static void idle_pieces(void) {
        bool more = true;

        while (more)
                PIECE(more = store_idle(store));
}

/* ---- memory ---------------------------------------------------------------------------------- */

#define POOL (UINT64_C(64) << 20)
#define MANY 4096u

static kvd_ref refs[POOL / TINY];

/* Allocates up to `most` blocks. Returns how many. */
static uint32_t fill(struct attachment *a, uint32_t most) {
        uint32_t n = 0;
        int r = 1;

        while (n < most && r >= 0) {
                PIECE(r = space_allocate(a, MIN(most - n, MANY), refs + n));
                n += r > 0 ? (uint32_t)r : 0;
        }
        return n;
}

/* All blocks of a space are free, and another space needs its memory. */
static void taken_by_another(void) {
        struct space *donor, *other;
        struct attachment *a, *b;
        uint32_t n;

        open_store(POOL, POOL / 2);
        donor = make_space("donor", 0);
        other = make_space("other", 0);
        a = attach(donor);
        b = attach(other);
        n = fill(a, UINT32_MAX);
        ck_assert_uint_eq(n, POOL / TINY);
        ck_assert_uint_eq(space_release(a, refs, n), n);
        ck_assert_uint_eq(fill(b, 1), 1);
        ck_assert_uint_eq(fill(b, MANY), MANY);
        idle_pieces();
        close_store();
}

START_TEST(a_segment_of_tiny_blocks_changes_hands_in_pieces) {
        within_budget("memory of one space becomes another's", taken_by_another);
}
END_TEST

/* A space is deleted, and another one needs its memory before it is given back. */
static void taken_of_deleted(void) {
        struct space *gone, *other;
        struct attachment *a;

        open_store(POOL, POOL / 2);
        gone = make_space("gone", 0);
        other = make_space("other", 0);
        a = attach(gone);
        ck_assert_uint_eq(fill(a, UINT32_MAX), POOL / TINY);
        PIECE(space_delete(gone, true));
        ck_assert_uint_eq(fill(attach(other), MANY), MANY);
        idle_pieces();
        close_store();
}

/* ---- descriptors of 16 KiB ------------------------------------------------------------------- */

#define WIDE 4096u /* tokens of a block; its contents are tiny, so that there are many */
#define WIDE_BLOCKS 8192u

static struct space *make_space_of_large_descriptors(void) {
        struct space_spec spec = {.name = "s",
                                  .geometry = {.block_bytes = TINY,
                                               .block_tokens = WIDE,
                                               .layer_groups = 1,
                                               .layout = "test.v1"}};
        struct space *space;
        bool created;

        ck_assert_msg(space_open(domain, &spec, true, &space, &created) == 0, "%s",
                      store_why(store));
        return space;
}

/* As many blocks as a message has tokens for. */
static void seal_some(struct attachment *a, const kvd_ref *blocks, uint32_t salt) {
        static uint32_t tokens[3 * WIDE];
        kvd_ref now[3];
        struct seal_request q = {.root = salt,
                                 .n_blocks = 3,
                                 .blocks = blocks,
                                 .n_tokens = 3 * WIDE,
                                 .tokens = tokens};
        int r;

        PIECE(r = space_seal(a, &q, now));
        ck_assert_msg(r == 0, "%s", store_why(store));
}

static void blocks_of_many_tokens(void) {
        struct space *space;
        struct attachment *a;
        bool more = true;
        uint32_t n;

        open_store(WIDE_BLOCKS * TINY, WIDE_BLOCKS * TINY);
        space = make_space_of_large_descriptors();
        a = attach(space);
        n = fill(a, UINT32_MAX);
        ck_assert_uint_eq(n, WIDE_BLOCKS);
        for (uint32_t i = 0; i + 3 <= n; i += 3)
                seal_some(a, refs + i, i);
        idle_pieces();
        while (more)
                PIECE(space_evict(space, 0, KVD_ROOT, &more));
        ck_assert_uint_ge(fill(a, UINT32_MAX), n - n % 3);
        PIECE(space_delete(space, true));
        idle_pieces();
        close_store();
}

START_TEST(large_descriptors_are_written_in_pieces) {
        within_budget("blocks of 4096 tokens", blocks_of_many_tokens);
}
END_TEST

START_TEST(memory_of_a_deleted_space_is_had_in_pieces) {
        within_budget("memory of a deleted space", taken_of_deleted);
}
END_TEST

/* Seals n blocks as one chain. semaphore: the one that each block waits for, or 0 for none. */
static void seal_chain(struct attachment *a, uint32_t n, uint32_t semaphore) {
        static const uint32_t tokens[MANY];
        kvd_ref sealed[MANY];
        struct seal_request q = {.tokens = tokens,
                                 .semaphore = semaphore,
                                 .semaphore_value = semaphore};

        for (uint32_t at = 0; at < n; at += q.n_blocks) {
                q.blocks = refs + at;
                q.n_tokens = q.n_blocks = MIN(n - at, MANY);
                ck_assert_msg(space_seal(a, &q, sealed) == 0, "%s", store_why(store));
                q.parent = sealed[q.n_blocks - 1];
        }
}

/* Chains are evicted from their ends, and finding the end takes several calls. */
static void deep_chain_makes_room(void) {
        struct space *donor, *other;
        struct attachment *a;

        open_store(POOL, POOL);
        donor = make_space("donor", 0);
        other = make_space("other", 0);
        a = attach(donor);
        seal_chain(a, fill(a, UINT32_MAX), 0);
        ck_assert_uint_eq(fill(attach(other), 1), 1);
        close_store();
}

START_TEST(a_segment_of_a_deep_chain_is_emptied_in_pieces) {
        within_budget("a chain of a million makes room", deep_chain_makes_room);
}
END_TEST

/* ---- servers --------------------------------------------------------------------------------- */

static uint32_t prefix[KVD_WHOLE_TOKENS];

static struct space *whole_space(void) {
        struct space_spec spec = {.name = "w",
                                  .geometry = {.block_bytes = TINY,
                                               .block_tokens = KVD_WHOLE_TOKENS / KVD_WHOLE_BLOCKS,
                                               .layout = "l"},
                                  .options = {.kind = KVD_kind_bidirectional}};
        struct space *space;
        bool created;

        ck_assert_msg(space_open(domain, &spec, true, &space, &created) == 0, "%s",
                      store_why(store));
        return space;
}

static void seal_prefix(struct attachment *a) {
        static kvd_ref blocks[KVD_WHOLE_BLOCKS];
        struct seal_request q = {.n_blocks = KVD_WHOLE_BLOCKS,
                                 .blocks = blocks,
                                 .n_tokens = KVD_WHOLE_TOKENS,
                                 .tokens = prefix,
                                 .root = KVD_WHOLE_TOKENS};

        for (uint32_t i = 0; i < KVD_WHOLE_TOKENS; i++)
                prefix[i] = i;
        for (uint32_t n = 0; n < KVD_WHOLE_BLOCKS;)
                n += (uint32_t)space_allocate(a, KVD_WHOLE_BLOCKS - n, blocks + n);
        q.prefix_key = kvd_key_prefix(space_index(a->space), prefix, KVD_WHOLE_TOKENS);
        ck_assert_msg(space_seal(a, &q, blocks) == 0, "%s", store_why(store));
}

/* Returns the number of blocks moved. */
static uint32_t serve_servers(bool have) {
        static struct kvd_key names[1 + KVD_WHOLE_BLOCKS];
        static int32_t errors[KVD_REMOTE_ITEMS];
        const struct store_remote_question *q = NULL;
        uint32_t moved = 0;
        bool later = true;

        for (uint32_t i = 0; i < KVD_WHOLE_BLOCKS && (q || later); i++) {
                store_idle(store);
                PIECE(q = store_remote_next(store, &later));
                if (q && q->what == STORE_REMOTE_FIND)
                        PIECE(store_remote_found(store, names, have ? 1 + KVD_WHOLE_BLOCKS : 1));
                else if (q && q->what == STORE_REMOTE_PUT)
                        PIECE(moved += q->n, store_remote_put(store, names, errors, q->n));
                else if (q)
                        PIECE(moved += q->n, store_remote_got(store, errors, NULL, q->n));
        }
        return moved;
}

/* Many clients wait for the same prefix, and all but one find it resident then. */
static void a_prefix_goes_and_comes(void) {
        struct fetch_request q = {.tokens = prefix, .n_tokens = KVD_WHOLE_TOKENS};
        struct attachment *a;
        bool more = true;
        int fd;

        open_store(POOL, POOL);
        ck_assert_int_eq(store_remote_begin(store, &(struct store_remote_config){0}), 0);
        a = attach(whole_space());
        store_remote_servers(store, 1, 0, "");
        seal_prefix(a);
        ck_assert_uint_eq(serve_servers(false), KVD_WHOLE_BLOCKS);
        while (more)
                space_evict(a->space, MANY, KVD_ROOT, &more);
        for (uint32_t i = 0; i < 100; i++) {
                PIECE(space_fetch(a, &q, &fd));
                close(fd);
        }
        ck_assert_uint_eq(serve_servers(true), KVD_WHOLE_BLOCKS);
        ck_assert_int_eq(store->below->queue, 0);
        close_store();
}

START_TEST(a_long_prefix_goes_to_servers_and_comes_in_pieces) {
        within_budget("a prefix of 8,192 blocks goes and comes", a_prefix_goes_and_comes);
}
END_TEST

/* ---- sequences ------------------------------------------------------------------------------- */

#define LONG 500000u /* entries */

static struct space *space;
static struct attachment *a;
static uint32_t sequence;
static uint32_t numbers[KVD_SYNC_CHANGES];

static void set(const char *key, const char *value) {
        ck_assert_msg(space_set(space, key, value) == 0, "%s", store_why(store));
}

/* A space that one sequence's blocks nearly fill. */
static void open_long_sequence(void) {
        static const uint32_t tokens[MANY];
        struct append_request q = {.own = true, .tokens = tokens};
        uint32_t first;
        int r;

        open_store(POOL, POOL);
        space = make_space("long", LONG);
        a = attach(space);
        ck_assert_int_eq(sequence_open(a, LONG, &sequence), 0);
        ck_assert_uint_eq(fill(a, LONG), LONG);
        for (uint32_t at = 0; at < LONG; at += q.n_blocks) {
                q.blocks = refs + at;
                q.n_tokens = q.n_blocks = MIN(LONG - at, MANY);
                PIECE(r = sequence_append(a, sequence, &q, &first));
                ck_assert_int_eq(r, 0);
        }
}

/* The client takes what is offered. */
static uint32_t sync_once(uint32_t n) {
        static struct kvd_change changes[KVD_SYNC_CHANGES];
        struct sequence_report report;
        int r;

        for (uint32_t i = 0; i < n; i++)
                numbers[i] = 1;
        PIECE(r = sequence_sync(a, sequence, numbers, n, changes));
        PIECE(sequence_report(a, sequence, &report));
        ck_assert_int_ge(r, 0);
        return (uint32_t)r;
}

static void sync_all(void) {
        for (uint32_t n = sync_once(0); n; n = sync_once(n))
                ;
}

static struct space_usage usage_of_space(void) {
        struct space_usage usage;

        space_get_usage(space, &usage);
        return usage;
}

static uint64_t counter(enum kvd_space_counter counted) {
        return atomic_load(&space_index(space)->counters[counted]);
}

/* The daemon chooses entries to evict among far more than one call may examine. */
static void long_sequence_leaves(void) {
        open_long_sequence();
        set("kvreviver.vague", "0");
        set("kvreviver.spill", "off");
        set("kvreviver.drop", "on");
        set("pressure.keydiff", "0");
        set("pressure.low", "0.7");
        set("kvreviver", "on");
        for (int i = 0; i < 4; i++) {
                space_wants_idle(space);
                idle_pieces();
                sync_all();
        }
        ck_assert_uint_gt(counter(KVD_SPACE_RELIEVED), 200);
        close_store();
}

START_TEST(a_long_sequence_gives_way_in_pieces) {
        within_budget("relief of a sequence of 500,000", long_sequence_leaves);
}
END_TEST

/* A sync of a long sequence whose entries have all been dropped, while summaries are due. */
static void long_sequence_is_asked(void) {
        static uint32_t all[LONG];

        open_long_sequence();
        set("pressure", "off");
        set("kvreviver", "on");
        idle_pieces(); /* marks the blocks for summaries */
        ck_assert_uint_gt(store_jobs_waiting(store), 0);
        for (uint32_t i = 0; i < LONG; i++)
                all[i] = i;
        for (uint32_t i = 0; i < LONG; i += MANY)
                PIECE(sequence_cool(a, sequence, KVD_COOL_DROP, all + i, MIN(LONG - i, MANY)));
        sync_all();
        ck_assert_uint_eq(counter(KVD_SPACE_DROPPED), LONG);
        sync_once(0);
        close_store();
}

START_TEST(a_long_sequence_is_asked_about_in_pieces) {
        within_budget("sync of a sequence that left", long_sequence_is_asked);
}
END_TEST

/* Does one job, or fails it: fetching and settling are a piece each. Returns: was it a spill? */
static bool one_job(bool fails) {
        static struct kvd_spilled copies[KVD_JOB_ITEMS];
        static struct kvd_job *arguments;
        struct store_job job;
        bool any, spills;

        arguments = arguments ?: malloc(KVD_JOB_BYTES);
        PIECE(any = store_next_job(store, arguments, &job));
        if (!any)
                return false;
        spills = arguments->kind == KVD_JOB_SPILL;
        if (spills && !fails)
                PIECE(store_job_done(store, job.id, 0, copies,
                                     arguments->n_items * sizeof *copies));
        else
                PIECE(store_job_done(store, job.id, EIO, NULL, 0));
        return spills;
}

/* Half a million blocks are marked for summaries, and freed before a worker looks at the marks. */
static void many_marks(void) {
        open_long_sequence();
        set("kvreviver", "on");
        idle_pieces();
        ck_assert_int_eq(sequence_close(a, sequence), 0);
        idle_pieces();
        while (store_jobs_waiting(store))
                ck_assert(!one_job(false));
        close_store();
}

START_TEST(marks_of_blocks_that_are_gone_are_passed_in_pieces) {
        within_budget("summaries of blocks that are gone", many_marks);
}
END_TEST

#define OFFERS 64000u
#define ONE_JOB 1000u /* entries per job; a sketch takes those of two jobs */

/* Many changes are offered, and those of a sketch that failed are withdrawn. */
static void sketches_break(void) {
        static uint32_t all[OFFERS];

        open_long_sequence();
        set("kvreviver.spill", "off");
        set("kvreviver.vague", "1");
        set("kvreviver.budget", "1");
        set("kvreviver.rows", "1");
        set("kvreviver", "on");
        for (uint32_t i = 0; i < OFFERS; i++)
                all[i] = i;
        for (uint32_t i = 0; i < OFFERS; i += ONE_JOB) {
                PIECE(sequence_cool(a, sequence, KVD_COOL_VAGUE, all + i, ONE_JOB));
                while (!one_job(i > OFFERS / 2 && i / ONE_JOB % 2))
                        ;
        }
        ck_assert_uint_gt(sync_once(0), 0);
        close_store();
}

START_TEST(offers_are_withdrawn_in_pieces) {
        within_budget("sketches that break", sketches_break);
}
END_TEST

/* ---- data that is still to come -------------------------------------------------------------- */

/* A process dies that has sealed a chain of half a million blocks, whose data never comes. */
static void data_never_comes(void) {
        open_store(POOL, POOL);
        space = make_space("ordered", LONG);
        space->ix->semaphore_rows = 8;
        ck_assert_int_eq(semaphores_new(space), 0);
        a = attach(space);
        seal_chain(a, fill(a, LONG), 1);
        ck_assert_uint_eq(attachment_pending(a), LONG);
        PIECE(attachment_free(a, true));
        idle_pieces();
        ck_assert_uint_eq(counter(KVD_SPACE_POISONED), LONG);
        do
                PIECE(store_look_at_semaphores(store));
        while (space->unready.poisoned.n);
        close_store();
}

START_TEST(data_that_never_comes_is_given_up_in_pieces) {
        within_budget("a chain that waits for a dead client", data_never_comes);
}
END_TEST

/* ---- many of each ---------------------------------------------------------------------------- */

#define CLIENTS 240u

/* Creates as many clients, sequences and leases as a space may have. */
static void crowd_in(struct attachment **crowd) {
        uint32_t number;

        for (uint32_t i = 0; i < CLIENTS; i++)
                crowd[i] = attach(space);
        for (uint32_t i = 0; i < KVD_MAX_SEQUENCES; i++)
                PIECE(sequence_open(crowd[i % CLIENTS], 64, &number));
        for (uint64_t i = 1; i <= STORE_MAX_LEASES; i++)
                PIECE(space_lease(crowd[i % CLIENTS], (struct kvd_key){i, i}, 1));
        ck_assert_uint_eq(usage_of_space().sequences, KVD_MAX_SEQUENCES);
        ck_assert_uint_eq(usage_of_space().leases, STORE_MAX_LEASES);
}

static void crowd_leaves(void) {
        struct attachment *crowd[CLIENTS];

        open_store(POOL, POOL);
        space = make_space("crowd", LONG);
        crowd_in(crowd);
        for (uint32_t i = 0; i < CLIENTS; i++)
                PIECE(attachment_free(crowd[i], true));
        idle_pieces();
        crowd_in(crowd);
        PIECE(space_delete(space, true));
        idle_pieces();
        close_store();
}

START_TEST(a_crowd_leaves) {
        within_budget("the end of clients with all there is", crowd_leaves);
}
END_TEST

#define SPACES 4096u

/* Each of many spaces has a segment that cannot be taken from it. */
static void one_among_many(void) {
        struct attachment *other;
        char name[32];

        open_store(SPACES * 16384, 16384);
        for (uint32_t i = 0; i < SPACES; i++) {
                snprintf(name, sizeof name, "space%u", i);
                a = attach(make_space(name, 256));
                ck_assert_int_eq(space_allocate(a, 1, refs), 1);
        }
        other = attach(make_space("other", 256));
        for (uint32_t i = 0; i < 8; i++)
                PIECE(space_allocate(other, 1, refs));
        PIECE(store_look_at_pins(store));
        close_store();
}

START_TEST(room_is_looked_for_in_4096_spaces) {
        within_budget("an allocation where 4,096 spaces are full", one_among_many);
}
END_TEST

/* ---- memory of copies ------------------------------------------------------------------------ */

#define LARGE (UINT64_C(1) << 20)
#define COPIES 60u

static const struct kvd_sys *real;
static struct kvd_sys counting;
static uint64_t given_back;

static int counting_fallocate(int fd, int mode, off_t from, off_t bytes) {
        given_back += (uint64_t)bytes;
        return real->fallocate(fd, mode, from, bytes);
}

/* A sequence of large blocks, all resident, with copies that are therefore not needed. */
static void open_with_clean_copies(void) {
        static const uint32_t tokens[COPIES];
        struct append_request q = {.own = true, .tokens = tokens};
        uint32_t first;

        open_store(2 * COPIES * LARGE, COPIES * LARGE);
        space = make_space_of("large", COPIES, 128, 1024);
        ck_assert_uint_eq(space_index(space)->block_bytes, LARGE);
        a = attach(space);
        ck_assert_int_eq(sequence_open(a, COPIES, &sequence), 0);
        q.n_blocks = q.n_tokens = fill(a, COPIES);
        ck_assert_uint_eq(q.n_blocks, COPIES);
        q.blocks = refs;
        ck_assert_int_eq(sequence_append(a, sequence, &q, &first), 0);
        for (uint32_t i = 0; i < COPIES; i++) {
                struct entry *e = &sequence_find(a, sequence)->entries[i];

                e->place = place_take(space);
                ck_assert_uint_ne(e->place, KVD_NOWHERE);
                sequence_find(a, sequence)->n_copies++;
        }
        copies_clean(space);
}

/* Each read of a copy from a file once gave back all 60 MiB in one turn of the loop. */
START_TEST(memory_of_copies_is_given_back_in_pieces) {
        uint64_t offset;

        spill_bytes = COPIES * LARGE;
        open_with_clean_copies();
        ck_assert(!place_available(space));
        ck_assert_int_ge(place_memory(space, 0, &offset), 0);
        real = sys;
        counting = *sys;
        counting.fallocate = counting_fallocate;
        sys = &counting;
        ck_assert(copies_have_room(space));
        sys = real;
        ck_assert_uint_gt(given_back, 0);
        ck_assert_uint_le(given_back, 2 * LARGE);
        close_store();
}
END_TEST

SUITE("bounds",
      TESTS(a_segment_of_tiny_blocks_changes_hands_in_pieces,
            memory_of_a_deleted_space_is_had_in_pieces,
            a_segment_of_a_deep_chain_is_emptied_in_pieces, a_long_sequence_gives_way_in_pieces,
            a_long_sequence_is_asked_about_in_pieces, offers_are_withdrawn_in_pieces,
            marks_of_blocks_that_are_gone_are_passed_in_pieces,
            large_descriptors_are_written_in_pieces, data_that_never_comes_is_given_up_in_pieces,
            a_long_prefix_goes_to_servers_and_comes_in_pieces, a_crowd_leaves,
            memory_of_copies_is_given_back_in_pieces, room_is_looked_for_in_4096_spaces))
