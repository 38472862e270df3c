/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvd_batch_attention against the processor's attention over the same sequences: each test does the
 * same in a space in host memory and in one on a GPU, each with a daemon of its own, and compares
 * what the requests get. The blocks' bytes are the same, copied from the host.
 */

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "client/internal.h"
#include "client/kvd_attend.h"
#include "client/kvd_cuda.h"
#include "client/methods/batch.h"
#include "client/reader.h"
#include "ipc/base/cuda.h"
#include "kernels/ops.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

enum {
        LAYERS = 2,
        HEADS = 2,
        QUERIES = 4,
        DIM = 16,
        TOKENS = 16,
        ROW = HEADS * DIM,
        WIDTH = QUERIES * DIM,
        MOST = 12,    /* requests, and entries of one */
        MOST_NEW = 40 /* tokens of a step */
};
#define SCALE 0.3f

static const float frequencies[DIM / 2] = {1.0f, 0.5f, 0.25f, 0.1f, 0.05f, 0.02f, 0.01f, 0.001f};

/* The same in host memory (0) and on a GPU (1). */
static struct world {
        struct instance server;
        kvd *handle;
        kvd_space *space;
} worlds[2];

struct request {
        kvd_sequence *sequence[2];
        kvd_reader *reader[2];
        struct kvd_block tail[2][3];
        uint32_t ids[2][3];
        uint32_t first, n; /* of its table */
        float mass[2][MOST];
};

static const struct kvd_cuda *cuda;
static cu_context context;
static cu_stream stream;
static kvd_batch *batch;
static struct request requests[MOST];
static uint32_t n_requests, dtype;
static uint64_t state;

static float random_float(void) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (float)((double)(state >> 33) / (UINT32_C(1) << 30) - 1.0);
}

#define OK(call) ck_assert_msg((call) == 0, "%s: %s", #call, kvd_error())
#define DRIVER(call) ck_assert_int_eq(call, CU_OK)

/* ---- two worlds ------------------------------------------------------------------------------ */

static struct kvd_geometry geometry_of(uint32_t number, uint32_t order) {
        return (struct kvd_geometry){.layers = LAYERS,
                                     .kv_heads = HEADS,
                                     .head_dim = DIM,
                                     .block_tokens = TOKENS,
                                     .dtype = number,
                                     .order = order,
                                     .vocab = 100};
}

static void open_world(struct world *w, uint32_t number, uint32_t order, const char *backend) {
        const struct kvd_geometry geometry = geometry_of(number, order);

        if (w->server.dir[0])
                instance_again(&w->server, SETTINGS(backend, "daemon.segment=2M"));
        else
                instance_start(&w->server, SETTINGS(backend, "daemon.segment=2M"));
        OK(kvd_open(w->server.socket, &w->handle));
        OK(kvd_space_open(w->handle, "space", &geometry, NULL, &w->space));
}

static void make_batch(uint32_t numbers) {
        const struct kvd_batch_options options = {.heads = QUERIES,
                                                  .dtype = numbers,
                                                  .scale = SCALE,
                                                  .frequencies = frequencies};

        OK(kvd_batch_new(worlds[1].space, &options, &batch));
}

static void start(uint32_t number, uint32_t order, uint32_t numbers) {
        struct kvd_place place;

        dtype = numbers;
        state = 3;
        open_world(&worlds[0], number, order, "daemon.backend=host");
        open_world(&worlds[1], number, order, "daemon.backend=cuda");
        OK(kvd_space_place(worlds[1].space, &place));
        cuda = kvd_cuda_load(NULL);
        DRIVER(cuda->cuDevicePrimaryCtxRetain(&context, place.device));
        DRIVER(cuda->cuCtxPushCurrent(context));
        DRIVER(cuda->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
        make_batch(numbers);
}

static void set(const char *name, double value) {
        for (uint32_t w = 0; w < 2; w++)
                OK(kvd_space_set(worlds[w].space, name, value));
}

static void drop(struct request *r) {
        for (uint32_t w = 0; w < 2; w++) {
                kvd_reader_free(r->reader[w]);
                kvd_sequence_close(r->sequence[w]);
                kvd_free(worlds[w].space, ARRAY_SIZE(r->tail[w]), r->tail[w]);
        }
        *r = (struct request){0};
}

static void stop(void) {
        batch = kvd_batch_free(batch);
        while (n_requests)
                drop(&requests[--n_requests]);
        for (uint32_t w = 0; w < 2; w++) {
                kvd_space_close(worlds[w].space);
                kvd_close(worlds[w].handle);
                instance_end_clean(&worlds[w].server);
        }
        DRIVER(cuda->cuStreamDestroy(stream));
        DRIVER(cuda->cuDevicePrimaryCtxRelease(0));
}

/* ---- requests -------------------------------------------------------------------------------- */

static void to_gpu(void *to, const void *from, size_t bytes) {
        DRIVER(cuda->cuMemcpyHtoDAsync((cu_address)(uintptr_t)to, from, bytes, stream));
        DRIVER(cuda->cuStreamSynchronize(stream));
}

static float direction(uint32_t d) {
        return d % 3 == 0 ? 1 : -1;
}

/* Fills a block of each world alike. The keys of slot `planted` are long, in one direction. */
static void fill(struct kvd_block *host, struct kvd_block *gpu, uint32_t planted) {
        uint64_t bytes = worlds[0].space->view->ix->block_bytes;
        struct kvd_table t = {host->view, &host->id, 1, 0, TOKENS};
        float k[TOKENS * ROW], v[TOKENS * ROW];

        for (uint32_t layer = 0; layer < LAYERS; layer++) {
                for (uint32_t i = 0; i < TOKENS * ROW; i++) {
                        k[i] = i / ROW == planted ? 6 * direction(i % DIM) : random_float();
                        v[i] = random_float();
                }
                OK(kvd_paged_write(worlds[0].space, layer, &t, k, v, ROW));
        }
        to_gpu(gpu->data, host->data, bytes);
}

static void append(struct request *r, uint32_t n_tokens, uint32_t planted) {
        static const uint32_t tokens[TOKENS] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7};
        struct kvd_block blocks[2];

        for (uint32_t w = 0; w < 2; w++)
                ck_assert_int_eq(kvd_alloc(worlds[w].space, 1, &blocks[w]), 1);
        fill(&blocks[0], &blocks[1], planted);
        for (uint32_t w = 0; w < 2; w++)
                ck_assert_int_eq(kvd_sequence_append(r->sequence[w], 1, &blocks[w], tokens,
                                                     n_tokens),
                                 1);
}

/* A request of n new tokens from position first of its table on, behind n_entries full entries. */
static struct request *add(uint32_t n_entries, uint32_t first, uint32_t n) {
        struct request *r = &requests[n_requests++];

        r->first = first;
        r->n = n;
        for (uint32_t w = 0; w < 2; w++)
                for (uint32_t i = 0; i < ARRAY_SIZE(r->tail[w]); i++) {
                        ck_assert_int_eq(kvd_alloc(worlds[w].space, 1, &r->tail[w][i]), 1);
                        r->ids[w][i] = r->tail[w][i].id;
                }
        for (uint32_t i = 0; i < ARRAY_SIZE(r->tail[0]); i++)
                fill(&r->tail[0][i], &r->tail[1][i], TOKENS);
        for (uint32_t w = 0; w < 2 && n_entries; w++)
                OK(kvd_sequence_open(worlds[w].space, MOST, &r->sequence[w]));
        for (uint32_t i = 0; i < n_entries; i++)
                append(r, TOKENS, TOKENS);
        return r;
}

static struct kvd_table table_of(const struct request *r, uint32_t w) {
        return (struct kvd_table){r->tail[w]->view, r->ids[w], ARRAY_SIZE(r->ids[w]), r->first,
                                  r->n};
}

static void add_readers(struct request *r) {
        const struct kvd_reader_options options = {.heads = QUERIES,
                                                   .scale = SCALE,
                                                   .frequencies = frequencies,
                                                   .timeout_ns = UINT64_C(600000000000)};

        for (uint32_t w = 0; w < 2; w++)
                OK(kvd_reader_new(r->sequence[w], &options, &r->reader[w]));
}

/* ---- a step in both worlds ------------------------------------------------------------------- */

static float queries[MOST_NEW][WIDTH];

/* Of numbers that the batch's type has exactly, so that both worlds see the same. */
static void choose_queries(uint32_t n, float length) {
        for (uint32_t i = 0; i < n * WIDTH; i++)
                queries[i / WIDTH][i % WIDTH] = roundf(random_float() * 64) / 64 * length;
}

/* They need what is planted. */
static void choose_needing(uint32_t n) {
        for (uint32_t i = 0; i < n * WIDTH; i++)
                queries[i / WIDTH][i % WIDTH] = direction(i % DIM);
}

static void store(uint8_t *to, const float *from, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                kvd_ops_pick("scalar")->write_row(to + (size_t)i * (dtype == KVD_F32 ? 4 : 2),
                                                  from + i, 1, (enum kvd_number)dtype);
}

static void load(float *to, const uint8_t *from, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                kvd_ops_pick("scalar")->read_row(to + i,
                                                 from + (size_t)i * (dtype == KVD_F32 ? 4 : 2), 1,
                                                 (enum kvd_number)dtype);
}

static void attend_on_host(uint32_t layer, float (*out)[WIDTH]) {
        const struct kvd_heads heads = {.heads = QUERIES, .scale = SCALE};

        for (uint32_t i = 0, at = 0; i < n_requests; at += requests[i++].n) {
                struct request *r = &requests[i];
                struct kvd_table t = table_of(r, 0);
                struct kvd_seen seen = {.sequence = r->sequence[0],
                                        .frequencies = frequencies,
                                        .mass = r->mass[0]};

                if (r->reader[0])
                        OK(kvd_reader_attention(r->reader[0], layer, &t, &heads, queries[at], WIDTH,
                                                out[at], WIDTH));
                else if (r->sequence[0])
                        OK(kvd_sequence_attention(&seen, layer, &t, &heads, queries[at], WIDTH,
                                                  out[at], WIDTH));
                else
                        OK(kvd_paged_attention(worlds[0].space, layer, &t, &heads, queries[at],
                                               WIDTH, out[at], WIDTH));
        }
}

/* Rows have space between them, which must stay as it is. */
static int attend_on_gpu(uint32_t layer, uint32_t n, float (*out)[WIDTH]) {
        size_t row = WIDTH + 8, number = dtype == KVD_F32 ? 4 : 2, bytes = n * row * number;
        uint8_t memory[MOST_NEW * (WIDTH + 8) * 4];
        cu_address q, to;
        int r;

        memset(memory, 0x55, sizeof memory);
        DRIVER(cuda->cuMemAlloc(&q, bytes));
        DRIVER(cuda->cuMemAlloc(&to, bytes));
        to_gpu((void *)(uintptr_t)to, memory, bytes);
        for (uint32_t i = 0; i < n; i++)
                store(memory + i * row * number, queries[i], WIDTH);
        to_gpu((void *)(uintptr_t)q, memory, bytes);
        r = kvd_batch_attention(batch, layer, (void *)(uintptr_t)q, row, (void *)(uintptr_t)to, row,
                                stream);
        DRIVER(cuda->cuMemcpyDtoHAsync(memory, to, bytes, stream));
        DRIVER(cuda->cuStreamSynchronize(stream));
        for (uint32_t i = 0; r == 0 && i < n; i++) {
                load(out[i], memory + i * row * number, WIDTH);
                for (size_t k = WIDTH * number; k < row * number; k++)
                        ck_assert_uint_eq(memory[i * row * number + k], 0x55);
        }
        DRIVER(cuda->cuMemFree(q));
        DRIVER(cuda->cuMemFree(to));
        return r;
}

static int begin(void) {
        struct kvd_request list[MOST];

        for (uint32_t i = 0; i < n_requests; i++) {
                struct request *r = &requests[i];
                uint32_t n;

                memset(r->mass, 0, sizeof r->mass);
                list[i] = (struct kvd_request){table_of(r, 1), r->sequence[1], r->reader[1],
                                               i % 4 == 1 ? NULL : r->mass[1]};
                for (uint32_t w = 0; w < 2 && r->reader[w]; w++) {
                        kvd_sequence_entries(r->sequence[w], &n);
                        kvd_reader_begin(r->reader[w], r->first + r->n, r->n);
                }
        }
        return kvd_batch_begin(batch, n_requests, list, stream);
}

static void compare(uint32_t n, float (*expected)[WIDTH], float (*out)[WIDTH]) {
        float tolerance = dtype == KVD_F32 ? 2e-5f : dtype == KVD_F16 ? 2e-3f : 1.5e-2f;

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t k = 0; k < WIDTH; k++)
                        ck_assert_msg(fabsf(out[i][k] - expected[i][k]) <= tolerance,
                                      "token %u, element %u: %g on the GPU, %g on the host", i, k,
                                      (double)out[i][k], (double)expected[i][k]);
}

static void compare_masses(const struct request *r) {
        const float *host = r->reader[0] ? reader_mass(r->reader[0]) : r->mass[0];
        const float *gpu = r->reader[0] ? reader_mass(r->reader[1]) : r->mass[1];
        uint32_t n;

        if (!host || !r->sequence[0] || (!r->reader[0] && (r - requests) % 4 == 1))
                return;
        kvd_sequence_entries(r->sequence[0], &n);
        for (uint32_t i = 0; i < n; i++)
                ck_assert_float_eq_tol(gpu[i], host[i], 1e-4f);
}

static uint32_t count_new(void) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < n_requests; i++)
                n += requests[i].n;
        return n;
}

/* What the requests get must be the same in both worlds. length: of queries; 0: needing ones. */
static void step(float length) {
        float expected[MOST_NEW][WIDTH], out[MOST_NEW][WIDTH];
        uint32_t n = count_new();

        OK(begin());
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
                if (length > 0)
                        choose_queries(n, length);
                else
                        choose_needing(n);
                attend_on_host(layer, expected);
                OK(attend_on_gpu(layer, n, out));
                compare(n, expected, out);
        }
        OK(kvd_batch_end(batch, stream));
        for (uint32_t i = 0; i < n_requests; i++) {
                compare_masses(&requests[i]);
                for (uint32_t w = 0; w < 2 && requests[i].reader[w]; w++)
                        ck_assert_int_ge(kvd_reader_end(requests[i].reader[w]), 0);
        }
}

static void begin_decoding(struct request *r) {
        for (uint32_t w = 0; w < 2; w++) {
                ck_assert_int_ge(kvd_reader_decode(r->reader[w], r->first + r->n), 0);
                ck_assert_int_ge(kvd_sequence_wait(r->sequence[w], UINT64_C(600000000000)), 0);
        }
        r->first += r->n;
        r->n = 1;
}

/* ---- sequences as they are ------------------------------------------------------------------- */

static void change(struct request *r, uint32_t entry, int32_t delta, bool missing) {
        for (uint32_t w = 0; w < 2; w++) {
                struct kvd_entry *e = &r->sequence[w]->entries[entry];

                e->delta = delta;
                if (missing)
                        e->data = NULL;
        }
}

/* As MemShare and KVReviver leave them. The blocks that are missing are given back at the end. */
static void change_all(void) {
        change(&requests[3], 1, 5, false);
        change(&requests[3], 2, -9, false);
        change(&requests[5], 0, 5, false);
        change(&requests[5], 2, 7, false);
}

START_TEST(requests_see_the_same_as_on_the_processor) {
        static const uint32_t numbers[] = {KVD_F32, KVD_F16,  KVD_BF16, KVD_Q8,
                                           KVD_Q4,  KVD_E4M3, KVD_F32,  KVD_BF16};
        static const uint32_t of_queries[] = {KVD_F32, KVD_F16, KVD_BF16, KVD_F32,
                                              KVD_F16, KVD_F32, KVD_BF16, KVD_F32};
        struct kvd_entry gone[2];

        start(numbers[_i / 2], _i % 2 ? KVD_HND : KVD_NHD, of_queries[_i / 2]);
        add(0, 9, 1);                     /* no sequence */
        add(4, 0, 1);                     /* the first token behind it */
        append(add(2, 33, 1), 3, TOKENS); /* an entry that is not full */
        add(4, 20, 1);
        add(3, 14, 5); /* from here on, several new tokens */
        add(4, 0, 7);
        append(add(1, 3, 1), 9, TOKENS);
        add(0, 0, 17);
        step(1);
        change_all();
        step(3);
        for (uint32_t w = 0; w < 2; w++)
                gone[w] = requests[3].sequence[w]->entries[0];
        change(&requests[3], 0, 0, true);
        step(2);
        for (uint32_t w = 0; w < 2; w++)
                requests[3].sequence[w]->entries[0] = gone[w];
        n_requests = 4; /* decoding only; the others have ended */
        step(1);
        n_requests = 8;
        stop();
}
END_TEST

/* ---- what the methods leave ------------------------------------------------------------------ */

START_TEST(tokens_that_keydiff_keeps_are_seen) {
        start(_i ? KVD_F16 : KVD_F32, KVD_HND, KVD_F32);
        set("keydiff", 1);
        add(6, 3, 1);
        add(5, 0, 4);
        for (uint32_t i = 0; i < n_requests; i++)
                for (uint32_t w = 0; w < 2; w++) {
                        kvd_sequence *s = requests[i].sequence[w];

                        ck_assert_int_gt(kvd_sequence_compact(s, 0, 4, 2 * TOKENS - 5, NULL), 0);
                        ck_assert_int_gt(kvd_sequence_wait(s, UINT64_C(600000000000)), 0);
                        ck_assert_uint_eq(s->entries[1].n_tokens, TOKENS - 5);
                        ck_assert_ptr_null(s->entries[2].data);
                }
        step(2);
        stop();
}
END_TEST

START_TEST(what_a_reader_selects_is_seen) {
        struct request *r;

        start(_i ? KVD_F16 : KVD_F32, KVD_HND, KVD_F32);
        set("hshare", 1);
        set("hshare.sinks", 4);
        set("hshare.recent", 8);
        set("hshare.top", 12);
        set("hshare.dense_layers", _i);
        add(2, 7, 1);
        r = add(8, 3, 20);
        for (uint32_t w = 0; w < 2; w++)
                ck_assert_int_ge(kvd_sequence_wait(r->sequence[w], UINT64_C(600000000000)), 0);
        add_readers(r);
        step(1); /* the prompt */
        begin_decoding(r);
        for (uint32_t i = 0; i < 9; i++, r->first++)
                step(2);
        for (uint32_t w = 0; w < 2; w++) {
                struct kvd_reader_stats stats;

                kvd_reader_stats(r->reader[w], &stats);
                ck_assert_uint_gt(stats.selections, 0);
        }
        stop();
}
END_TEST

static void cool(struct request *r, uint32_t entry) {
        for (uint32_t w = 0; w < 2; w++) {
                if (r->sequence[w]->entries[entry].data)
                        ck_assert_int_eq(kvd_sequence_cool(r->sequence[w], 1, &entry,
                                                           KVD_COOL_SPILL),
                                         1);
                ck_assert_int_ge(kvd_sequence_wait(r->sequence[w], UINT64_C(600000000000)), 0);
                ck_assert_ptr_null(r->sequence[w]->entries[entry].data);
        }
}

/* A request behind 8 entries, of which few stay. The third one has what needing queries need. */
static struct request *start_reviver(void) {
        struct request *r;

        start(KVD_F32, KVD_HND, KVD_F32);
        set("kvreviver", 1);
        set("kvreviver.wanted", 0.3);
        add(2, 7, 1);
        r = add(0, 3, 6);
        for (uint32_t w = 0; w < 2; w++)
                OK(kvd_sequence_open(worlds[w].space, MOST, &r->sequence[w]));
        for (uint32_t i = 0; i < 8; i++)
                append(r, TOKENS, i == 3 ? 2 : TOKENS + 1);
        for (uint32_t w = 0; w < 2; w++)
                ck_assert_int_ge(kvd_sequence_wait(r->sequence[w], UINT64_C(600000000000)), 0);
        add_readers(r);
        step(0.1f);
        begin_decoding(r);
        cool(r, 3);
        return r;
}

START_TEST(blocks_that_queries_need_come_back) {
        struct request *r = start_reviver();

        step(0.01f);
        ck_assert_ptr_null(r->sequence[1]->entries[3].data);
        for (uint32_t i = 0; i < 5; i++, r->first++)
                step(0); /* comes back in the first layer, between two layers' attention */
        for (uint32_t w = 0; w < 2; w++) {
                struct kvd_reader_stats stats;

                kvd_reader_stats(r->reader[w], &stats);
                ck_assert_uint_eq(stats.misses, 1);
                ck_assert_ptr_nonnull(r->sequence[w]->entries[3].data);
        }
        stop();
}
END_TEST

static cu_result no_memory(cu_address *ret, size_t bytes) {
        return CU_OUT_OF_MEMORY;
}

/* An entry is shared in the middle of a step, whose tables grow by rotations. */
START_TEST(memory_that_runs_out_in_a_step_is_asked_for_again) {
        struct request *r = start_reviver();
        const struct kvd_cuda *driver = batch->gpu.cuda;
        float expected[MOST_NEW][WIDTH], out[MOST_NEW][WIDTH];
        struct kvd_cuda full = *driver;

        full.cuMemAlloc = no_memory;
        OK(begin());
        change(r, 0, 5, false);
        choose_queries(2, 0.01f);
        batch->gpu.cuda = &full;
        for (uint32_t i = 0; i < 2; i++)
                ck_assert_int_eq(attend_on_gpu(1, 2, out), -ENOMEM);
        batch->gpu.cuda = driver;
        attend_on_host(1, expected);
        OK(attend_on_gpu(1, 2, out));
        compare(2, expected, out);
        OK(kvd_batch_end(batch, stream));
        change(r, 0, 0, false);
        stop();
}
END_TEST

/* ---- a daemon that is killed ----------------------------------------------------------------- */

static int attend_again(void) {
        float out[MOST_NEW][WIDTH];
        uint32_t n = count_new();

        choose_needing(n);
        return attend_on_gpu(0, n, out);
}

/* What is here is seen; a block that is needed and gone is an error, and not left out. */
START_TEST(a_step_outlives_its_daemon) {
        struct request *r = start_reviver();

        instance_kill(&worlds[1].server);
        step(0.01f);
        OK(begin());
        ck_assert_int_lt(attend_again(), 0);
        n_requests = 1; /* the other request goes on */
        OK(begin());
        OK(attend_again());
        OK(kvd_batch_end(batch, stream));
        n_requests = 2;
        ck_assert_ptr_null(r->sequence[1]->entries[3].data);
        instance_again(&worlds[1].server, SETTINGS("daemon.backend=cuda", "daemon.segment=2M"));
        stop();
}
END_TEST

/* Uses the blocks that the client has in reserve, until it asks a daemon for some. */
static void meet_next_daemon(const void *view) {
        struct kvd_block block;

        do {
                WAIT_UNTIL(kvd_alloc(worlds[1].space, 1, &block) == 1);
        } while (block.view == view);
        kvd_free(worlds[1].space, 1, &block);
}

START_TEST(blocks_of_two_daemons_are_not_mixed) {
        start(KVD_F32, KVD_HND, KVD_F32);
        add(2, 7, 1);
        step(1);
        instance_kill(&worlds[1].server);
        instance_again(&worlds[1].server, SETTINGS("daemon.backend=cuda", "daemon.segment=2M"));
        meet_next_daemon(requests[0].tail[1]->view);
        add(0, 7, 1); /* of the next daemon */
        ck_assert_int_eq(begin(), -ESTALE);
        ck_assert_int_eq(attend_again(), -EINVAL); /* no step has begun */
        n_requests = 1;
        step(1); /* the old blocks are still there */
        requests[2] = requests[0];
        requests[0] = requests[1];
        step(1);
        requests[1] = requests[0];
        requests[0] = requests[2];
        n_requests = 2;
        stop();
}
END_TEST

/* ---- refusals -------------------------------------------------------------------------------- */

static void expect(int r, int error, const char *words) {
        ck_assert_int_eq(r, error);
        ck_assert_msg(strstr(kvd_error(), words), "'%s' says nothing of '%s'", kvd_error(), words);
}

static int try_new(uint32_t world, struct kvd_batch_options options) {
        kvd_batch *other = NULL;
        int r = kvd_batch_new(worlds[world].space, &options, &other);

        ck_assert_ptr_null(other);
        return r;
}

START_TEST(what_is_not_a_batch_is_refused) {
        struct kvd_batch_options options = {.heads = QUERIES, .dtype = KVD_F32, .scale = SCALE};

        start(KVD_F32, KVD_HND, KVD_F32);
        expect(try_new(0, options), -EINVAL, "not on a GPU");
        options.heads = 3;
        expect(try_new(1, options), -EINVAL, "3 query heads");
        options.heads = 129 * HEADS;
        expect(try_new(1, options), -EINVAL, "129 of them");
        options.heads = QUERIES;
        options.dtype = KVD_Q8;
        expect(try_new(1, options), -EINVAL, "f32, f16 or bf16");
        options.dtype = KVD_F32;
        options.scale = 0;
        expect(try_new(1, options), -EINVAL, "scale");
        ck_assert_ptr_null(kvd_batch_free(NULL));
        stop();
}
END_TEST

START_TEST(what_is_no_step_is_refused) {
        struct request *r;
        kvd_reader *reader;
        uint32_t id;

        start(KVD_F32, KVD_HND, KVD_F32);
        expect(kvd_batch_attention(batch, 0, NULL, WIDTH, NULL, WIDTH, stream), -EINVAL, "no step");
        OK(kvd_batch_end(batch, stream));
        expect(begin(), -EINVAL, "no requests");
        r = add(2, 7, 1);
        OK(begin());
        expect(kvd_batch_attention(batch, LAYERS, NULL, WIDTH, NULL, WIDTH, stream), -EINVAL,
               "layer 2");
        r->first = 3 * TOKENS;
        expect(begin(), -EINVAL, "table of 3 blocks");
        r->first = 7;
        id = r->ids[1][0];
        r->ids[1][0] = 1u << 30;
        expect(begin(), -EINVAL, "not mapped");
        r->ids[1][0] = id;
        add_readers(r);
        reader = r->reader[1];
        add(1, 0, 1)->reader[1] = reader;
        expect(begin(), -EINVAL, "another sequence");
        requests[1].reader[1] = NULL;
        expect(kvd_batch_begin(batch, 2,
                               (struct kvd_request[]){{table_of(r, 1), r->sequence[1], reader,
                                                       NULL},
                                                      {table_of(r, 1), r->sequence[1], NULL, NULL}},
                               stream),
               -EINVAL, "in two requests");
        OK(begin());
        kvd_reader_begin(reader, 9, 2);
        expect(kvd_batch_begin(batch, 1,
                               &(struct kvd_request){table_of(r, 1), r->sequence[1], reader, NULL},
                               stream),
               -EINVAL, "the reader's pass has 2");
        stop();
}
END_TEST

START_TEST(a_delta_needs_frequencies) {
        const struct kvd_batch_options options = {.heads = QUERIES,
                                                  .dtype = KVD_F32,
                                                  .scale = SCALE};

        start(KVD_F32, KVD_HND, KVD_F32);
        add(2, 7, 1);
        step(1);
        change(&requests[0], 1, 3, false);
        kvd_batch_free(batch);
        OK(kvd_batch_new(worlds[1].space, &options, &batch));
        expect(begin(), -EINVAL, "frequencies");
        stop();
}
END_TEST

static int capture_mode = CU_CAPTURE_MODE_RELAXED;

/* Functions for graphs, which kvd does not use. */
static cu_result capture(const char *name, void *argument) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW), *graph = NULL;
        cu_result (*capturing)(cu_stream, int), (*end)(cu_stream, void **), (*destroy)(void *);
        cu_result error;

        if (strcmp(name, "begin") == 0) {
                *(void **)&capturing = dlsym(driver, "cuStreamBeginCapture_v2");
                return capturing(argument, capture_mode);
        }
        *(void **)&end = dlsym(driver, "cuStreamEndCapture");
        *(void **)&destroy = dlsym(driver, "cuGraphDestroy");
        error = end(argument, &graph);
        return error ? error : destroy(graph);
}

/* A graph would repeat copies of tables that are valid for one step only. */
START_TEST(a_stream_that_is_captured_is_refused) {
        start(KVD_F32, KVD_HND, KVD_F32);
        add(2, 7, 1);
        OK(begin());
        DRIVER(capture("begin", stream));
        expect(begin(), -EBUSY, "captured");
        DRIVER(capture("end", stream));
        OK(begin());
        DRIVER(capture("begin", stream));
        expect(kvd_batch_attention(batch, 0, NULL, WIDTH, NULL, WIDTH, stream), -EBUSY, "captured");
        DRIVER(capture("end", stream));
        step(1);
        stop();
}
END_TEST

/* Of whatever mode: an engine's graphs know nothing of kvd. */
START_TEST(the_capture_of_another_stream_is_left_alone) {
        cu_stream other;

        start(KVD_F32, KVD_HND, KVD_F32);
        add(2, 7, 1);
        step(1);
        DRIVER(cuda->cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0));
        capture_mode = _i;
        DRIVER(capture("begin", other));
        batch = kvd_batch_free(batch);
        make_batch(KVD_F32);
        OK(begin());
        OK(kvd_batch_end(batch, stream));
        DRIVER(capture("end", other));
        step(1);
        DRIVER(cuda->cuStreamDestroy(other));
        stop();
}
END_TEST

/* As an engine's scheduler: it finds and publishes blocks of planes that its workers read. */
START_TEST(a_scheduler_maps_only_the_index) {
        const struct kvd_space_options options = {.flags = KVD_SPACE_INDEX_ONLY};
        static const uint32_t tokens[TOKENS] = {7, 8, 9};
        const struct kvd_geometry geometry = geometry_of(KVD_F32, KVD_HND);
        struct kvd_pin pin = {0}, found = {0};
        struct kvd_layer_view layer;
        struct kvd_block block;
        kvd_space *scheduler;
        kvd_sequence *none;
        uint32_t id;
        kvd *handle;

        start(KVD_F32, KVD_HND, KVD_F32);
        OK(kvd_open(worlds[1].server.socket, &handle));
        OK(kvd_space_open(handle, "space", &geometry, &options, &scheduler));
        ck_assert_int_eq(kvd_alloc(scheduler, 1, &block), 1);
        id = block.id;
        ck_assert_int_eq(kvd_seal(scheduler, &pin, 1, &block, tokens, TOKENS), 1);
        ck_assert_int_ge(kvd_catch_up(worlds[1].space), 0);
        ck_assert_int_eq(kvd_lookup(worlds[1].space, 0, tokens, TOKENS, &id, 1, &found), TOKENS);
        kvd_unpin(worlds[1].space, &found);
        kvd_unpin(scheduler, &pin);
        expect(kvd_sequence_open(scheduler, 4, &none), -EOPNOTSUPP, "maps only the index");
        expect(kvd_layer_view(scheduler, 0, &layer), -EOPNOTSUPP, "maps only the index");
        expect(kvd_batch_new(scheduler,
                             &(struct kvd_batch_options){.heads = QUERIES,
                                                         .dtype = KVD_F32,
                                                         .scale = SCALE},
                             &batch),
               -EOPNOTSUPP, "maps only the index");
        kvd_space_close(scheduler);
        kvd_close(handle);
        stop();
}
END_TEST

START_TEST(a_forked_child_has_no_batch) {
        pid_t pid;

        start(KVD_F32, KVD_HND, KVD_F32);
        add(2, 7, 1);
        OK(begin());
        pid = fork();
        if (pid == 0) {
                bool refused = kvd_batch_attention(batch, 0, NULL, WIDTH, NULL, WIDTH, stream) ==
                               -ECHILD;

                kvd_batch_free(batch);
                _exit(refused ? 0 : 1);
        }
        ck_assert_int_eq(wait_status(pid), 0);
        step(1);
        stop();
}
END_TEST

SUITE("batch", LOOPS(16, requests_see_the_same_as_on_the_processor),
      LOOPS(2, tokens_that_keydiff_keeps_are_seen, what_a_reader_selects_is_seen),
      LOOPS(CU_CAPTURE_MODE_RELAXED + 1, the_capture_of_another_stream_is_left_alone),
      TESTS(blocks_that_queries_need_come_back, memory_that_runs_out_in_a_step_is_asked_for_again,
            a_step_outlives_its_daemon, blocks_of_two_daemons_are_not_mixed,
            what_is_not_a_batch_is_refused, what_is_no_step_is_refused, a_delta_needs_frequencies,
            a_stream_that_is_captured_is_refused, a_scheduler_maps_only_the_index,
            a_forked_child_has_no_batch))
