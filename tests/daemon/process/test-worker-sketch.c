/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks leave and come back: as exact copies with checksums, and by a sketch, which is compared
 * with one that the test computes.
 */

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "ipc/base/sequence.h"
#include "ipc/base/util.h"
#include "kernels/sketch.h"
#include "tests/daemon/process/owner.h"
#include "tests/lib/suite.h"

#define BLOCKS 8u    /* blocks with contents */
#define FRESH BLOCKS /* the first of as many blocks to revive into */

enum { UNSIGNED, SIGNED, CENTRED };
enum { UNIFORM, PERMUTATION };

static struct owner o;

static const struct kvd_shape geometries[] = {
        {.layers = 2,
         .kv_heads = 2,
         .head_dim = 24,
         .dtype = KVD_F32,
         .order = KVD_HND,
         .vocab = 1000},
        {.layers = 2,
         .kv_heads = 3,
         .head_dim = 17,
         .dtype = KVD_F16,
         .order = KVD_NHD,
         .vocab = 1000,
         .block_tokens = 5,
         .state_width = 9},
        {.layers = 2,
         .kv_heads = 2,
         .head_dim = 66,
         .dtype = KVD_Q8,
         .order = KVD_NHD,
         .vocab = 1000,
         .block_tokens = 5},
};

static void start(int which) {
        owner_start(&o, &geometries[which], 2 * BLOCKS);
        for (uint32_t i = 0; i < BLOCKS; i++)
                owner_fill(&o, i, i + 1);
}

static void set(enum kvd_setting which, double value) {
        kvd_setting_put(o.ix->settings, which, value);
}

static struct owner_job *new_job(uint32_t kind, uint32_t n) {
        static struct owner_job job;

        job = (struct owner_job){.kind = kind, .n_items = n};
        return &job;
}

/* Spills blocks 0 to n - 1 to slots of other numbers; vague: to the sketch, too, with ordinals. */
static struct owner_job *spill_job(uint32_t n, bool vague) {
        struct owner_job *job = new_job(KVD_JOB_SPILL, n);

        job->sketch = vague;
        for (uint32_t i = 0; i < n; i++) {
                job->items[i] = owner_item(&o, i);
                job->items[i].place = 20 - i;
                job->items[i].to_row = o.ix->capacity + 20 - i;
                job->items[i].ordinal = vague ? i * o.g.block_tokens : KVD_NO_ORDINAL;
        }
        return job;
}

static const struct kvd_spilled *spilled(void) {
        return (const struct kvd_spilled *)o.result;
}

static uint64_t checksum(uint32_t block) {
        return XXH3_64bits(owner_block(&o, block), o.ix->block_bytes);
}

static struct owner_job *copies_job(uint32_t kind, uint32_t n, bool vague) {
        struct owner_job *job = new_job(kind, n);

        job->sketch = vague;
        for (uint32_t i = 0; i < n; i++) {
                job->items[i] = owner_item(&o, FRESH + i);
                job->items[i].place = 20 - i;
                job->items[i].checksum = checksum(i);
                job->items[i].row = o.ix->capacity + 20 - i;
                job->items[i].to_row = FRESH + i;
                job->items[i].ordinal = vague ? i * o.g.block_tokens : KVD_NO_ORDINAL;
        }
        return job;
}

static uint32_t error_of(uint32_t i) {
        return ((const uint32_t *)o.result)[i];
}

static void expect_errors(uint32_t n, uint32_t error) {
        ck_assert_uint_eq(o.result_size, n * sizeof(uint32_t));
        for (uint32_t i = 0; i < n; i++)
                ck_assert_uint_eq(error_of(i), error);
}

/* ---- exact copies ---------------------------------------------------------------------------- */

START_TEST(a_copy_comes_back_byte_for_byte) {
        size_t bytes;

        start(_i);
        bytes = o.ix->block_bytes;
        ck_assert_uint_eq(owner_do(&o, spill_job(BLOCKS, false)), 0);
        ck_assert_uint_eq(o.result_size, BLOCKS * sizeof(struct kvd_spilled));
        for (uint32_t i = 0; i < BLOCKS; i++) {
                ck_assert_uint_eq(spilled()[i].error, 0);
                ck_assert_uint_eq(spilled()[i].checksum, checksum(i));
                ck_assert_mem_eq(o.spill + (20 - i) * bytes, owner_block(&o, i), bytes);
        }
        ck_assert_uint_eq(owner_do(&o, copies_job(KVD_JOB_REVIVE, BLOCKS, false)), 0);
        expect_errors(BLOCKS, 0);
        ck_assert_mem_eq(owner_block(&o, FRESH), owner_block(&o, 0), BLOCKS * bytes);
        owner_stop(&o);
}
END_TEST

START_TEST(a_copy_that_changed_is_told) {
        struct owner_job *job;

        start(0);
        ck_assert_uint_eq(owner_do(&o, spill_job(3, false)), 0);
        o.spill[19 * o.ix->block_bytes + o.ix->block_bytes - 1] ^= 1;
        job = copies_job(KVD_JOB_REVIVE, 3, false);
        job->items[2].place = OWNER_SPILLS; /* no such slot */
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(error_of(0), 0);
        ck_assert_uint_eq(error_of(1), EBADMSG);
        ck_assert_uint_eq(error_of(2), ENODATA);
        job = spill_job(2, false);
        job->items[1].ref = kvd_ref_make(1, 8); /* another generation */
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(spilled()[0].error, 0);
        ck_assert_uint_eq(spilled()[1].error, ESTALE);
        owner_stop(&o);
}
END_TEST

static uint8_t *row(uint32_t number) {
        return kvd_summary_row(&o.layout, o.summaries, number);
}

static uint64_t *stamp(uint32_t number) {
        return (uint64_t *)row(number);
}

/* The summary goes to the copy's row and back; a row that has none says so. */
START_TEST(a_summary_goes_along) {
        struct owner_job *job;
        size_t bytes;

        start(0);
        job = new_job(KVD_JOB_SUMMARISE, 1);
        job->items[0] = owner_item(&o, 0);
        ck_assert_uint_eq(owner_do(&o, job), 0);
        *stamp(o.ix->capacity + 19) = UINT64_C(3) << 32 | KVD_SUMMARY_MADE;
        ck_assert_uint_eq(owner_do(&o, spill_job(2, false)), 0);
        bytes = o.layout.row_bytes;
        ck_assert_mem_eq(row(0), row(o.ix->capacity + 20), bytes);
        ck_assert_uint_eq(*stamp(o.ix->capacity + 19), 0);
        ck_assert_uint_eq(owner_do(&o, copies_job(KVD_JOB_REVIVE, 2, false)), 0);
        ck_assert_mem_eq(row(0), row(FRESH), bytes);
        ck_assert_uint_eq(*stamp(FRESH + 1), 0);
        owner_stop(&o);
}
END_TEST

/* ---- the sketch ------------------------------------------------------------------------------ */

static void start_sketch(int which, int key_mode, int hash, uint32_t rows, uint32_t columns) {
        start(which);
        set(KVD_kvreviver_key_mode, key_mode);
        set(KVD_kvreviver_hash, hash);
        owner_sketch(&o, rows, columns);
}

static struct owner_job *vague_job(uint32_t n) {
        struct owner_job *job = copies_job(KVD_JOB_REVIVE, n, true);

        for (uint32_t i = 0; i < n; i++)
                job->items[i].flags = KVD_ENTRY_APPROX;
        return job;
}

struct expected {
        double *cells; /* [row][column][token's numbers] */
        double *mean;  /* [layer][head][dim] */
        uint32_t *places;
        uint32_t rows, columns, floats, n_tokens;
};

static double number(uint32_t token, int plane, uint32_t at) {
        uint32_t d = at % o.g.head_dim, lh = at / o.g.head_dim;

        return owner_stored(&o, owner_block(&o, token / o.g.block_tokens), lh / o.g.kv_heads, plane,
                            lh % o.g.kv_heads, token % o.g.block_tokens, d);
}

static double sign_of(const struct expected *e, uint32_t token, uint32_t r, int plane,
                      int key_mode) {
        uint32_t bit = plane                ? KVD_SKETCH_VALUE_SIGN :
                       key_mode == UNSIGNED ? 0 :
                                              KVD_SKETCH_KEY_SIGN;

        return e->places[token * e->rows + r] & bit ? -1 : 1;
}

static double *cell(const struct expected *e, uint32_t token, uint32_t r) {
        uint32_t column = e->places[token * e->rows + r] & KVD_SKETCH_COLUMN;

        return e->cells + ((size_t)r * e->columns + column) * e->floats;
}

static void expect_sums(struct expected *e, int plane, int key_mode) {
        memset(e->cells, 0, (size_t)e->rows * e->columns * e->floats * sizeof *e->cells);
        memset(e->mean, 0, e->floats * sizeof *e->mean);
        for (uint32_t t = 0; plane == 0 && key_mode == CENTRED && t < e->n_tokens; t++)
                for (uint32_t at = 0; at < e->floats; at++)
                        e->mean[at] += number(t, 0, at) / e->n_tokens;
        for (uint32_t t = 0; t < e->n_tokens; t++)
                for (uint32_t r = 0; r < e->rows; r++)
                        for (uint32_t at = 0; at < e->floats; at++)
                                cell(e, t, r)[at] += sign_of(e, t, r, plane, key_mode) *
                                                     (number(t, plane, at) - e->mean[at]);
}

static int order(const void *a, const void *b) {
        const double *x = a, *y = b;

        return (*x > *y) - (*x < *y);
}

static double median(const struct expected *e, uint32_t token, int plane, int key_mode,
                     uint32_t at) {
        double x[8];

        for (uint32_t r = 0; r < e->rows; r++)
                x[r] = sign_of(e, token, r, plane, key_mode) * cell(e, token, r)[at];
        qsort(x, e->rows, sizeof *x, order);
        return (x[(e->rows - 1) / 2] + x[e->rows / 2]) / 2 + e->mean[at];
}

static void place_tokens(struct expected *e, int hash) {
        const struct kvd_sketch_hash h = {hash == UNIFORM ? KVD_SKETCH_UNIFORM :
                                                            KVD_SKETCH_PERMUTATION,
                                          e->rows, e->columns, 99};
        uint64_t ordinals[BLOCKS * 16];

        for (uint32_t t = 0; t < e->n_tokens; t++)
                ordinals[t] = t;
        kvd_sketch_place(&h, ordinals, e->n_tokens, e->places);
}

static void expect_revived(int key_mode, int hash, uint32_t rows, uint32_t columns) {
        uint32_t floats = o.sketch->cell_floats, n_tokens = BLOCKS * o.g.block_tokens;
        struct expected e = {calloc((size_t)rows * columns * floats, sizeof(double)),
                             calloc(floats, sizeof(double)),
                             calloc((size_t)n_tokens * rows, sizeof(uint32_t)),
                             rows,
                             columns,
                             floats,
                             n_tokens};
        double tolerance = o.g.dtype == KVD_F32 ? 1e-4 : o.g.dtype == KVD_Q8 ? 1e-3 : 2e-2;

        place_tokens(&e, hash);
        for (int plane = 0; plane < 2; plane++) {
                expect_sums(&e, plane, key_mode);
                for (uint32_t t = 0; t < n_tokens; t++)
                        for (uint32_t at = 0; at < floats; at++) {
                                const uint8_t *block = owner_block(&o,
                                                                   FRESH + t / o.g.block_tokens);
                                uint32_t lh = at / o.g.head_dim, slot = t % o.g.block_tokens,
                                         layer = lh / o.g.kv_heads, head = lh % o.g.kv_heads;
                                double want = median(&e, t, plane, key_mode, at),
                                       got = owner_stored(&o, block, layer, plane, head, slot,
                                                          at % o.g.head_dim),
                                       half = owner_step(&o, block, layer, plane, head, slot) / 2;

                                ck_assert_msg(fabs(want - got) <= half + tolerance, "%g, not %g",
                                              got, want);
                        }
        }
        free(e.cells);
        free(e.mean);
        free(e.places);
}

/* Tokens collide: at least 2.2 per cell and row. All key modes and both hashes. */
START_TEST(a_sketch_gives_the_median) {
        int key_mode = _i % 3, hash = _i / 3 % 2, which = _i / 6;
        uint32_t rows = _i % 2 ? 3 : 4, columns = which ? 11 : 37;

        start_sketch(which, key_mode, hash, rows, columns);
        ck_assert_uint_eq(owner_do(&o, spill_job(BLOCKS, true)), 0);
        ck_assert_uint_eq(o.sketch->n_tokens, BLOCKS * o.g.block_tokens);
        ck_assert_uint_eq(o.sketch->state, KVD_SKETCH_IDLE);
        ck_assert_uint_eq(o.sketch->job, 1);
        memset(owner_block(&o, FRESH), 0x55, BLOCKS * o.ix->block_bytes);
        ck_assert_uint_eq(owner_do(&o, vague_job(BLOCKS)), 0);
        expect_errors(BLOCKS, 0);
        expect_revived(key_mode, hash, rows, columns);
        for (uint32_t i = 0; o.g.state_width && i < o.g.block_tokens * o.g.state_width * 2; i++)
                ck_assert_uint_eq(owner_block(&o, FRESH)[o.ix->block_bytes - 1 - i], 0);
        owner_stop(&o);
}
END_TEST

/*
 * With a column for each token, permutation hashing never collides, and floats come back exactly.
 */
START_TEST(without_collisions_it_is_exact) {
        start_sketch(0, SIGNED, PERMUTATION, 3, BLOCKS * 16);
        ck_assert_uint_eq(owner_do(&o, spill_job(BLOCKS, true)), 0);
        ck_assert_uint_eq(owner_do(&o, vague_job(BLOCKS)), 0);
        ck_assert_mem_eq(owner_block(&o, FRESH), owner_block(&o, 0), BLOCKS * o.ix->block_bytes);
        owner_stop(&o);
}
END_TEST

static float largest_cell(void) {
        const float *cells = (const float *)(o.sketch + 1) + o.sketch->cell_floats;
        size_t n = (size_t)2 * o.sketch->rows * o.sketch->columns * o.sketch->cell_floats;
        float most = 0;

        for (size_t i = 0; i < n; i++)
                most = MAX(most, fabsf(cells[i]));
        return most;
}

/* Subtracts exact copies, up to rounding; a block with a corrupt copy stays in the sketch. */
START_TEST(forgetting_takes_out_what_was_put_in) {
        struct owner_job *job;

        start_sketch(_i, CENTRED, PERMUTATION, 3, 7);
        ck_assert_uint_eq(owner_do(&o, spill_job(BLOCKS, true)), 0);
        ck_assert(largest_cell() > 1);
        job = copies_job(KVD_JOB_FORGET, BLOCKS, true);
        job->items[BLOCKS - 1].checksum ^= 1;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(error_of(0), 0);
        ck_assert_uint_eq(error_of(BLOCKS - 1), EBADMSG);
        ck_assert_uint_eq(o.sketch->n_tokens, o.g.block_tokens);
        job->items[0] = job->items[BLOCKS - 1];
        job->items[0].checksum ^= 1;
        job->n_items = 1;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        expect_errors(1, 0);
        ck_assert_uint_eq(o.sketch->n_tokens, 0);
        ck_assert_msg(largest_cell() < 1e-4f, "%g is left", (double)largest_cell());
        owner_stop(&o);
}
END_TEST

/*
 * Algorithm 3 of the paper subtracts an estimate. The tokens then read as 0, and others have
 * changed.
 */
START_TEST(forgetting_estimates_zeroes_the_median) {
        struct owner_job *job;

        start_sketch(0, UNSIGNED, UNIFORM, 3, 40);
        ck_assert_uint_eq(owner_do(&o, spill_job(BLOCKS, true)), 0);
        job = copies_job(KVD_JOB_FORGET, 1, true);
        job->items[0].flags = KVD_ENTRY_APPROX;
        job->items[0].place = UINT32_MAX;
        job->items[0].n_tokens = 1;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        expect_errors(1, 0);
        ck_assert_uint_eq(owner_do(&o, vague_job(1)), 0);
        for (uint32_t d = 0; d < o.g.head_dim; d++)
                ck_assert(fabs(owner_get(&o, owner_block(&o, FRESH), 1, 1, 1, 0, d)) < 1e-5);
        owner_stop(&o);
}
END_TEST

/*
 * A worker died while it wrote. The sketch is neither read nor changed until it is rebuilt from the
 * copies.
 */
START_TEST(a_half_written_sketch_is_made_anew) {
        struct owner_job *job;
        uint64_t bytes;
        uint8_t *before;

        start_sketch(_i, CENTRED, PERMUTATION, 3, 7);
        bytes = kvd_sketch_bytes(3, 7, o.sketch->cell_floats) - sizeof *o.sketch;
        ck_assert_uint_eq(owner_do(&o, spill_job(BLOCKS, true)), 0);
        before = malloc(bytes);
        memcpy(before, o.sketch + 1, bytes);
        o.sketch->state = KVD_SKETCH_BUSY;
        memset(o.sketch + 1, 0x11, bytes / 2);
        ck_assert_uint_eq(owner_do(&o, spill_job(1, true)), ESTALE);
        ck_assert_uint_eq(owner_do(&o, copies_job(KVD_JOB_FORGET, 1, true)), ESTALE);
        job = vague_job(2);
        job->items[1].flags = 0;
        ck_assert_uint_eq(owner_do(&o, job), 0);
        ck_assert_uint_eq(error_of(0), ESTALE);
        ck_assert_uint_eq(error_of(1), 0); /* revived from its copy */
        ck_assert_uint_eq(owner_do(&o, copies_job(KVD_JOB_REBUILD, BLOCKS, true)), 0);
        expect_errors(BLOCKS, 0);
        ck_assert_uint_eq(o.sketch->state, KVD_SKETCH_IDLE);
        ck_assert_uint_eq(o.sketch->n_tokens, BLOCKS * o.g.block_tokens);
        ck_assert_mem_eq(before, o.sketch + 1, bytes);
        free(before);
        owner_stop(&o);
}
END_TEST

/* ---- in batches ------------------------------------------------------------------------------ */

/* Three of its blocks fill half of the staging memory. */
static const struct kvd_shape large = {.layers = 8,
                                       .kv_heads = 40,
                                       .head_dim = 128,
                                       .dtype = KVD_F32,
                                       .order = KVD_HND,
                                       .vocab = 1000};

struct outcome {
        uint64_t sketch, fresh, vague; /* checksums */
        uint64_t spilled[BLOCKS];
        uint32_t out, in; /* copies between the GPU and the processor */
};

/* Fills blocks that differ in one number per head. */
static void fill_alike(void) {
        owner_fill(&o, 0, 1);
        for (uint32_t i = 1; i < BLOCKS; i++) {
                memcpy(owner_block(&o, i), owner_block(&o, 0), o.ix->block_bytes);
                for (uint32_t h = 0; h < o.g.kv_heads; h++)
                        owner_put(&o, owner_block(&o, i), i, i % 2, h, 3, h, i + h / 100.0);
        }
}

static uint64_t of_fresh(void) {
        return XXH3_64bits(owner_block(&o, FRESH), BLOCKS * o.ix->block_bytes);
}

static void spill_and_revive(struct outcome *ret, int key_mode) {
        owner_log_begin();
        owner_start(&o, &large, 2 * BLOCKS);
        fill_alike();
        set(KVD_kvreviver_key_mode, key_mode);
        set(KVD_kvreviver_hash, PERMUTATION);
        owner_sketch(&o, 3, 40);
        ck_assert_uint_eq(owner_do(&o, spill_job(BLOCKS, true)), 0);
        for (uint32_t i = 0; i < BLOCKS; i++) {
                ck_assert_uint_eq(spilled()[i].error, 0);
                ret->spilled[i] = spilled()[i].checksum;
        }
        ret->sketch = XXH3_64bits(o.sketch, kvd_sketch_bytes(3, 40, o.sketch->cell_floats));
        ck_assert_uint_eq(owner_do(&o, copies_job(KVD_JOB_REVIVE, BLOCKS, false)), 0);
        expect_errors(BLOCKS, 0);
        ret->fresh = of_fresh();
        ck_assert_uint_eq(owner_do(&o, vague_job(BLOCKS)), 0);
        expect_errors(BLOCKS, 0);
        ret->vague = of_fresh();
        owner_stop(&o);
        ret->out = owner_calls(&o, "cuMemcpyDtoH");
        ret->in = owner_calls(&o, "cuMemcpyHtoD");
        owner_log_end();
}

/* Adjacent blocks take one copy. The first blocks in a sketch are copied for the mean, too. */
START_TEST(batches_of_a_gpu_have_the_bits_of_the_host) {
        struct outcome gpu = {0}, host = {0};
        char *backend = strdup(getenv("KVD_TEST_BACKEND"));
        uint32_t batches = DIV_UP(BLOCKS, 3u);

        spill_and_revive(&gpu, _i);
        unsetenv("KVD_TEST_BACKEND");
        spill_and_revive(&host, _i);
        setenv("KVD_TEST_BACKEND", backend, 1);
        free(backend);
        ck_assert_uint_eq(gpu.out, _i == CENTRED ? 3 * batches : batches);
        ck_assert_uint_eq(gpu.in, 2 * batches);
        ck_assert_mem_eq(gpu.spilled, host.spilled, sizeof gpu.spilled);
        ck_assert_uint_eq(gpu.sketch, host.sketch);
        ck_assert_uint_eq(gpu.fresh, host.fresh);
        ck_assert_uint_eq(gpu.vague, host.vague);
        ck_assert_uint_ne(gpu.vague, gpu.fresh);
}
END_TEST

/* 8-bit numbers can be copied, but no job can compute with them. */
START_TEST(eight_bits_are_copied_only) {
        const struct kvd_shape g = {.layers = 2,
                                    .kv_heads = 2,
                                    .head_dim = 16,
                                    .dtype = KVD_I8,
                                    .vocab = 10};
        struct owner_job *job;

        owner_start(&o, &g, 2 * BLOCKS);
        memset(owner_block(&o, 0), 0x5a, BLOCKS * o.ix->block_bytes);
        owner_sketch(&o, 3, 7);
        ck_assert_uint_eq(owner_do(&o, spill_job(2, false)), 0);
        ck_assert_uint_eq(owner_do(&o, copies_job(KVD_JOB_REVIVE, 2, false)), 0);
        expect_errors(2, 0);
        ck_assert_mem_eq(owner_block(&o, FRESH), owner_block(&o, 0), 2 * o.ix->block_bytes);
        ck_assert_uint_eq(owner_do(&o, spill_job(2, true)), EOPNOTSUPP);
        ck_assert_uint_eq(owner_do(&o, vague_job(2)), 0);
        expect_errors(2, EOPNOTSUPP);
        job = new_job(KVD_JOB_SUMMARISE, 1);
        job->items[0] = owner_item(&o, 0);
        ck_assert_uint_eq(owner_do(&o, job), EOPNOTSUPP);
        job->kind = KVD_JOB_SCORE;
        ck_assert_uint_eq(owner_do(&o, job), EOPNOTSUPP);
        owner_stop(&o);
}
END_TEST

/* ---- messages -------------------------------------------------------------------------------- */

START_TEST(nonsense_is_refused) {
        struct owner_job *job;

        start(0);
        ck_assert_uint_eq(owner_do(&o, new_job(77, 0)), EPROTO);
        job = spill_job(1, true);
        ck_assert_uint_eq(owner_do(&o, job), EPROTO); /* no sketch was sent */
        ck_assert_uint_eq(owner_ask(&o,
                                    (struct kvd_msg){.number = KVD_MSG_work_segments,
                                                     .work_segments = {.space = 5,
                                                                       .first = 3,
                                                                       .count = 1}},
                                    &o.fds[4], 1),
                          EPROTO);
        ck_assert_uint_eq(owner_ask(&o,
                                    (struct kvd_msg){.number = KVD_MSG_work_sketch,
                                                     .work_sketch = {5, 1, 100}},
                                    &o.fds[4], 1),
                          EPROTO);
        ck_assert_uint_eq(owner_ask(&o, (struct kvd_msg){.number = KVD_MSG_work, .work = {1, 3}},
                                    NULL, 0),
                          EPROTO);
        ck_assert_uint_eq(owner_ask(&o,
                                    (struct kvd_msg){.number = KVD_MSG_work_forget,
                                                     .work_forget = {5}},
                                    NULL, 0),
                          0);
        ck_assert_uint_eq(owner_do(&o, spill_job(1, false)), EPROTO);
        owner_stop(&o);
}
END_TEST

SUITE("worker-sketch", LOOPS(2, a_copy_comes_back_byte_for_byte),
      TESTS(a_copy_that_changed_is_told, a_summary_goes_along),
      LOOPS(18, a_sketch_gives_the_median), TESTS(without_collisions_it_is_exact),
      LOOPS(2, forgetting_takes_out_what_was_put_in), TESTS(forgetting_estimates_zeroes_the_median),
      LOOPS(2, a_half_written_sketch_is_made_anew),
      TESTS(eight_bits_are_copied_only, nonsense_is_refused),
      WHEN(getenv("KVD_TEST_BACKEND"), LOOPS(3, batches_of_a_gpu_have_the_bits_of_the_host)))
