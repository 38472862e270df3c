/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A worker that does just enough for tests to notice mistakes: copies with checksums, a count
 * sketch of signed sums, and a comparison that finds blocks alike if their bytes are equal.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/mark.h"
#include "tests/store/fixture.h"

#define FLOATS (BLOCK_BYTES / 4)
#define CELL 16u /* floats of one token and plane kind: layers x kv_heads x head_dim */

static _Alignas(64) uint8_t arguments[KVD_JOB_BYTES];
struct kvd_job *worker_job = (struct kvd_job *)arguments;
int worker_verdict;
static struct store_job taken;
static bool has_job;
/* the job's sketch; opened when the job is taken, as a worker does */
static int sketch = -1;
static uint64_t sketch_bytes;

static struct kvd_job_item *items(void) {
        return (struct kvd_job_item *)(worker_job + 1);
}

static struct kvd_job_step *steps(void) {
        return (struct kvd_job_step *)(items() + worker_job->n_items);
}

static uint32_t *job_tokens_of(uint32_t step) {
        return (uint32_t *)(steps() + worker_job->n_steps) + steps()[step].first_token;
}

bool worker_take(void) {
        if (has_job || !store_next_job(store, arguments, &taken))
                return false;
        ck_assert_uint_le(taken.bytes, KVD_JOB_BYTES);
        ck_assert_uint_eq(taken.id, worker_job->id);
        ck_assert_uint_eq(taken.bytes, sizeof(struct kvd_job) +
                                               worker_job->n_items * sizeof(struct kvd_job_item) +
                                               worker_job->n_steps * sizeof(struct kvd_job_step) +
                                               worker_job->n_tokens * sizeof(uint32_t));
        if (sketch >= 0)
                close(sketch);
        sketch = taken.sketch ? dup(space_sketch_fd(taken.space, taken.sketch, &sketch_bytes)) : -1;
        ck_assert_msg(!taken.sketch || sketch >= 0, "%s", store_why(store));
        return has_job = true;
}

void worker_answer(const void *result, size_t bytes) {
        ck_assert(has_job);
        has_job = false;
        store_job_done(store, taken.id, 0, result, bytes);
}

void worker_fail(int error) {
        ck_assert(has_job);
        has_job = false;
        store_job_done(store, taken.id, error, NULL, 0);
}

void worker_rest(void) {
        ck_assert(has_job);
        has_job = false;
        store_job_rests(store, taken.id);
}

/* ---- copies ---------------------------------------------------------------------------------- */

uint64_t worker_checksum(const void *data) {
        const uint8_t *at = data;
        uint64_t h = UINT64_C(14695981039346656037);

        for (uint32_t i = 0; i < BLOCK_BYTES; i++)
                h = (h ^ at[i]) * UINT64_C(1099511628211);
        return h;
}

static void spill_io(uint32_t slot, void *data, bool write) {
        uint64_t bytes;
        int fd = space_copies_fd(taken.space, &bytes);
        off_t at = (off_t)slot * BLOCK_BYTES;

        ck_assert_int_ge(fd, 0);
        ck_assert_uint_le((uint64_t)at + BLOCK_BYTES, bytes);
        ck_assert_int_eq(write ? pwrite(fd, data, BLOCK_BYTES, at) :
                                 pread(fd, data, BLOCK_BYTES, at),
                         BLOCK_BYTES);
}

void worker_spoil(struct space *space, uint32_t slot) {
        uint64_t bytes;
        int fd = space_copies_fd(space, &bytes);
        uint8_t byte;

        ck_assert_int_eq(pread(fd, &byte, 1, (off_t)slot * BLOCK_BYTES + 5), 1);
        byte ^= 4;
        ck_assert_int_eq(pwrite(fd, &byte, 1, (off_t)slot * BLOCK_BYTES + 5), 1);
}

static void write_dest(kvd_ref ref, const float *data) {
        uint32_t id = kvd_ref_id(ref), per = space_index(taken.space)->segment_blocks;
        int fd = space_worker_segment_fd(taken.space, id / per);

        ck_assert_int_eq(pwrite(fd, data, BLOCK_BYTES, (off_t)(id % per) * BLOCK_BYTES),
                         BLOCK_BYTES);
}

/* ---- sketch ---------------------------------------------------------------------------------- */

struct cells {
        struct kvd_sketch_header header;
        float *at;
};

static void load_sketch(struct cells *c) {
        int fd = sketch;

        ck_assert_int_eq(pread(fd, &c->header, sizeof c->header, 0), sizeof c->header);
        ck_assert_uint_eq(c->header.cell_floats, CELL);
        ck_assert_uint_le(kvd_sketch_bytes(c->header.rows, c->header.columns, CELL), sketch_bytes);
        c->at = calloc(2 * c->header.rows * c->header.columns * CELL, sizeof *c->at);
        ck_assert_int_ge(pread(fd, c->at,
                               2 * c->header.rows * c->header.columns * CELL * sizeof *c->at,
                               sizeof c->header + CELL * sizeof(float)),
                         0);
}

static void store_sketch(struct cells *c) {
        int fd = sketch;

        ck_assert_int_eq(pwrite(fd, &c->header, sizeof c->header, 0), sizeof c->header);
        ck_assert_int_ge(pwrite(fd, c->at,
                                2 * c->header.rows * c->header.columns * CELL * sizeof *c->at,
                                sizeof c->header + CELL * sizeof(float)),
                         0);
        free(c->at);
}

static float *cell(struct cells *c, uint32_t values, uint32_t row, uint32_t ordinal, float *sign) {
        uint64_t h = (c->header.salt + row * 1000003ull + ordinal) * UINT64_C(0x9e3779b97f4a7c15);
        uint32_t column = (uint32_t)(h >> 33) % c->header.columns;

        *sign = h & 256 ? 1 : -1;
        return c->at +
               (((uint64_t)values * c->header.rows + row) * c->header.columns + column) * CELL;
}

/* Float i of a token: planes are K0 V0 K1 V1. */
static float *block_float(float *block, uint32_t values, uint32_t token, uint32_t i) {
        return &block[((i / 8 * 2 + values) * BT + token) * 8 + i % 8];
}

static void sketch_add(struct cells *c, const struct kvd_job_item *item, float *block,
                       float weight) {
        float sign;

        for (uint32_t t = 0; t < item->n_tokens; t++)
                for (uint32_t v = 0; v < 2; v++)
                        for (uint32_t r = 0; r < c->header.rows; r++) {
                                float *to = cell(c, v, r, item->ordinal + t, &sign);

                                for (uint32_t i = 0; i < CELL; i++)
                                        to[i] += weight * sign * *block_float(block, v, t, i);
                        }
}

static float median3(float a, float b, float c) {
        float low = a < b ? a : b, high = a < b ? b : a;

        return c < low ? low : c > high ? high : c;
}

static void sketch_query(struct cells *c, const struct kvd_job_item *item, float *block) {
        float x[3], sign;

        ck_assert_uint_eq(c->header.rows, 3);
        for (uint32_t t = 0; t < item->n_tokens; t++)
                for (uint32_t v = 0; v < 2; v++)
                        for (uint32_t i = 0; i < CELL; i++) {
                                for (uint32_t r = 0; r < 3; r++)
                                        x[r] = cell(c, v, r, item->ordinal + t, &sign)[i] * sign;
                                *block_float(block, v, t, i) = median3(x[0], x[1], x[2]);
                        }
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static void do_spill(uint32_t n) {
        static struct kvd_spilled result[KVD_JOB_ITEMS];
        struct cells c = {0};
        float block[FLOATS];

        if (taken.sketch)
                load_sketch(&c);
        for (uint32_t i = 0; i < n; i++) {
                struct kvd_job_item *item = &items()[i];

                block_floats(taken.space, item->ref, block);
                result[i] = (struct kvd_spilled){.checksum = worker_checksum(block)};
                if (item->place != UINT32_MAX)
                        spill_io(item->place, block, true);
                if (item->ordinal != KVD_NO_ORDINAL)
                        sketch_add(&c, item, block, 1);
        }
        if (taken.sketch)
                store_sketch(&c);
        if (n == worker_job->n_items)
                worker_answer(result, n * sizeof *result);
}

static void do_revive(uint32_t n) {
        static uint32_t result[KVD_JOB_ITEMS];
        struct cells c = {0};

        if (taken.sketch)
                load_sketch(&c);
        for (uint32_t i = 0; i < n; i++) {
                struct kvd_job_item *item = &items()[i];
                float block[FLOATS] = {0};

                if (item->flags & KVD_ENTRY_APPROX)
                        sketch_query(&c, item, block);
                else
                        spill_io(item->place, block, false);
                result[i] = item->flags & KVD_ENTRY_APPROX ||
                                            worker_checksum(block) == item->checksum ?
                                    0 :
                                    EBADMSG;
                write_dest(item->ref, block);
        }
        free(c.at);
        if (n == worker_job->n_items)
                worker_answer(result, n * sizeof *result);
}

static void do_sketch(uint32_t n, bool anew) {
        static uint32_t result[KVD_JOB_ITEMS];
        struct cells c = {0};
        float block[FLOATS];

        load_sketch(&c);
        if (anew)
                memset(c.at, 0, 2 * c.header.rows * c.header.columns * CELL * sizeof *c.at);
        for (uint32_t i = 0; i < n; i++) {
                struct kvd_job_item *item = &items()[i];

                if (item->place != UINT32_MAX)
                        spill_io(item->place, block, false);
                else
                        sketch_query(&c, item, block); /* the sketch's estimate */
                ck_assert_int_eq(item->place == UINT32_MAX, !!(item->flags & KVD_ENTRY_APPROX));
                result[i] = item->place == UINT32_MAX || worker_checksum(block) == item->checksum ?
                                    0 :
                                    EBADMSG;
                if (!result[i])
                        sketch_add(&c, item, block, anew ? 1 : -1);
        }
        store_sketch(&c);
        if (n == worker_job->n_items)
                worker_answer(result, n * sizeof *result);
}

static bool same_tokens(uint32_t a, uint32_t b) {
        return steps()[a].n_tokens == steps()[b].n_tokens &&
               memcmp(job_tokens_of(a), job_tokens_of(b), steps()[a].n_tokens * sizeof(uint32_t)) ==
                       0;
}

static bool same_block(kvd_ref a, kvd_ref b) {
        float x[FLOATS], y[FLOATS];

        block_floats(taken.space, a, x);
        block_floats(taken.space, b, y);
        return memcmp(x, y, sizeof x) == 0;
}

/* Matches blocks with the same bytes, in steps with the same tokens. */
static void do_compare(void) {
        static struct kvd_match result[KVD_JOB_ITEMS];
        uint32_t n = 0;

        for (uint32_t t = 0; t < steps()[0].n_items && !worker_verdict; t++)
                for (uint32_t s = 1, found = 0; s < worker_job->n_steps && !found; s++)
                        for (uint32_t k = 0; k < steps()[s].n_items && same_tokens(0, s) && !found;
                             k++)
                                if (same_block(items()[t].ref,
                                               items()[steps()[s].first_item + k].ref)) {
                                        result[n++] = (struct kvd_match){t,
                                                                         steps()[s].first_item + k,
                                                                         0, 1};
                                        found = 1;
                                }
        worker_answer(result, n * sizeof *result);
}

/* Keeps the last tokens of the sources, for all heads, so that tests know which are kept. */
static void do_compact(bool half) {
        const uint32_t *param = worker_job->param;
        float from[FLOATS], to[FLOATS] = {0};
        uint32_t n = 0, skip = 0, no_error = 0;

        for (uint32_t i = 0; i < param[0]; i++)
                skip += items()[i].n_tokens;
        skip -= param[2];
        for (uint32_t i = 0; i < param[0]; i++) {
                block_floats(taken.space, items()[i].ref, from);
                for (uint32_t t = 0; t < items()[i].n_tokens; t++) {
                        if (skip && skip--)
                                continue;
                        for (uint32_t v = 0; v < 2; v++)
                                for (uint32_t k = 0; k < CELL; k++)
                                        *block_float(to, v, n % BT, k) = *block_float(from, v, t,
                                                                                      k);
                        if (++n % BT && n < param[2])
                                continue;
                        write_dest(items()[param[0] + (n - 1) / BT].ref, to);
                        memset(to, 0, sizeof to);
                        if (half)
                                return;
                }
        }
        worker_answer(&no_error, sizeof no_error);
}

/* Answers the distances 1, 1.01, 1.02 and so on, the largest first. */
static void do_calibrate(void) {
        float result[KVD_JOB_ITEMS / 2];
        uint32_t n = worker_job->n_items / 2;

        for (uint32_t i = 0; i < n; i++)
                result[i] = 1 + 0.01f * (float)(n - 1 - i);
        worker_answer(result, n * sizeof *result);
}

static void do_score(void) {
        static float result[KVD_JOB_ITEMS];

        for (uint32_t i = 0; i < worker_job->n_items; i++)
                result[i] = (float)(i + 1) / (float)(worker_job->n_items + 1);
        worker_answer(result, worker_job->n_items * sizeof *result);
}

static void do_it(uint32_t n) {
        switch (worker_job->kind) {
        case KVD_JOB_SUMMARISE: worker_answer(NULL, 0); break;
        case KVD_JOB_SCORE: do_score(); break;
        case KVD_JOB_CALIBRATE: do_calibrate(); break;
        case KVD_JOB_COMPARE: do_compare(); break;
        case KVD_JOB_SPILL: do_spill(n); break;
        case KVD_JOB_REVIVE: do_revive(n); break;
        case KVD_JOB_COMPACT: do_compact(n < worker_job->n_items); break;
        case KVD_JOB_FORGET:
        case KVD_JOB_REBUILD: do_sketch(n, worker_job->kind == KVD_JOB_REBUILD); break;
        default: worker_fail(ENOSYS);
        }
}

void worker_do(void) {
        ck_assert(has_job);
        do_it(worker_job->n_items);
}

/* Writes half of the result, for jobs that write, and dies. */
void worker_die(void) {
        uint32_t kind = worker_job->kind, n = worker_job->n_items;

        ck_assert(has_job);
        if (n > 1 && (kind == KVD_JOB_COMPACT || kind == KVD_JOB_SPILL || kind == KVD_JOB_REVIVE ||
                      kind == KVD_JOB_FORGET || kind == KVD_JOB_REBUILD))
                do_it(n / 2);
        has_job = false;
        store_job_lost(store, taken.id);
}

uint32_t work(void) {
        uint32_t n = 0;

        for (; worker_take(); n++)
                worker_do();
        return n;
}
