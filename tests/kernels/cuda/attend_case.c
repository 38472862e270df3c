/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/cuda/attend_case.h"

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend.h"
#include "kernels/cuda/attend.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/lib/mark.h"

enum { SPARE = 3 }; /* unused blocks; each block begins with 64 bytes of other data */

/* The host side of a case. */
struct data {
        struct attend_case c;
        uint32_t max_length, per_table, n_blocks, n_tokens;
        uint32_t *ids, *starts, *rotation, *chosen, *n_chosen;
        size_t size, plane, block_bytes, heads;
        uint8_t *pool;
        float *q, *rotations, *out, *block_mass, *token_mass;
        struct gpu_attend a;
};

static size_t size_of(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : number >= KVD_NUMBER_Q8 ? 1 : 2;
}

/* Rounds x to the type, as the device will see it, and returns it in that type. */
static void *typed(float *x, size_t n, uint32_t number) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        uint16_t *half;

        if (number == KVD_NUMBER_F32)
                return x;
        half = buffer(n * sizeof *half);
        ops->narrow(half, x, n, number);
        ops->widen(x, half, n, number);
        return half;
}

/* ---- blocks ---- */

static uint8_t *slot_at(const struct data *d, uint32_t id, bool value, uint32_t h, uint32_t slot) {
        const struct gpu_attend *a = &d->a;

        return d->pool + id * d->block_bytes + (value ? a->v_offset : a->k_offset) +
               h * a->head_stride + slot * a->token_stride;
}

static void random_row(uint8_t *to, bool value, const struct attend_case *c) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        float x[256];

        for (uint32_t i = 0; i < c->dim; i++)
                x[i] = (float)((double)random_u32() / 2147483648.0 - 1.0);
        if (value && c->spoilt && random_u32() % c->spoilt == 0)
                x[random_u32() % c->dim] = NAN;
        (value ? ops->write_row : ops->write_key)(to, x, c->dim, c->number);
}

/* Everything that is not a token is NaN. */
static void fill_pool(struct data *d) {
        memset(d->pool, 0xff, d->n_blocks * d->block_bytes);
        for (uint32_t s = 0; s < d->c.n; s++)
                for (uint32_t i = 0; i < d->c.lengths[s]; i++) {
                        uint32_t id = d->ids[s * d->per_table + i / d->c.block_tokens];

                        for (uint32_t h = 0; h < 2 * d->c.kv_heads && id != GPU_NO_BLOCK; h++)
                                random_row(slot_at(d, id, h % 2, h / 2, i % d->c.block_tokens),
                                           h % 2, &d->c);
                }
}

static void make_tables(struct data *d) {
        uint32_t *order = buffer(d->n_blocks * sizeof *order), used = 0;

        for (uint32_t i = 0; i < d->n_blocks; i++) {
                uint32_t j = random_u32() % (i + 1);

                order[i] = order[j];
                order[j] = i;
        }
        for (uint32_t i = 0; i < d->c.n * d->per_table; i++) {
                d->ids[i] = d->c.absent && random_u32() % d->c.absent == 0 ? GPU_NO_BLOCK :
                                                                             order[used++];
                d->rotation[i] = d->c.rotations ? random_u32() % (d->c.rotations + 1) : 0;
        }
}

static void lay_out(struct data *d) {
        const struct attend_case *c = &d->c;
        size_t row = kvd_row_bytes(c->number, c->dim) + c->pad * d->size;

        d->a.token_stride = c->nhd ? c->kv_heads * row : row;
        d->a.head_stride = c->nhd ? row : c->block_tokens * row;
        d->plane = c->kv_heads * c->block_tokens * row;
        d->a.k_offset = 64;
        d->a.v_offset = 64 + d->plane;
        d->block_bytes = ALIGN_UP(64 + 2 * d->plane, 16);
}

/* ---- sequences ---- */

static void make_chosen(struct data *d) {
        for (uint32_t s = 0; s < d->c.n; s++)
                for (uint32_t h = 0; h < d->c.kv_heads; h++) {
                        uint32_t *n = d->n_chosen + s * d->c.kv_heads + h;

                        for (uint32_t i = 0; i < d->max_length && d->c.chosen; i++)
                                if (random_u32() % d->c.chosen == 0 && i < d->c.lengths[s] + 2)
                                        d->chosen[(s * d->c.kv_heads + h) * d->max_length +
                                                  (*n)++] = i;
                }
}

static void make_queries(struct data *d) {
        float sharp = d->c.sharp > 0.0f ? d->c.sharp : 4.0f;

        for (uint32_t s = 0; s < d->c.n; s++)
                d->starts[s + 1] = d->starts[s] + (d->c.tokens ? d->c.tokens / (s + 1) : 1);
        d->n_tokens = d->starts[d->c.n];
        d->q = random_floats(d->n_tokens * d->heads * d->c.dim);
        for (size_t i = 0; i < d->n_tokens * d->heads * d->c.dim; i++)
                d->q[i] *= sharp;
        d->rotations = random_floats((d->c.rotations + 1) * d->c.dim);
        for (uint32_t i = 0; i < d->c.rotations * (d->c.dim / 2) && d->c.rotations; i++) {
                float *angle = d->rotations + i / (d->c.dim / 2) * d->c.dim + i % (d->c.dim / 2);
                float x = *angle * 3.0f;

                angle[0] = cosf(x);
                angle[d->c.dim / 2] = sinf(x);
        }
}

static struct data make(struct attend_case c) {
        struct data d;

        memset(&d, 0, sizeof d);
        c.kv_heads = c.kv_heads ? c.kv_heads : 2;
        c.block_tokens = c.block_tokens ? c.block_tokens : 16;
        c.n = c.n ? c.n : 3;
        c.number = c.number ? c.number : KVD_NUMBER_F32;
        c.q_number = c.q_number ? c.q_number : KVD_NUMBER_F32;
        c.out_number = c.out_number ? c.out_number : KVD_NUMBER_F32;
        d.c = c;
        d.size = size_of(c.number);
        d.heads = c.kv_heads * c.group;
        for (uint32_t s = 0; s < c.n; s++)
                d.max_length = MAX(d.max_length, c.lengths[s]);
        d.per_table = DIV_UP(d.max_length, c.block_tokens) + 1;
        d.n_blocks = c.n * d.per_table + SPARE;
        lay_out(&d);
        d.ids = buffer(c.n * d.per_table * sizeof *d.ids);
        d.rotation = buffer(c.n * d.per_table * sizeof *d.rotation);
        d.starts = buffer((c.n + 1) * sizeof *d.starts);
        d.chosen = buffer(c.n * c.kv_heads * d.max_length * sizeof *d.chosen);
        d.n_chosen = buffer(c.n * c.kv_heads * sizeof *d.n_chosen);
        d.pool = buffer(d.n_blocks * d.block_bytes);
        make_tables(&d);
        fill_pool(&d);
        make_chosen(&d);
        make_queries(&d);
        return d;
}

/* ---- the reference ---- */

static const uint8_t **host_blocks(const struct data *d, uint32_t s) {
        const uint8_t **blocks = buffer(d->per_table * sizeof *blocks);

        for (uint32_t i = 0; i < d->per_table; i++) {
                uint32_t id = d->ids[s * d->per_table + i];

                blocks[i] = id == GPU_NO_BLOCK ? NULL : d->pool + id * d->block_bytes;
        }
        return blocks;
}

static void refer_head(const struct data *d, uint32_t s, uint32_t h) {
        const struct attend_case *c = &d->c;
        uint32_t n = d->starts[s + 1] - d->starts[s], none = 0;
        size_t head = s * c->kv_heads + h, at = (d->starts[s] * d->heads + h * c->group) * c->dim;
        struct kvd_attention a = {
                .ops = kvd_ops_pick(NULL),
                .blocks = host_blocks(d, s),
                .k_offset = d->a.k_offset + h * d->a.head_stride,
                .v_offset = d->a.v_offset + h * d->a.head_stride,
                .stride = d->a.token_stride,
                .type = (enum kvd_number)c->number,
                .block_tokens = c->block_tokens,
                .dim = c->dim,
                .first = c->lengths[s] - n,
                .n_keys = c->bidirectional ? c->lengths[s] : 0,
                .chosen = c->chosen ? d->n_chosen[head] ? d->chosen + head * d->max_length : &none :
                                      NULL,
                .n_chosen = d->n_chosen[head],
                .n = n,
                .group = c->group,
                .scale = d->a.scale,
                .q = d->q + at,
                .ldq = d->heads * c->dim,
                .out = d->out + at,
                .ldo = d->heads * c->dim,
                .rotation = c->rotations ? d->rotation + s * d->per_table : NULL,
                .rotations = d->rotations,
                .block_mass = c->mass ? d->block_mass + head * d->per_table : NULL,
                .token_mass = c->mass ? d->token_mass + head * d->max_length : NULL,
        };

        if (c->lengths[s] == 0 || n == 0)
                return;
        a.scratch = buffer(kvd_attend_scratch(&a) * sizeof *a.scratch);
        kvd_attend(&a);
}

/* ---- the device ---- */

static void *copy_of(const void *from, size_t bytes) {
        return memcpy(buffer(bytes), from, bytes);
}

static void put(struct data *d) {
        const struct attend_case *c = &d->c;
        size_t n_q = d->n_tokens * d->heads * c->dim;
        struct gpu_attend *a = &d->a;

        a->q = address_of(typed(d->q, n_q, c->q_number)); /* rounds d->q */
        a->blocks = (struct gpu_blocks){address_of(d->pool), d->block_bytes, address_of(d->ids)};
        a->ld_blocks = d->per_table;
        a->number = c->number;
        a->block_tokens = c->block_tokens;
        a->dim = c->dim;
        a->kv_heads = c->kv_heads;
        a->group = c->group;
        a->n_sequences = c->n;
        a->max_length = d->max_length;
        a->lengths = address_of(copy_of(c->lengths, c->n * sizeof *c->lengths));
        a->starts = c->tokens ? address_of(d->starts) : 0;
        a->max_tokens = c->tokens;
        a->bidirectional = c->bidirectional;
        a->chosen = c->chosen ? address_of(d->chosen) : 0;
        a->n_chosen = address_of(d->n_chosen);
        a->ld_chosen = a->max_chosen = d->max_length;
        a->q_number = c->q_number;
        a->out_number = c->out_number;
        a->q_head = a->out_head = c->dim;
        a->q_token = a->out_token = d->heads * c->dim;
        a->rotation = c->rotations ? address_of(d->rotation) : 0;
        a->rotations = address_of(d->rotations);
        a->split = c->split;
        a->ld_block_mass = d->per_table;
        a->ld_token_mass = d->max_length;
}

/* The results of a launch; masses are added to the same initial values as in the reference. */
struct found {
        uint8_t *out;
        float *block_mass, *token_mass;
};

static struct found run(const struct data *d) {
        size_t n_heads = d->c.n * d->c.kv_heads, n_out = d->n_tokens * d->heads * d->c.dim;
        struct found f = {buffer(n_out * size_of(d->c.out_number)),
                          copy_floats(d->block_mass, n_heads * d->per_table),
                          copy_floats(d->token_mass, n_heads * d->max_length)};
        struct gpu_attend a = d->a;
        uint8_t *workspace;

        a.out = address_of(f.out);
        a.block_mass = d->c.mass ? address_of(f.block_mass) : 0;
        a.token_mass = d->c.mass ? address_of(f.token_mass) : 0;
        a.workspace_bytes = gpu_attend_workspace(fixture_gpu(), &a);
        ck_assert_uint_eq(a.workspace_bytes % 256, 0);
        workspace = buffer(a.workspace_bytes);
        memset(workspace, 0xff, a.workspace_bytes);
        a.workspace = address_of(workspace);
        fixture_ok((a.starts ? gpu_attend_prefill : gpu_attend_decode)(fixture_gpu(), NULL, &a));
        fixture_wait();
        return f;
}

/* ---- comparison ---- */

static void compare(const struct data *d, const float *got, const float *expected, size_t n,
                    double tolerance, const char *what) {
        for (size_t i = 0; i < n; i++)
                if (!(isnan(got[i]) && isnan(expected[i])) &&
                    !(fabs((double)got[i] - (double)expected[i]) <= tolerance))
                        ck_abort_msg(
                                "%s %zu: %g, expected %g (type %u, dim %u, group %u, blocks of %u, tokens %u)",
                                what, i, (double)got[i], (double)expected[i], d->c.number, d->c.dim,
                                d->c.group, d->c.block_tokens, d->c.tokens);
}

/*
 * Results of 16 bits are rounded once more, and weights by as much, if they are rounded, too. A
 * GPU's tensor cores truncate products where the emulation rounds their sums, which doubles the
 * error.
 */
static double tolerance_of(const struct data *d) {
        double unit = fixture_is_real() ? 4e-6 : 2e-6;
        double t = unit * sqrt(d->c.dim) * (d->c.dim < 8 ? 2.0 : 1.0);

        return d->c.out_number == KVD_NUMBER_F16  ? 1e-3 :
               d->c.out_number == KVD_NUMBER_BF16 ? 8e-3 :
                                                    t;
}

static void compare_masses(const struct data *d, const struct found *f) {
        size_t n_heads = d->c.n * d->c.kv_heads;
        double tolerance = 2e-5 * d->c.group * MAX(d->c.tokens, 1);

        compare(d, f->block_mass, d->block_mass, n_heads * d->per_table, tolerance,
                "mass of block");
        compare(d, f->token_mass, d->token_mass, n_heads * d->max_length, tolerance,
                "mass of token");
}

static void compare_bits(const struct data *d, const struct found *f, const struct found *again) {
        size_t n_heads = d->c.n * d->c.kv_heads, n_out = d->n_tokens * d->heads * d->c.dim;

        ck_assert(memcmp(f->out, again->out, n_out * size_of(d->c.out_number)) == 0);
        ck_assert(memcmp(f->block_mass, again->block_mass,
                         n_heads * d->per_table * sizeof(float)) == 0);
        ck_assert(memcmp(f->token_mass, again->token_mass,
                         n_heads * d->max_length * sizeof(float)) == 0);
}

/* Prepares a case on both sides, with queries, and room for results and masses. */
static struct data prepare(struct attend_case c) {
        struct data d = make(c);

        d.a.scale = 1.0f / sqrtf((float)d.c.dim);
        d.out = buffer(d.n_tokens * d.heads * d.c.dim * sizeof *d.out);
        d.block_mass = random_floats(d.c.n * d.c.kv_heads * d.per_table);
        d.token_mass = random_floats(d.c.n * d.c.kv_heads * d.max_length);
        put(&d);
        return d;
}

void attend_check_alone(struct attend_case c) {
        struct data d = prepare(c), alone = d;
        struct found all = run(&d), some;
        size_t width = d.heads * c.dim, size = size_of(d.c.out_number);

        alone.c.n = 1;
        alone.a.n_sequences = 1;
        alone.a.max_length = c.lengths[0];
        some = run(&alone);
        ck_assert(memcmp(all.out, some.out, (c.tokens ? c.tokens : 1) * width * size) == 0);
        for (uint32_t n = 1; n < c.tokens; n = 2 * n + 1) {
                uint32_t starts[] = {0, n};

                alone.a.starts = address_of(copy_of(starts, sizeof starts));
                alone.a.max_tokens = n;
                alone.a.q = d.a.q + (c.tokens - n) * width * size_of(d.c.q_number);
                some = run(&alone);
                ck_assert(memcmp(all.out + (c.tokens - n) * width * size, some.out,
                                 n * width * size) == 0);
        }
        buffers_free();
}

void attend_check(struct attend_case c) {
        struct gpu *gpu = fixture_gpu();
        size_t shared = gpu->shared_bytes, n_out;
        struct data d = prepare(c);
        struct found f, again;
        float *out;

        n_out = d.n_tokens * d.heads * d.c.dim;
        gpu->shared_bytes = c.shared_bytes ? c.shared_bytes : shared;
        f = run(&d);
        again = run(&d);
        gpu->shared_bytes = shared;
        compare_bits(&d, &f, &again);
        for (uint32_t h = 0; h < d.c.n * d.c.kv_heads; h++)
                refer_head(&d, h / d.c.kv_heads, h % d.c.kv_heads);
        out = (float *)f.out;
        if (d.c.out_number != KVD_NUMBER_F32) {
                out = buffer(n_out * sizeof *out);
                kvd_ops_pick("scalar")->widen(out, (const uint16_t *)f.out, n_out, d.c.out_number);
        }
        compare(&d, out, d.out, n_out, tolerance_of(&d), "result");
        compare_masses(&d, &f);
        buffers_free();
}
