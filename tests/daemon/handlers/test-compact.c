/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compaction as a client sees it, by KeyDiff and by scores that the client gives: the packed blocks,
 * and the state after a client, worker or daemon dies in the middle.
 */

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/daemon/blocks.h"
#include "tests/lib/suite.h"

#define WAIT_NS UINT64_C(60000000000) /* more than a test may take */
#define DIM 32u
#define TOKENS 16u
#define PLANE (2u * TOKENS * DIM) /* floats of a layer's keys, or values */

static struct instance in;
static struct user u;
static const char *const keydiff[] = {"keydiff=on", "kvreviver=on", NULL};

static void start(const char *const settings[]) {
        instance_start(&in, NULL);
        user_open(&u, in.socket, settings);
}

static void stop(void) {
        user_check(&u);
        user_close(&u);
        instance_end(&in);
}

static int settle(void) {
        int r = kvd_sequence_wait(u.sequence, WAIT_NS);

        ck_assert_msg(r >= 0, "%s", kvd_error());
        return r;
}

static void compact(uint32_t first, uint32_t n, uint32_t keep, int want) {
        int r = kvd_sequence_compact(u.sequence, first, n, keep, NULL);

        ck_assert_msg(r == want, "%d, not %d: %s", r, want, kvd_error());
}

/* ---- expected contents ----------------------------------------------------------------------- */

#define MOST (USER_BLOCKS * TOKENS)

struct table {
        uint32_t n;            /* tokens */
        const float *given;    /* scores [layer][head][token in the range]; NULL: KeyDiff's */
        float *plane[2][2][2]; /* [layer][keys, values][head]: [token][dim] */
        bool in_range[MOST];
};

static const float *row(const struct table *t, uint32_t l, uint32_t plane, uint32_t h, uint32_t i) {
        return t->plane[l][plane][h] + i * DIM;
}

/* Copies the current contents of the entries. */
static void look(struct table *t, uint32_t first, uint32_t end) {
        const struct kvd_entry *entries;
        uint32_t n;

        memset(t, 0, sizeof *t);
        for (uint32_t k = 0; k < 8; k++)
                t->plane[k / 4][k / 2 % 2][k % 2] = calloc(MOST * DIM, sizeof(float));
        entries = kvd_sequence_entries(u.sequence, &n);
        for (uint32_t i = 0; i < n; i++) {
                const float *data = (const float *)entries[i].data;

                if (!data)
                        continue;
                for (uint32_t k = 0; k < entries[i].n_tokens; k++, t->n++) {
                        t->in_range[t->n] = i >= first && i < end;
                        for (uint32_t p = 0; p < 8; p++)
                                memcpy(t->plane[p / 4][p / 2 % 2][p % 2] + t->n * DIM,
                                       data + p / 2 * PLANE + (p % 2 * TOKENS + k) * DIM,
                                       DIM * sizeof *data);
                }
        }
}

static void forget(struct table *t) {
        for (uint32_t k = 0; k < 8; k++)
                free(t->plane[k / 4][k / 2 % 2][k % 2]);
}

static double norm(const float *key) {
        double sum = 0;

        for (uint32_t d = 0; d < DIM; d++)
                sum += (double)key[d] * key[d];
        return sqrt(sum);
}

static void given_scores(const struct table *t, uint32_t head, double *ret) {
        uint32_t n = 0, at = 0;

        for (uint32_t i = 0; i < t->n; i++)
                n += t->in_range[i];
        for (uint32_t i = 0; i < t->n; i++)
                ret[i] = t->in_range[i] ? t->given[head * n + at++] : 0;
}

static void scores(const struct table *t, uint32_t l, uint32_t h, double *ret) {
        double anchor[DIM] = {0};

        for (uint32_t i = 0; i < t->n; i++)
                for (uint32_t d = 0; d < DIM; d++)
                        anchor[d] += row(t, l, 0, h, i)[d] / norm(row(t, l, 0, h, i));
        for (uint32_t i = 0; i < t->n; i++) {
                double dot = 0;

                for (uint32_t d = 0; d < DIM; d++)
                        dot += anchor[d] * row(t, l, 0, h, i)[d];
                ret[i] = -dot / norm(row(t, l, 0, h, i));
        }
}

/* Token i stays if fewer than keep of the range score more. */
static bool stays(const struct table *t, const double *score, uint32_t i, uint32_t keep) {
        uint32_t better = 0;

        for (uint32_t k = 0; k < t->n; k++)
                better += t->in_range[k] && score[k] > score[i];
        return t->in_range[i] && better < keep;
}

static const float *packed_row(const struct kvd_entry *entries, uint32_t first, uint32_t l,
                               uint32_t plane, uint32_t h, uint32_t i) {
        const float *data = (const float *)entries[first + i / TOKENS].data;

        return data + (2 * l + plane) * PLANE + (h * TOKENS + i % TOKENS) * DIM;
}

static void expect_packed(const struct table *t, uint32_t first, uint32_t end, uint32_t keep) {
        const struct kvd_entry *entries;
        static double score[MOST];
        uint32_t n;

        entries = kvd_sequence_entries(u.sequence, &n);
        for (uint32_t i = first; i < end; i++) {
                uint32_t left = keep > (i - first) * TOKENS ? keep - (i - first) * TOKENS : 0;

                ck_assert_uint_eq(entries[i].flags,
                                  KVD_ENTRY_OWN | (left ? KVD_ENTRY_COMPACT : KVD_ENTRY_DROPPED));
                ck_assert_int_eq(entries[i].data != NULL, left > 0);
                ck_assert(!left || entries[i].n_tokens == MIN(left, TOKENS));
        }
        for (uint32_t head = 0; head < 4; head++) {
                uint32_t at = 0;

                if (t->given)
                        given_scores(t, head, score);
                else
                        scores(t, head / 2, head % 2, score);
                for (uint32_t i = 0; i < t->n; i++) {
                        if (!stays(t, score, i, keep))
                                continue;
                        for (uint32_t plane = 0; plane < 2; plane++)
                                ck_assert_mem_eq(packed_row(entries, first, head / 2, plane,
                                                            head % 2, at),
                                                 row(t, head / 2, plane, head % 2, i),
                                                 DIM * sizeof(float));
                        at++;
                }
                ck_assert_uint_eq(at, keep);
        }
}

static void compact_and_check(uint32_t first, uint32_t end, uint32_t keep) {
        struct table t;

        look(&t, first, end);
        compact(first, end - first, keep, (int)(end - first));
        ck_assert_int_eq(settle(), (int)(end - first));
        expect_packed(&t, first, end, keep);
        forget(&t);
        user_check(&u);
}

/* ---- given scores ---------------------------------------------------------------------------- */

#define ROWS 4u /* layers x heads */

/* A block with random scores, all different, of the tokens of n full entries. */
struct given {
        struct kvd_block block;
        float scores[ROWS * MOST];
};

static void give(struct given *g, struct user *to, uint32_t n) {
        ck_assert_int_eq(kvd_alloc(to->space, 1, &g->block), 1);
        for (uint32_t i = 0; i < ROWS * n * TOKENS; i++)
                g->scores[i] = (float)((i + n) * 2654435761u % 8388593) / 4096 - 1000;
        memcpy(g->block.data, g->scores, sizeof g->scores);
}

static void take_back(struct given *g) {
        kvd_free(u.space, 1, &g->block);
}

static int compact_by(struct user *of, uint32_t first, uint32_t n, uint32_t keep,
                      const struct given *g) {
        const struct kvd_scores given = {&g->block, 1};

        return kvd_sequence_compact(of->sequence, first, n, keep, &given);
}

static void refused_by(int r, int error, const char *why) {
        ck_assert_msg(r == error && strstr(kvd_error(), why), "%d, not %d: %s", r, error,
                      kvd_error());
        user_check(&u);
}

/* ---- tests ----------------------------------------------------------------------------------- */

START_TEST(each_head_has_its_own_tokens) {
        struct kvd_sequence_stats stats;
        struct kvd_label_shape shape;

        start(keydiff);
        user_append(&u, 12);
        settle();
        compact_and_check(1, 10, 40);
        kvd_sequence_stats(u.sequence, &stats);
        ck_assert_uint_eq(stats.compacted, 3);
        ck_assert_uint_eq(stats.dropped, 6);
        ck_assert_uint_eq(stats.resident_bytes, 6 * 16384);
        ck_assert_uint_eq(stats.copy_bytes + stats.sketch_bytes, 0);
        ck_assert_uint_gt(stats.label_bytes, 0);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_COMPACTED), 6);
        for (uint32_t i = 1; i < 4; i++)
                ck_assert_ptr_nonnull(kvd_sequence_labels(u.sequence, i, &shape));
        compact_and_check(1, 4, 20); /* packs packed blocks, the last of them not full */
        user_append(&u, 4);
        stop();
}
END_TEST

START_TEST(it_leaves_and_comes_back_exactly) {
        uint32_t slots[2] = {0, 1};
        struct kvd_sequence_stats stats;
        struct table t;

        start(keydiff);
        user_append(&u, 8);
        look(&t, 0, 8);
        compact(0, 8, 30, 8);
        settle();
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 2, slots, KVD_COOL_VAGUE), 2);
        ck_assert_int_eq(settle(), 2);
        kvd_sequence_stats(u.sequence, &stats);
        ck_assert_uint_eq(stats.copy_bytes, 2 * 16384);
        ck_assert_uint_eq(stats.sketch_bytes, 0);
        ck_assert_uint_eq(stats.resident, 0);
        ck_assert_int_eq(kvd_sequence_revive(u.sequence, 2, slots, KVD_REVIVE_BOTH), 2);
        ck_assert_int_eq(settle(), 2);
        expect_packed(&t, 0, 8, 30);
        forget(&t);
        stop();
}
END_TEST

START_TEST(given_scores_decide_what_stays) {
        static struct given g;
        struct table t;

        start((const char *const[]){"kvreviver=on", NULL}); /* without keydiff */
        user_append(&u, 62);
        settle();
        give(&g, &u, 60);
        look(&t, 1, 61);
        t.given = g.scores;
        ck_assert_int_eq(compact_by(&u, 1, 60, 100, &g), 60);
        ck_assert_int_eq(settle(), 60);
        take_back(&g);
        expect_packed(&t, 1, 61, 100);
        forget(&t);
        user_check(&u);
        stop();
}
END_TEST

/* Entries of KeyDiff's result are packed again, by given scores; the last of them is not full. */
START_TEST(what_keydiff_left_can_be_scored) {
        static struct given g;
        struct table t;

        start(keydiff);
        user_append(&u, 8);
        compact(0, 8, 3 * TOKENS - 4, 8);
        settle();
        give(&g, &u, 3); /* four columns fewer are used */
        look(&t, 0, 3);
        ck_assert_uint_eq(t.n, 3 * TOKENS - 4);
        t.given = g.scores;
        ck_assert_int_eq(compact_by(&u, 0, 3, TOKENS + 1, &g), 3);
        ck_assert_int_eq(settle(), 3);
        take_back(&g);
        expect_packed(&t, 0, 3, TOKENS + 1);
        forget(&t);
        stop();
}
END_TEST

START_TEST(refusals_of_given_scores_have_messages) {
        static struct given g;
        struct kvd_scores none = {0};
        uint32_t slot = 2;

        start((const char *const[]){"kvreviver=on", NULL});
        user_append(&u, 6);
        settle();
        ck_assert_int_eq(kvd_sequence_cool(u.sequence, 1, &slot, KVD_COOL_SPILL), 1);
        settle();
        give(&g, &u, 60);
        refused_by(kvd_sequence_compact(u.sequence, 0, 2, 16, &none), -EINVAL, "no block");
        none.n_blocks = 4097;
        refused_by(kvd_sequence_compact(u.sequence, 0, 2, 16, &none), -E2BIG, "4097 blocks");
        refused_by(compact_by(&u, 0, 4, 16, &g), -EINVAL, "entry 2 is not resident");
        refused_by(compact_by(&u, 0, 7, 16, &g), -EINVAL, "6 entries");
        ck_assert_int_eq(compact_by(&u, 0, 2, 32, &g), 0);
        take_back(&g);
        refused_by(compact_by(&u, 0, 2, 16, &g), -ESTALE, "not allocated");
        stop();
}
END_TEST

START_TEST(values_of_8_bits_are_packed_by_given_scores) {
        const struct kvd_geometry g = {.layers = 1,
                                       .kv_heads = 1,
                                       .head_dim = 16,
                                       .dtype = KVD_I8,
                                       .vocab = 100};
        struct kvd_block blocks[2];
        const struct kvd_scores given = {blocks + 1, 1};
        const struct kvd_entry *entries;
        uint32_t tokens[16] = {0}, n;
        kvd_sequence *sequence;
        kvd_space *space;

        start(keydiff);
        ck_assert_int_eq(kvd_space_open(u.kvd, "bytes", &g, NULL, &space), 0);
        ck_assert_int_eq(kvd_space_set(space, "keydiff", 1), 0);
        ck_assert_int_eq(kvd_sequence_open(space, 4, &sequence), 0);
        ck_assert_int_eq(kvd_alloc(space, 2, blocks), 2);
        for (uint32_t i = 0; i < 512; i++)
                blocks[0].data[i] = (uint8_t)(i / 16);
        for (uint32_t i = 0; i < 16; i++)
                ((float *)blocks[1].data)[i] = (float)(i * 7 % 16);
        ck_assert_int_eq(kvd_sequence_append(sequence, 1, blocks, tokens, 16), 1);
        refused_by(kvd_sequence_compact(sequence, 0, 1, 2, NULL), -EOPNOTSUPP, "8-bit");
        ck_assert_int_eq(kvd_sequence_compact(sequence, 0, 1, 2, &given), 1);
        ck_assert_int_eq(kvd_sequence_wait(sequence, WAIT_NS), 1);
        entries = kvd_sequence_entries(sequence, &n); /* token 2 has the score 14, token 9 has 15 */
        for (uint32_t i = 0; i < 64; i++)
                ck_assert_uint_eq(entries->data[i / 32 * 256 + i % 32],
                                  i / 32 * 16 + (i / 16 % 2 ? 9 : 2));
        kvd_free(space, 1, blocks + 1);
        kvd_sequence_close(sequence);
        kvd_space_close(space);
        stop();
}
END_TEST

START_TEST(refusals_have_messages) {
        start((const char *const[]){"kvreviver=on", NULL});
        user_append(&u, 4);
        compact(0, 4, 16, -EOPNOTSUPP);
        ck_assert(strstr(kvd_error(), "keydiff is off"));
        user_set(&u, "keydiff=on");
        compact(0, 5, 16, -EINVAL);
        compact(0, 4, 0, -EINVAL);
        compact(0, 4, 64, 0);
        stop();
}
END_TEST

START_TEST(keys_that_are_not_rotated_yet_are_refused) {
        const struct kvd_geometry g = {.layers = 1,
                                       .kv_heads = 1,
                                       .head_dim = 16,
                                       .dtype = KVD_F16,
                                       .vocab = 100,
                                       .rope = KVD_ROPE_PRE};
        struct kvd_block block;
        kvd_sequence *sequence;
        kvd_space *space;
        uint32_t tokens[16] = {0};

        start(keydiff);
        ck_assert_int_eq(kvd_space_open(u.kvd, "pre", &g, NULL, &space), 0);
        ck_assert_int_eq(kvd_space_set(space, "keydiff", 1), 0);
        ck_assert_int_eq(kvd_sequence_open(space, 4, &sequence), 0);
        ck_assert_int_eq(kvd_alloc(space, 1, &block), 1);
        ck_assert_int_eq(kvd_sequence_append(sequence, 1, &block, tokens, 16), 1);
        ck_assert_int_eq(kvd_sequence_compact(sequence, 0, 1, 4, NULL), -EOPNOTSUPP);
        ck_assert(strstr(kvd_error(), "before rotation"));
        ck_assert_int_eq(kvd_alloc(space, 1, &block), 1);
        refused_by(kvd_sequence_compact(sequence, 0, 1, 4, &(struct kvd_scores){&block, 1}),
                   -EOPNOTSUPP, "before rotation");
        kvd_free(space, 1, &block);
        kvd_sequence_close(sequence);
        kvd_space_close(space);
        stop();
}
END_TEST

/* ---- deaths ---------------------------------------------------------------------------------- */

static pid_t stopped_worker(void) {
        pid_t worker = user_worker(&u);

        settle();
        ck_assert_int_eq(kill(worker, SIGSTOP), 0);
        return worker;
}

START_TEST(a_worker_that_dies_in_the_middle_is_made_up_for) {
        struct table t;
        pid_t worker;

        start(keydiff);
        user_append(&u, 12);
        worker = stopped_worker();
        look(&t, 2, 12);
        compact(2, 10, 33, 10);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, 20000000), -ETIMEDOUT);
        ck_assert_uint_eq(user_resident(&u), 12);
        user_check(&u);
        ck_assert_int_eq(kill(worker, SIGKILL), 0);
        ck_assert_int_eq(settle(), 10);
        expect_packed(&t, 2, 12, 33);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_JOBS_LOST), 1);
        forget(&t);
        stop();
}
END_TEST

/* Asks for a compaction of 10 entries by scores. Returns the worker that has the job. */
static pid_t ask_a_stopped_worker(struct given *g, struct table *t) {
        pid_t worker;

        start(keydiff);
        user_append(&u, 12);
        worker = stopped_worker();
        give(g, &u, 10);
        look(t, 2, 12);
        t->given = g->scores;
        ck_assert_int_eq(compact_by(&u, 2, 10, 33, g), 10);
        return worker;
}

START_TEST(a_worker_that_dies_is_made_up_for_with_the_same_scores) {
        static struct given g;
        struct table t;
        pid_t worker = ask_a_stopped_worker(&g, &t);

        ck_assert_int_eq(kvd_sequence_wait(u.sequence, 20000000), -ETIMEDOUT);
        ck_assert_int_eq(kill(worker, SIGKILL), 0);
        ck_assert_int_eq(settle(), 10);
        expect_packed(&t, 2, 12, 33);
        ck_assert_uint_eq(user_counter(&u, KVD_SPACE_JOBS_LOST), 1);
        take_back(&g);
        forget(&t);
        stop();
}
END_TEST

/*
 * The scores are freed while a stopped worker has the job, which keeps them. If that worker is lost
 * (_i is 1), the compaction takes place by these scores, or not at all.
 */
START_TEST(scores_that_are_freed_meanwhile_harm_nobody) {
        static struct given g;
        struct table t;
        pid_t worker = ask_a_stopped_worker(&g, &t);

        take_back(&g);
        user_check(&u);
        ck_assert_int_eq(kill(worker, _i ? SIGKILL : SIGCONT), 0);
        if (settle() == 10)
                expect_packed(&t, 2, 12, 33);
        else
                ck_assert_uint_eq(user_resident(&u), _i ? 12 : 0); /* with their bytes */
        user_check(&u);
        forget(&t);
        stop();
}
END_TEST

/* Workers die all the time: each compaction takes place completely or not at all. */
START_TEST(it_is_all_or_nothing_while_workers_die) {
        start(keydiff);
        for (int round = 0; round < 12; round++) {
                const struct kvd_entry *entries;
                struct table t;
                uint32_t n;

                user_append(&u, 5);
                look(&t, (uint32_t)round * 5, (uint32_t)round * 5 + 5);
                compact((uint32_t)round * 5, 5, 20, 5);
                usleep((unsigned)round * 300);
                kill(user_worker(&u), SIGKILL);
                settle();
                entries = kvd_sequence_entries(u.sequence, &n);
                if (entries[round * 5].flags & KVD_ENTRY_COMPACT)
                        expect_packed(&t, (uint32_t)round * 5, n, 20);
                else
                        for (uint32_t i = (uint32_t)round * 5; i < n; i++)
                                ck_assert_uint_eq(entries[i].flags, KVD_ENTRY_OWN);
                forget(&t);
                user_check(&u);
        }
        stop();
}
END_TEST

/* Another client, whose compactions are queued, offered or in flight when it is killed. */
static _Noreturn void be_killed(uint32_t pause, bool gives) {
        static struct given g;
        struct user other;

        user_open(&other, in.socket, keydiff);
        for (uint32_t n = 0; n + 6 <= USER_BLOCKS; n += 6) {
                user_append(&other, 6);
                if (gives)
                        give(&g, &other, 6);
                if (gives)
                        compact_by(&other, n, 6, 20, &g);
                else
                        kvd_sequence_compact(other.sequence, n, 6, 20, NULL);
                usleep(pause);
                if (pause % 2)
                        kvd_sequence_sync(other.sequence);
        }
        kill(getpid(), SIGKILL);
        _exit(1);
}

static uint64_t private_blocks(void) {
        struct kvd_msg info = {.number = KVD_MSG_space_info};

        return peer_ok(u.peer, info).space_info_reply.private;
}

static uint64_t filling_blocks(void) {
        struct kvd_msg info = {.number = KVD_MSG_space_info};

        return peer_ok(u.peer, info).space_info_reply.filling;
}

/* _i is 1: it has given scores, and its blocks with the scores of all compactions. */
START_TEST(a_client_that_dies_in_the_middle_leaves_nothing) {
        uint64_t filling;

        start(keydiff);
        user_append(&u, 2);
        filling = filling_blocks();
        for (uint32_t i = 0; i < 12; i++) {
                pid_t worker = 0, pid;

                if (i % 4 == 3)
                        worker = stopped_worker();
                pid = fork();
                if (pid == 0)
                        be_killed(i * 211, _i);
                ck_assert_int_eq(wait_status(pid), 128 + SIGKILL);
                user_check(&u);
                if (worker)
                        kill(worker, SIGCONT);
        }
        WAIT_UNTIL(private_blocks() == 2);
        WAIT_UNTIL(filling_blocks() == filling);
        WAIT_UNTIL(user_info(&u).jobs_waiting == 0);
        ck_assert_uint_eq(user_resident(&u), 2);
        stop();
}
END_TEST

START_TEST(a_daemon_that_dies_in_the_middle_leaves_the_table_whole) {
        pid_t worker;

        start(keydiff);
        user_append(&u, 8);
        worker = stopped_worker();
        compact(0, 8, 20, 8);
        kill(in.pid, SIGKILL);
        ck_assert_int_eq(kvd_sequence_wait(u.sequence, UINT64_MAX), -ESTALE);
        ck_assert_uint_eq(user_resident(&u), 8); /* with their bytes */
        ck_assert_uint_eq(user_flags(&u, KVD_ENTRY_COMPACT), 0);
        waitpid(in.pid, NULL, 0);
        kill(worker, SIGKILL);
        user_close(&u);
        instance_sweep(&in);
}
END_TEST

SUITE("compact",
      TESTS(each_head_has_its_own_tokens, it_leaves_and_comes_back_exactly, refusals_have_messages,
            keys_that_are_not_rotated_yet_are_refused, given_scores_decide_what_stays,
            what_keydiff_left_can_be_scored, refusals_of_given_scores_have_messages,
            values_of_8_bits_are_packed_by_given_scores,
            a_worker_that_dies_in_the_middle_is_made_up_for,
            a_worker_that_dies_is_made_up_for_with_the_same_scores,
            it_is_all_or_nothing_while_workers_die),
      /* a forked process cannot use the GPU */
      WHEN(!instance_on_gpu(), LOOPS(2, a_client_that_dies_in_the_middle_leaves_nothing)),
      LOOPS(2, scores_that_are_freed_meanwhile_harm_nobody),
      TESTS(a_daemon_that_dies_in_the_middle_leaves_the_table_whole))
