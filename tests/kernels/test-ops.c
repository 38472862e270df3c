/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every variant that runs here, including the scalar one, over every parameter that affects an
 * address: sizes around the widths of registers and tiles, strides with slack, one row. All
 * comparisons are bit for bit: against loops over single numbers if an operation defines the order
 * of additions, against the scalar variant if it works on lanes.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/ops.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

static const uint32_t sizes[] = {1,  2,  7,  8,  9,  15,  16,  17,  31, 32,
                                 33, 47, 48, 64, 65, 100, 128, 144, 176};

static const struct kvd_ops *scalar;
static const struct kvd_ops *variants[8]; /* those that run here */
static size_t n_variants;

static void find_variants(void) {
        scalar = kvd_ops_pick("scalar");
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                if ((*v)->works())
                        variants[n_variants++] = *v;
}

/* ---- the definitions, one number after the other ---- */

static void plain_pack(float *panels, uint32_t first, const float *rows, size_t stride, uint32_t n,
                       uint32_t dim) {
        for (uint32_t row = first; row < first + n; row++, rows += stride)
                for (uint32_t d = 0; d < dim; d++)
                        panels[((size_t)(row / KVD_PANEL) * dim + d) * KVD_PANEL +
                               row % KVD_PANEL] = rows[d];
}

static void plain_matmul(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows,
                         const float *w, uint32_t n_in, uint32_t n_out) {
        for (uint32_t r = 0; r < rows; r++)
                for (uint32_t o = 0; o < n_out; o++) {
                        float *acc = &y[r * ldy + o];

                        *acc = 0.0f;
                        for (uint32_t i = 0; i < n_in; i++)
                                *acc = fmaf(x[r * ldx + i],
                                            w[((size_t)(o / KVD_PANEL) * n_in + i) * KVD_PANEL +
                                              o % KVD_PANEL],
                                            *acc);
                }
}

static void plain_rmsnorm(float *y, const float *x, const float *w, uint32_t n, float eps) {
        float sum[KVD_PANEL] = {0}, scale;

        for (uint32_t i = 0; i < n; i++)
                sum[i % KVD_PANEL] = fmaf(x[i], x[i], sum[i % KVD_PANEL]);
        for (uint32_t width = KVD_PANEL / 2; width > 0; width /= 2)
                for (uint32_t j = 0; j < width; j++)
                        sum[j] += sum[j + width];
        scale = 1.0f / sqrtf(sum[0] / (float)n + eps);
        for (uint32_t i = 0; i < n; i++)
                y[i] = x[i] * scale * w[i];
}

static void plain_rope(float *x, const float *cosine, const float *sine, uint32_t half) {
        for (uint32_t i = 0; i < half; i++) {
                float low = x[i], high = x[i + half];

                x[i] = fmaf(-high, sine[i], low * cosine[i]);
                x[i + half] = fmaf(low, sine[i], high * cosine[i]);
        }
}

static float *packed(const float *w, uint32_t n_out, uint32_t n_in) {
        float *panels = buffer(kvd_packed_floats(n_out, n_in) * sizeof *panels);

        plain_pack(panels, 0, w, n_in, n_out, n_in);
        return panels;
}

START_TEST(pick_finds_by_name_and_rejects_the_unknown) {
        ck_assert_ptr_nonnull(kvd_ops_pick(NULL));
        ck_assert_ptr_nonnull(scalar);
        ck_assert_ptr_null(kvd_ops_pick("mmx"));
        for (size_t i = 0; i < n_variants; i++)
                ck_assert_ptr_eq(kvd_ops_pick(variants[i]->name), variants[i]);
}
END_TEST

START_TEST(tables_have_no_holes) {
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                ck_assert((*v)->name && (*v)->works && (*v)->pack && (*v)->matmul && (*v)->rmsnorm);
                ck_assert((*v)->rope && (*v)->swiglu && (*v)->add && (*v)->softmax && (*v)->widen &&
                          (*v)->narrow);
                ck_assert((*v)->cap && (*v)->largest);
                ck_assert((*v)->copy_nt);
                ck_assert((*v)->bicache && (*v)->block && (*v)->hshare && (*v)->keydiff);
                ck_assert((*v)->memshare && (*v)->sketch && (*v)->attend);
        }
}
END_TEST

START_TEST(pack_equals_the_reference) {
        for (uint32_t first = 0; first < 20; first++)
                for (uint32_t n = 1; n < 20; n++)
                        for (uint32_t dim = 1; dim < 20; dim++) {
                                size_t stride = dim + first % 3,
                                       total = kvd_packed_floats(first + n, dim);
                                float *rows = random_floats((n - 1) * stride + dim),
                                      *expected = random_floats(total);

                                for (size_t i = 0; i < n_variants; i++) {
                                        float *got = copy_floats(expected, total);

                                        if (i == 0)
                                                plain_pack(expected, first, rows, stride, n, dim);
                                        variants[i]->pack(got, first, rows, stride, n, dim);
                                        assert_same_bits(expected, got, total, variants[i]->name);
                                }
                                buffers_free();
                        }
}
END_TEST

static void matmul_case(const struct kvd_ops *v, uint32_t rows, uint32_t n_in, uint32_t n_out) {
        size_t ldx = n_in + n_out % 3, ldy = n_out + n_in % 5, total = (rows - 1) * ldy + n_out;
        float *x = random_floats((rows - 1) * ldx + n_in);
        float *w = packed(random_floats((size_t)n_out * n_in), n_out, n_in);
        float *expected = random_floats(total), *got = copy_floats(expected, total),
              *alone = random_floats(n_out);

        plain_matmul(expected, ldy, x, ldx, rows, w, n_in, n_out);
        v->matmul(got, ldy, x, ldx, rows, w, n_in, n_out);
        assert_same_bits(expected, got, total, v->name);
        for (uint32_t r = 0; r < rows; r++) {
                v->matmul(alone, n_out, x + r * ldx, ldx, 1, w, n_in, n_out);
                assert_same_bits(got + r * ldy, alone, n_out, "a row on its own");
        }
        buffers_free();
}

START_TEST(matmul_equals_the_reference_and_rows_are_independent) {
        for (size_t v = 0; v < n_variants; v++)
                for (uint32_t rows = 1; rows <= 9; rows++)
                        for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
                                for (size_t o = 0; o < ARRAY_SIZE(sizes); o++)
                                        matmul_case(variants[v], rows, sizes[i], sizes[o]);
}
END_TEST

static void vectors_case(const struct kvd_ops *v, uint32_t n) {
        float *x = random_floats(n), *w = random_floats(n), *expected = random_floats(n),
              *got = random_floats(n);

        for (uint32_t i = 0; i < n; i++)
                x[i] *= 90.0f; /* silu: through both ends of the exponential */
        plain_rmsnorm(expected, x, w, n, 1e-5f);
        v->rmsnorm(got, x, w, n, 1e-5f);
        assert_same_bits(expected, got, n, v->name);

        scalar->swiglu(expected, x, w, n);
        v->swiglu(got, x, w, n);
        assert_same_bits(expected, got, n, v->name);

        memcpy(expected, x, n * sizeof *x);
        memcpy(got, x, n * sizeof *x);
        scalar->cap(expected, n, 0.7f, 50.0f);
        v->cap(got, n, 0.7f, 50.0f);
        assert_same_bits(expected, got, n, v->name);
        for (uint32_t i = 0; i < n; i++)
                ck_assert_float_eq_tol(got[i], 50.0f * tanhf(0.7f * x[i] / 50.0f), 2e-5f);
        ck_assert_float_eq(scalar->largest(x, n), v->largest(x, n));

        scalar->add(expected, x, n);
        v->add(got, x, n);
        assert_same_bits(expected, got, n, v->name);
        buffers_free();
}

START_TEST(vectors_equal_the_reference) {
        for (size_t v = 0; v < n_variants; v++)
                for (uint32_t n = 1; n < 140; n++)
                        vectors_case(variants[v], n);
}
END_TEST

START_TEST(rope_equals_the_reference) {
        for (size_t v = 0; v < n_variants; v++)
                for (uint32_t half = 1; half < 70; half++) {
                        float *expected = random_floats(2 * half),
                              *got = copy_floats(expected, 2 * half);
                        float *cosine = random_floats(half), *sine = random_floats(half);

                        plain_rope(expected, cosine, sine, half);
                        variants[v]->rope(got, cosine, sine, half);
                        assert_same_bits(expected, got, 2 * half, variants[v]->name);
                        buffers_free();
                }
}
END_TEST

static void softmax_case(const struct kvd_ops *v, uint32_t n, float spread) {
        float *expected = random_floats(n), *got, sum, got_sum;

        for (uint32_t i = 0; i < n; i++)
                expected[i] *= spread;
        got = copy_floats(expected, n);
        sum = scalar->softmax(expected, n, 0.176776695f);
        got_sum = v->softmax(got, n, 0.176776695f);
        assert_same_bits(expected, got, n, v->name);
        assert_same_bits(&sum, &got_sum, 1, v->name);
        buffers_free();
}

START_TEST(softmax_equals_the_reference) {
        for (size_t v = 0; v < n_variants; v++)
                for (uint32_t n = 1; n < 140; n++)
                        for (float spread = 1.0f; spread < 3000.0f; spread *= 13.0f)
                                softmax_case(variants[v], n, spread);
}
END_TEST

START_TEST(softmax_has_the_same_edges) {
        static const float edges[] = {0.0f,         -0.0f,        -86.99999f, -87.0f,    -87.00001f,
                                      -88.0f,       -104.0f,      -1e30f,     -INFINITY, -1e-30f,
                                      -0.34657359f, -0.34657362f, 0.0f,       -1.0f,     -87.0f,
                                      -20.5f,       -87.0f};
        enum { N_EDGES = ARRAY_SIZE(edges) };

        for (size_t v = 0; v < n_variants; v++) {
                float *expected = copy_floats(edges, N_EDGES), *got = copy_floats(edges, N_EDGES);

                scalar->softmax(expected, N_EDGES, 1.0f);
                variants[v]->softmax(got, N_EDGES, 1.0f);
                assert_same_bits(expected, got, N_EDGES, variants[v]->name);
                buffers_free();
        }
}
END_TEST

/* Tests the reference itself: e^x to 3e-7, and 0 instead of a subnormal. */
START_TEST(softmax_is_the_exponential) {
        for (double x = 0.0; x > -100.0; x -= 0.00173) {
                float pair[2] = {0.0f, (float)x};
                float sum = scalar->softmax(pair, 2, 1.0f);
                double exact = exp((double)(float)x);

                if (pair[0] != 1.0f || sum != 1.0f + pair[1])
                        ck_abort_msg("the larger weight is %a, the sum %a", (double)pair[0],
                                     (double)sum);
                if ((float)x < -87.0f ? pair[1] != 0.0f :
                                        fabs((double)pair[1] - exact) > 3e-7 * exact)
                        ck_abort_msg("e^%g is %g", x, (double)pair[1]);
        }
}
END_TEST

START_TEST(swiglu_keeps_its_ends) {
        float gate[4] = {200.0f, -200.0f, 0.0f, NAN}, up[4] = {2.0f, 2.0f, 2.0f, 2.0f}, y[4];

        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                if (!(*v)->works())
                        continue;
                (*v)->swiglu(y, gate, up, 4);
                ck_assert(y[0] == 400.0f && fabsf(y[1]) < 1e-30f && y[2] == 0.0f && isnan(y[3]));
        }
}
END_TEST

START_TEST(sixteen_bit_numbers_convert_alike) {
        enum kvd_number types[] = {KVD_NUMBER_F16, KVD_NUMBER_BF16};
        uint16_t *all = buffer(65536 * sizeof *all);

        for (size_t i = 0; i < 65536; i++)
                all[i] = (uint16_t)i;
        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                float *wide = buffer(65536 * sizeof *wide), *got = buffer(65536 * sizeof *got);
                uint16_t *back = buffer(65536 * sizeof *back);

                scalar->widen(wide, all, 65536, types[t]);
                scalar->narrow(back, wide, 65536, types[t]);
                /* every number survives the round trip; a NaN may become quiet */
                for (size_t i = 0; i < 65536; i++)
                        if (isnan(wide[i]) ? (back[i] | 0x240) != (all[i] | 0x240) :
                                             back[i] != all[i])
                                ck_abort_msg("%04x comes back as %04x", all[i], back[i]);
                for (size_t v = 0; v < n_variants; v++) {
                        variants[v]->widen(got, all, 65536, types[t]);
                        for (size_t i = 0; i < 65536; i++)
                                if (memcmp(wide + i, got + i, 4) != 0 &&
                                    !(isnan(wide[i]) && isnan(got[i])))
                                        ck_abort_msg("%s widens %04x otherwise", variants[v]->name,
                                                     all[i]);
                }
        }
        buffers_free();
}
END_TEST

START_TEST(narrowing_rounds_alike) {
        enum kvd_number types[] = {KVD_NUMBER_F16, KVD_NUMBER_BF16};
        size_t n = 1 << 20;
        uint32_t *bits = buffer(n * sizeof *bits);
        uint16_t *expected = buffer(n * sizeof *expected), *got = buffer(n * sizeof *got);

        for (size_t i = 0; i < n; i++) /* half of them in the range of half precision */
                bits[i] = i % 2 ? random_u32() : (random_u32() & 0x8fffffff) | 0x30000000;
        for (size_t v = 0; v < n_variants; v++)
                for (size_t t = 0; t < ARRAY_SIZE(types); t++)
                        for (size_t length = n; length > n - 9; length--) {
                                scalar->narrow(expected, (const float *)bits, length, types[t]);
                                memset(got, 0xa5, n * sizeof *got);
                                variants[v]->narrow(got, (const float *)bits, length, types[t]);
                                ck_assert_int_eq(memcmp(expected, got, length * sizeof *got), 0);
                                for (size_t i = length; i < n; i++)
                                        ck_assert_uint_eq(got[i], 0xa5a5); /* unchanged */
                        }
        buffers_free();
}
END_TEST

enum { ROOM = 1024 };

static void copy_case(const struct kvd_ops *v, uint8_t *room, const uint8_t *from, size_t align,
                      size_t bytes) {
        uint8_t *to = room + 128 + align;

        memset(room, 0xa5, ROOM);
        v->copy_nt(to, from, bytes);
        if (memcmp(to, from, bytes) != 0)
                ck_abort_msg("%s: %zu bytes at %zu differ", v->name, bytes, align);
        for (uint8_t *at = room; at < room + ROOM; at++)
                if (*at != 0xa5 && (at < to || at >= to + bytes))
                        ck_abort_msg("%s: %zu bytes at %zu touch byte %td", v->name, bytes, align,
                                     at - to);
}

START_TEST(copy_nt_copies_exactly) {
        _Alignas(64) static uint8_t room[ROOM], source[ROOM];

        for (size_t i = 0; i < sizeof source; i++)
                source[i] = (uint8_t)random_u32();
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (size_t align = 0; align < 64 && (*v)->works(); align++)
                        for (size_t bytes = 0; bytes < 600; bytes += bytes < 140 ? 1 : 37)
                                for (size_t skew = 0; skew < 64; skew += 7)
                                        copy_case(*v, room, source + skew, align, bytes);
}
END_TEST

START_TEST(copy_nt_stops_at_the_guard_pages) {
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (size_t bytes = 0; bytes < 9000 && (*v)->works(); bytes += 61) {
                        uint8_t *from = buffer(bytes), *to = buffer(bytes);

                        memset(from, (int)bytes, bytes);
                        (*v)->copy_nt(to, from, bytes);
                        ck_assert_int_eq(memcmp(to, from, bytes), 0);
                        buffers_free();
                }
}
END_TEST

SUITE("kernels: operations", find_variants(),
      TESTS(pick_finds_by_name_and_rejects_the_unknown, tables_have_no_holes,
            pack_equals_the_reference, matmul_equals_the_reference_and_rows_are_independent,
            vectors_equal_the_reference, rope_equals_the_reference, softmax_equals_the_reference,
            softmax_has_the_same_edges, softmax_is_the_exponential, swiglu_keeps_its_ends,
            sixteen_bit_numbers_convert_alike, narrowing_rounds_alike, copy_nt_copies_exactly,
            copy_nt_stops_at_the_guard_pages))
