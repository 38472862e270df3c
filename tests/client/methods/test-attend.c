/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvd_paged_write and kvd_paged_attention against the definition of attention, over all parameters
 * that enter an address. Blocks are used in shuffled order, some sealed and some being filled, and
 * are NaN except for their tokens, so that a read from a wrong address shows. KVD_TEST_BACKEND is
 * the daemon's backend; on a GPU the calls are refused.
 */

#include <errno.h>
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd_attend.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/client/methods/attend_reference.h"
#include "tests/lib/emulated.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

enum { VOCAB = 1000, MOST_TOKENS = 64, MOST_BLOCKS = 24, PAD = 3 };

static struct instance server;
static kvd *handle;
static kvd_space *space;
static struct kvd_geometry geometry;
static uint64_t state = 1;

/*
 * A sequence's blocks in one layer group. The first n_sealed are sealed, the rest are being filled.
 */
static struct sequence {
        uint32_t group, n_blocks, n_sealed;
        struct kvd_block blocks[MOST_BLOCKS];
        uint32_t ids[MOST_BLOCKS];
        struct kvd_pin pin;
} sequence;

static bool on_gpu(void) {
        return strcmp(getenv("KVD_TEST_BACKEND"), "host") != 0;
}

static float random_float(void) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (float)((double)(state >> 33) / (UINT32_C(1) << 30) - 1.0);
}

static float *random_floats(size_t n) {
        float *to = malloc(n * sizeof *to);

        for (size_t i = 0; i < n; i++)
                to[i] = random_float();
        return to;
}

/* ---- spaces and sequences -------------------------------------------------------------------- */

static void start_daemon(void) {
        instance_start(&server, SETTINGS("daemon.segment=2M"));
        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
}

static void stop_daemon(void) {
        handle = kvd_close(handle);
        instance_end_clean(&server);
}

static void open_space(const struct kvd_geometry *g) {
        static uint32_t number;
        char name[16];

        geometry = *g;
        snprintf(name, sizeof name, "space-%u", number++);
        ck_assert_msg(kvd_space_open(handle, name, g, NULL, &space) == 0, "%s", kvd_error());
}

static void shuffle(struct kvd_block *blocks, uint32_t n) {
        for (uint32_t i = n - 1; i > 0; i--) {
                uint32_t j = (uint32_t)(state = state * 6364136223846793005u + 1) % (i + 1);
                struct kvd_block it = blocks[i];

                blocks[i] = blocks[j];
                blocks[j] = it;
        }
}

/* Takes blocks for n_tokens tokens, in shuffled order, full of NaN. */
static void start_sequence(uint32_t group, uint32_t n_tokens) {
        sequence = (struct sequence){.group = group,
                                     .n_blocks = DIV_UP(n_tokens, geometry.block_tokens)};
        sequence.pin.group = group;
        for (uint32_t got = 0; got < sequence.n_blocks;) {
                int r = kvd_alloc(space, sequence.n_blocks - got, sequence.blocks + got);

                ck_assert_msg(r > 0, "%s", kvd_error());
                got += (uint32_t)r;
        }
        shuffle(sequence.blocks, sequence.n_blocks);
        for (uint32_t i = 0; i < sequence.n_blocks; i++) {
                sequence.ids[i] = sequence.blocks[i].id;
                if (!on_gpu())
                        memset(sequence.blocks[i].data, 0xff, kvd_block_bytes(&geometry));
        }
}

static void seal_blocks(uint32_t n) {
        uint32_t tokens[MOST_TOKENS];

        for (uint32_t i = 0; i < n * geometry.block_tokens; i++)
                tokens[i] = i % VOCAB;
        ck_assert_int_eq(kvd_seal(space, &sequence.pin, n, sequence.blocks, tokens,
                                  n * geometry.block_tokens),
                         (int)n);
        sequence.n_sealed = n;
}

static void end_sequence(void) {
        kvd_unpin(space, &sequence.pin);
        kvd_free(space, sequence.n_blocks - sequence.n_sealed, sequence.blocks + sequence.n_sealed);
}

static struct kvd_table table(uint32_t first, uint32_t n) {
        struct sequence *s = &sequence;

        return (struct kvd_table){s->blocks[s->n_blocks - 1].view, s->ids, s->n_blocks, first, n};
}

/* ---- against the definition ------------------------------------------------------------------ */

static struct history new_history(uint32_t n) {
        size_t floats = (size_t)n * geometry.kv_heads * geometry.head_dim;

        return (struct history){&geometry, random_floats(floats), random_floats(floats)};
}

static void free_history(struct history *h) {
        free(h->k);
        free(h->v);
}

static void write_tokens(uint32_t layer, const struct history *h, uint32_t first, uint32_t n) {
        size_t width = (size_t)geometry.kv_heads * geometry.head_dim, ld = width + PAD;
        float *k = random_floats(n * ld), *v = random_floats(n * ld);
        struct kvd_table t = table(first, n);

        for (uint32_t i = 0; i < n; i++) {
                memcpy(k + i * ld, h->k + (first + i) * width, width * sizeof *k);
                memcpy(v + i * ld, h->v + (first + i) * width, width * sizeof *v);
        }
        ck_assert_msg(kvd_paged_write(space, layer, &t, k, v, ld) == 0, "%s", kvd_error());
        free(k);
        free(v);
}

/* What the token at a position sees, when a call ends at position end. */
static struct history seen_history(const struct history *h, const struct kvd_exact *e,
                                   uint32_t position, uint32_t end) {
        size_t width = (size_t)geometry.kv_heads * geometry.head_dim,
               bytes = (position + 1) * width * sizeof(float);
        struct history seen = {h->geometry, malloc(bytes), malloc(bytes)};

        memcpy(seen.k, h->k, bytes);
        memcpy(seen.v, h->v, bytes);
        for (uint32_t p = e ? MAX(end - e->n, position / e->span * e->span) : end; p <= position;
             p++) {
                memcpy(seen.k + p * width, e->k + (p + e->n - end) * e->ld, width * sizeof(float));
                memcpy(seen.v + p * width, e->v + (p + e->n - end) * e->ld, width * sizeof(float));
        }
        return seen;
}

static void expect_heads(uint32_t layer, const struct history *h, const struct kvd_heads *heads,
                         uint32_t first, uint32_t n) {
        size_t width = (size_t)heads->heads * geometry.head_dim, ldq = width + PAD,
               ldo = width + 2 * PAD;
        float *q = random_floats(n * ldq), *out = malloc(n * ldo * sizeof *out);
        struct kvd_table t = table(first, n);
        double expected[128];

        memset(out, 0xff, n * ldo * sizeof *out);
        ck_assert_msg(kvd_paged_attention(space, layer, &t, heads, q, ldq, out, ldo) == 0, "%s",
                      kvd_error());
        for (uint32_t i = 0; i < n; i++) {
                struct history seen = seen_history(h, heads->exact, first + i, first + n);

                for (uint32_t head = 0; head < heads->heads; head++) {
                        reference_attend(&seen, first + i, heads, head,
                                         q + i * ldq + head * geometry.head_dim, expected);
                        for (uint32_t d = 0; d < geometry.head_dim; d++)
                                ck_assert_double_eq_tol(out[i * ldo + head * geometry.head_dim + d],
                                                        expected[d], 4e-6);
                }
                for (size_t d = width; d < ldo; d++)
                        ck_assert_float_nan(out[i * ldo + d]);
                free_history(&seen);
        }
        free(q);
        free(out);
}

/* Other keys and values than those that are stored, of some of the last positions of n. */
static struct kvd_exact random_exact(uint32_t n) {
        size_t ld = (size_t)geometry.kv_heads * geometry.head_dim + PAD;
        struct kvd_exact e = {.ld = ld,
                              .n = 1 + (uint32_t)(fabsf(random_float()) * (float)(n - 1))};

        e.span = 1 + (uint32_t)(fabsf(random_float()) * 2.0f * (float)n);
        e.k = random_floats(e.n * ld);
        e.v = random_floats(e.n * ld);
        return e;
}

/*
 * Plain, and in the next of several forms, with and without exact rows: windows of one token, less
 * than a block, several blocks, more than all; caps; sinks that are as good as none, or take all.
 */
static void expect_attention(uint32_t layer, const struct history *h, uint32_t heads,
                             uint32_t first, uint32_t n) {
        static const struct {
                uint32_t window;
                float cap;
                bool sinks;
        } forms[] = {{1, 0, false},
                     {3, 0, true},
                     {19, 0.7f, false},
                     {0, 0, true},
                     {1000, 0.7f, true}};
        static _Atomic uint32_t next;
        uint32_t i = next++ % ARRAY_SIZE(forms);
        struct kvd_heads form = {.heads = heads, .scale = 1.7f / sqrtf((float)geometry.head_dim)};
        float *sinks = random_floats(heads);
        struct kvd_exact exact = random_exact(first + n);

        expect_heads(layer, h, &form, first, n);
        sinks[0] = i % 2 ? -100.0f : 1.0f;
        sinks[heads - 1] = i % 2 ? 120.0f : -1.0f;
        form.window = forms[i].window;
        form.cap = forms[i].cap;
        form.sinks = forms[i].sinks ? sinks : NULL;
        expect_heads(layer, h, &form, first, n);
        form.exact = &exact;
        expect_heads(layer, h, &form, first, n);
        free((float *)exact.k);
        free((float *)exact.v);
        free(sinks);
}

static void round_history(struct history *h, uint32_t n) {
        uint32_t dim = geometry.head_dim;

        for (size_t i = 0; i < (size_t)n * geometry.kv_heads; i++) {
                reference_round_key(h->k + i * dim, dim, geometry.dtype);
                reference_round(h->v + i * dim, dim, geometry.dtype);
        }
}

/*
 * Tests all layers of a group: a prompt in two parts, whose full blocks are then sealed, and single
 * tokens.
 */
static void play_group(uint32_t group, uint32_t heads) {
        uint32_t per_group = geometry.layers / geometry.layer_groups,
                 tokens = geometry.block_tokens;
        uint32_t ends[] = {tokens + 1, 2 * tokens + 2, 2 * tokens + 3, 2 * tokens + 4}, n = ends[3];

        start_sequence(group, n);
        for (uint32_t part = 0, first = 0; part < ARRAY_SIZE(ends); first = ends[part++]) {
                state = group + 1; /* the same numbers in every part */
                for (uint32_t layer = group * per_group; layer < (group + 1) * per_group; layer++) {
                        struct history h = new_history(n);

                        write_tokens(layer, &h, first, ends[part] - first);
                        round_history(&h, n);
                        expect_attention(layer, &h, heads, first, ends[part] - first);
                        free_history(&h);
                        state = (uint64_t)(group + 1) * 1000 + layer;
                }
                if (part == 1)
                        seal_blocks(2);
        }
        end_sequence();
}

/* Quantised rows have an even number of dimensions. */
static uint32_t even(uint32_t dim, uint32_t dtype) {
        return dtype == KVD_Q8 || dtype == KVD_Q4 ? ALIGN_UP(dim, 2) : dim;
}

START_TEST(attention_is_right) {
        static const uint32_t dtypes[] = {KVD_F32, KVD_F16, KVD_BF16, KVD_Q8, KVD_Q4};
        static const struct {
                uint32_t layers, groups, kv_heads, heads, dim, tokens;
        } rows[] = {
                {1, 1, 1, 1, 8, 16},  {2, 1, 2, 4, 32, 16}, {4, 2, 3, 3, 16, 4},
                {2, 2, 2, 6, 64, 1},  {3, 3, 1, 5, 7, 5},   {2, 1, 4, 8, 128, 8},
                {1, 1, 3, 6, 80, 20},
        };

        start_daemon();
        for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
                open_space(&(struct kvd_geometry){.layers = rows[i].layers,
                                                  .kv_heads = rows[i].kv_heads,
                                                  .head_dim = even(rows[i].dim, dtypes[_i / 2]),
                                                  .block_tokens = rows[i].tokens,
                                                  .layer_groups = rows[i].groups,
                                                  .dtype = dtypes[_i / 2],
                                                  .order = _i % 2 ? KVD_HND : KVD_NHD,
                                                  .vocab = VOCAB});
                for (uint32_t group = 0; group < rows[i].groups; group++)
                        play_group(group, rows[i].heads);
                space = kvd_space_close(space);
        }
        stop_daemon();
}
END_TEST

/* ---- refusals -------------------------------------------------------------------------------- */

static const struct kvd_geometry small = {.layers = 2,
                                          .kv_heads = 2,
                                          .head_dim = 8,
                                          .block_tokens = 4,
                                          .dtype = KVD_F32,
                                          .vocab = VOCAB};

static void expect_refused(int r, const char *words) {
        ck_assert_int_eq(r, -EINVAL);
        ck_assert_msg(strstr(kvd_error(), words), "'%s' says nothing of '%s'", kvd_error(), words);
}

static int write_one(uint32_t layer, struct kvd_table t) {
        static const float zeros[16];

        return kvd_paged_write(space, layer, &t, zeros, zeros, 16);
}

static int attend_as(struct kvd_table t, const struct kvd_heads *heads) {
        static const float q[64];
        float out[64];

        return kvd_paged_attention(space, 0, &t, heads, q, 64, out, 64);
}

static int attend_one(struct kvd_table t, uint32_t heads, float scale) {
        return attend_as(t, &(struct kvd_heads){.heads = heads, .scale = scale});
}

START_TEST(what_has_no_place_is_refused) {
        static const float caps[] = {INFINITY, -1.0f, NAN}, zeros[16];
        static const struct kvd_exact none = {zeros, zeros, 16, 0, 8},
                                      no_span = {zeros, zeros, 16, 1, 0};
        struct kvd_space_memory memory;
        struct kvd_table t;

        start_daemon();
        open_space(&small);
        start_sequence(0, 12);
        expect_refused(write_one(2, table(0, 1)), "layer 2 of 2");
        expect_refused(write_one(0, table(12, 1)), "table of 3 blocks");
        expect_refused(write_one(0, table(UINT32_MAX, 2)), "table of 3 blocks");
        expect_refused(attend_one(table(0, 0), 2, 1.0f), "0 tokens");
        expect_refused(attend_one(table(0, 1), 3, 1.0f), "3 query heads");
        expect_refused(attend_one(table(0, 1), 0, 1.0f), "0 query heads");
        expect_refused(attend_one(table(0, 1), 2, 0.0f), "scale");
        expect_refused(attend_one(table(0, 1), 2, NAN), "scale");
        expect_refused(attend_one(table(0, 1), 2, INFINITY), "scale");
        for (size_t i = 0; i < ARRAY_SIZE(caps); i++)
                expect_refused(attend_as(table(0, 1), &(struct kvd_heads){.heads = 2,
                                                                          .scale = 1,
                                                                          .cap = caps[i]}),
                               "cap");
        expect_refused(attend_as(table(0, 1),
                                 &(struct kvd_heads){.heads = 2, .scale = 1, .exact = &none}),
                       "0 exact tokens");
        expect_refused(attend_as(table(0, 1),
                                 &(struct kvd_heads){.heads = 2, .scale = 1, .exact = &no_span}),
                       "spans of 0");
        t = table(0, 1);
        t.view = &t;
        expect_refused(attend_one(t, 2, 1.0f), "view");
        t.view = NULL;
        expect_refused(write_one(0, t), "view");
        ck_assert_int_eq(kvd_space_memory(space, &memory), 0);
        t.view = memory.view;
        ck_assert_int_eq(attend_one(t, 2, 1.0f), 0);
        sequence.ids[0] = UINT32_MAX;
        expect_refused(write_one(0, table(0, 1)), "not mapped");
        sequence.ids[0] = 100000; /* of a segment that does not exist in the pool */
        expect_refused(attend_one(table(0, 1), 2, 1.0f), "not mapped");
        sequence.ids[0] = sequence.blocks[0].id;
        ck_assert_int_eq(write_one(0, table(0, 1)), 0);
        ck_assert_int_eq(attend_one(table(0, 1), 2, 1.0f), 0);
        end_sequence();
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

START_TEST(a_sealed_block_is_not_written_to) {
        start_daemon();
        open_space(&small);
        start_sequence(0, 12);
        for (uint32_t i = 0; i < 12; i++)
                ck_assert_int_eq(write_one(0, table(i, 1)), 0);
        seal_blocks(2);
        expect_refused(write_one(0, table(7, 1)), "not being filled");
        ck_assert_int_eq(write_one(0, table(8, 1)), 0);
        ck_assert_int_eq(attend_one(table(8, 1), 2, 1.0f), 0);
        end_sequence();
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

START_TEST(other_contents_are_refused) {
        struct kvd_geometry g = small;

        start_daemon();
        g.dtype = KVD_I8;
        open_space(&g);
        start_sequence(0, 4);
        expect_refused(write_one(0, table(0, 1)), "take q8");
        end_sequence();
        space = kvd_space_close(space);
        open_space(&(struct kvd_geometry){.block_tokens = 4,
                                          .block_bytes = 4096,
                                          .layout = "theirs",
                                          .vocab = VOCAB});
        start_sequence(0, 4);
        expect_refused(write_one(0, table(0, 1)), "opaque blocks (theirs)");
        expect_refused(attend_one(table(0, 1), 2, 1.0f), "opaque");
        end_sequence();
        space = kvd_space_close(space);
        g.dtype = KVD_F16;
        g.rope = KVD_ROPE_PRE;
        open_space(&g);
        start_sequence(0, 4);
        ck_assert_int_eq(write_one(0, table(0, 1)), 0);
        expect_refused(attend_one(table(0, 1), 2, 1.0f), "rotation");
        end_sequence();
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

START_TEST(blocks_on_a_gpu_are_refused) {
        struct kvd_geometry g = small;

        g.dtype = _i == 0 ? small.dtype : KVD_Q4;
        start_daemon();
        open_space(&g);
        start_sequence(0, 4);
        expect_refused(write_one(0, table(0, 1)), "GPU");
        expect_refused(attend_one(table(0, 1), 2, 1.0f), "GPU");
        end_sequence();
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

START_TEST(fixed_addresses_on_a_gpu_are_refused) {
        const struct kvd_space_options fixed = {.flags = KVD_SPACE_FIXED};

        start_daemon();
        ck_assert_int_eq(kvd_space_open(handle, "fixed", &small, &fixed, &space), -ENOTSUP);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "KVD_SPACE_FIXED"));
        stop_daemon();
}
END_TEST

/* ---- daemons and threads --------------------------------------------------------------------- */

/* Takes blocks until one is the new daemon's: the library's stock is the old daemon's. */
static struct kvd_block alloc_of_another_view(struct kvd_block *others, uint32_t *n,
                                              uint32_t room) {
        for (*n = 0; *n < room;) {
                int r = kvd_alloc(space, 1, others + *n);

                if (r == 1 && others[(*n)++].view != sequence.pin.view)
                        return others[*n - 1];
        }
        ck_abort_msg("all blocks are of the old daemon");
}

/*
 * The old pool's blocks can still be used. The new daemon's blocks have another view, in which an
 * id names another block.
 */
START_TEST(a_table_outlives_its_daemon) {
        struct kvd_block others[400], fresh;
        struct history h;
        struct kvd_table t;
        uint32_t n;

        start_daemon();
        open_space(&small);
        start_sequence(0, 12);
        h = new_history(12);
        for (uint32_t layer = 0; layer < 2; layer++)
                write_tokens(layer, &h, 0, 9);
        seal_blocks(2);
        instance_kill(&server);
        instance_again(&server, SETTINGS("daemon.segment=2M"));
        fresh = alloc_of_another_view(others, &n, ARRAY_SIZE(others));
        memset(fresh.data, 0xff, kvd_block_bytes(&small));
        write_tokens(1, &h, 9, 1);
        expect_attention(1, &h, 4, 9, 1);
        t = (struct kvd_table){fresh.view, &fresh.id, 1, 0, 1};
        ck_assert_int_eq(write_one(0, t), 0);
        ck_assert_float_eq(((float *)fresh.data)[0], 0.0f);
        kvd_free(space, n, others);
        end_sequence();
        free_history(&h);
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

/* With a sanitizer mallinfo2() returns 0, and the sanitizer finds leaks by itself. */
START_TEST(scratch_memory_is_reused) {
        struct history h;
        size_t bytes = 0;

        start_daemon();
        open_space(&small);
        start_sequence(0, 12);
        h = new_history(12);
        for (uint32_t layer = 0; layer < 2; layer++)
                write_tokens(layer, &h, 0, 12);
        for (uint32_t i = 0; i < 1000; i++) {
                expect_attention(i % 2, &h, 4, i % 8, 1 + i % 4);
                if (i == 500) /* by now each was called with the largest exact part */
                        bytes = mallinfo2().uordblks;
        }
        ck_assert_uint_eq(mallinfo2().uordblks, bytes);
        end_sequence();
        free_history(&h);
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

static void *attend_often(void *history) {
        for (int i = 0; i < 200; i++)
                expect_attention(i % 2, history, 4, 9, 1 + i % 3);
        return NULL;
}

START_TEST(threads_share_a_space) {
        pthread_t threads[6];
        struct history h;

        start_daemon();
        open_space(&small);
        start_sequence(0, 12);
        h = new_history(12);
        for (uint32_t layer = 0; layer < 2; layer++)
                write_tokens(layer, &h, 0, 12);
        for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
                ck_assert_int_eq(pthread_create(threads + i, NULL, attend_often, &h), 0);
        for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
                ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
        end_sequence();
        free_history(&h);
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

static pthread_barrier_t all_in;

static void *calloc_together(size_t n, size_t bytes) {
        pthread_barrier_wait(&all_in);
        return kvd_sys_real.calloc(n, bytes);
}

static void *attend_once(void *history) {
        expect_attention(0, history, 4, 9, 2);
        return NULL;
}

/* A space keeps scratch memory for four calls. */
START_TEST(more_threads_than_scratches_share_a_space) {
        struct kvd_sys table = kvd_sys_real;
        pthread_t threads[6];
        struct history h;

        start_daemon();
        open_space(&small);
        start_sequence(0, 12);
        h = new_history(12);
        write_tokens(0, &h, 0, 12);
        table.calloc = calloc_together;
        pthread_barrier_init(&all_in, NULL, ARRAY_SIZE(threads));
        sys = &table;
        for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
                ck_assert_int_eq(pthread_create(threads + i, NULL, attend_once, &h), 0);
        for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
                ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
        sys = &kvd_sys_real;
        expect_attention(0, &h, 4, 9, 2);
        end_sequence();
        free_history(&h);
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

START_TEST(a_forked_child_is_refused) {
        struct kvd_table t;
        int status;
        pid_t child;

        start_daemon();
        open_space(&small);
        start_sequence(0, 4);
        t = table(0, 1);
        child = fork();
        if (child == 0)
                _exit(write_one(0, t) == -ECHILD && attend_one(t, 2, 1.0f) == -ECHILD ? 0 : 1);
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert_int_eq(status, 0);
        end_sequence();
        space = kvd_space_close(space);
        stop_daemon();
}
END_TEST

SUITE("attend",
      WHEN(on_gpu(), LOOPS(2, blocks_on_a_gpu_are_refused),
           TESTS(fixed_addresses_on_a_gpu_are_refused)),
      WHEN(!on_gpu(), LOOPS(10, attention_is_right),
           TESTS(what_has_no_place_is_refused, a_sealed_block_is_not_written_to,
                 other_contents_are_refused, a_table_outlives_its_daemon, scratch_memory_is_reused,
                 threads_share_a_space, more_threads_than_scratches_share_a_space),
           WHEN(!emulated("MADV_WIPEONFORK has no effect"), TESTS(a_forked_child_is_refused))))
