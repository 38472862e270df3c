/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compares products with sums in double, over types, transpositions, leading dimensions and
 * scalars. Also checks refusals.
 */

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/fixture.h"
#include "tests/lib/suite.h"

enum { F32 = 0, F16 = 2, BF16 = 14, SUM_F32 = 68, SUM_TF32 = 77 };

typedef int gemm_batched(void *, int, int, int, int, int, const void *, const void *, int, int,
                         long long, const void *, int, int, long long, const void *, void *, int,
                         int, long long, int, int, int);

static struct {
        int (*create)(void **), (*destroy)(void *), (*version)(void *, int *),
                (*set_stream)(void *, void *);
        int (*set_workspace)(void *, void *, size_t), (*set_math_mode)(void *, int);
        int (*gemm)(void *, int, int, int, int, int, const void *, const void *, int, int,
                    const void *, int, int, const void *, void *, int, int, int, int);
        gemm_batched *batched;
} blas;

static void *handle;

static void open_blas(void) {
        void *library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);

        ck_assert_ptr_nonnull(library);
        *(void **)&blas.create = dlsym(library, "cublasCreate_v2");
        *(void **)&blas.destroy = dlsym(library, "cublasDestroy_v2");
        *(void **)&blas.version = dlsym(library, "cublasGetVersion_v2");
        *(void **)&blas.set_stream = dlsym(library, "cublasSetStream_v2");
        *(void **)&blas.set_workspace = dlsym(library, "cublasSetWorkspace_v2");
        *(void **)&blas.set_math_mode = dlsym(library, "cublasSetMathMode");
        *(void **)&blas.gemm = dlsym(library, "cublasGemmEx");
        *(void **)&blas.batched = dlsym(library, "cublasGemmStridedBatchedEx");
        ck_assert_int_eq(blas.create(&handle), 0);
}

static void *memory(size_t bytes) {
        cu_address at;

        OK(cuMemAlloc(&at, bytes));
        return (void *)(uintptr_t)at;
}

static float small(unsigned *seed) {
        *seed = *seed * 1664525 + 1013904223;
        return (float)((int)(*seed >> 24) - 128) / 64; /* exact in every type */
}

/* For numbers that are exact and normal in 16 bits. */
static uint16_t half_of(float x) {
        int exponent;
        float fraction = frexpf(fabsf(x), &exponent);

        return (uint16_t)((x < 0) << 15 |
                          (x == 0 ? 0 : (exponent + 14) << 10 | ((int)(fraction * 2048) - 1024)));
}

static double of_half(uint16_t word) {
        int exponent = word >> 10 & 31, digits = word & 1023;
        double x = exponent ? ldexp(1024 + digits, exponent - 25) : ldexp(digits, -24);

        return word & 0x8000 ? -x : x;
}

static void put(void *at, int type, size_t i, float x) {
        uint32_t bits;

        memcpy(&bits, &x, sizeof bits);
        if (type == F32)
                ((float *)at)[i] = x;
        else if (type == F16)
                ((uint16_t *)at)[i] = half_of(x);
        else
                ((uint16_t *)at)[i] = (uint16_t)(bits >> 16);
}

static double get(const void *at, int type, size_t i) {
        uint32_t bits = type == BF16 ? (uint32_t)((const uint16_t *)at)[i] << 16 : 0;
        float x;

        memcpy(&x, &bits, sizeof x);
        return type == F32 ? ((const float *)at)[i] :
               type == F16 ? of_half(((const uint16_t *)at)[i]) :
                             x;
}

struct shape {
        int m, n, k, lda, ldb, ldc; /* ld: padding beyond the needed size */
};

/* Checks one product of the batch. The padding of C must be unchanged. */
static void compare(const struct shape *s, const void *a, const void *b, const void *c,
                    const void *before, int type, int c_type, int ta, int tb, int lda, int ldb,
                    int ldc, float alpha, float beta) {
        for (int j = 0; j < s->n; j++)
                for (int i = 0; i < ldc; i++) {
                        double want = 0, scale = 0, got = get(c, c_type, (size_t)j * ldc + i);

                        if (i >= s->m) {
                                ck_assert(got == get(before, c_type, (size_t)j * ldc + i));
                                continue;
                        }
                        for (int l = 0; l < s->k; l++) {
                                double x = get(a, type,
                                               ta ? (size_t)i * lda + l : (size_t)l * lda + i) *
                                           get(b, type,
                                               tb ? (size_t)l * ldb + j : (size_t)j * ldb + l);

                                want += x;
                                scale += fabs(x);
                        }
                        want = alpha * want + beta * get(before, c_type, (size_t)j * ldc + i);
                        ck_assert_msg(fabs(got - want) <=
                                              (c_type == F32 ? 1e-5 : 1e-2) * (scale + 1),
                                      "(%d, %d): %g, not %g", i, j, got, want);
                }
}

static void try(const struct shape *s, int type, int c_type, int ta, int tb, float alpha,
                float beta) {
        int lda = (ta ? s->k : s->m) + s->lda, ldb = (tb ? s->n : s->k) + s->ldb,
            ldc = s->m + s->ldc;
        size_t na = (size_t)lda * (ta ? s->m : s->k), nb = (size_t)ldb * (tb ? s->k : s->n),
               nc = (size_t)ldc * s->n;
        void *a = memory(na * 4), *b = memory(nb * 4), *c = memory(nc * 4),
             *before = malloc(nc * 4);
        unsigned seed = 7;

        for (size_t i = 0; i < na; i++)
                put(a, type, i, small(&seed));
        for (size_t i = 0; i < nb; i++)
                put(b, type, i, small(&seed));
        for (size_t i = 0; i < nc; i++)
                put(c, c_type, i, small(&seed));
        memcpy(before, c, nc * 4);
        ck_assert_int_eq(blas.gemm(handle, ta, tb, s->m, s->n, s->k, &alpha, a, type, lda, b, type,
                                   ldb, &beta, c, c_type, ldc, SUM_F32, -1),
                         0);
        OK(cuCtxSynchronize());
        compare(s, a, b, c, before, type, c_type, ta, tb, lda, ldb, ldc, alpha, beta);
        free(before);
        OK(cuMemFree((uintptr_t)a));
        OK(cuMemFree((uintptr_t)b));
        OK(cuMemFree((uintptr_t)c));
}

START_TEST(products) {
        static const struct shape shapes[] = {{1, 1, 1, 0, 0, 0},
                                              {3, 5, 17, 0, 0, 0},
                                              {17, 4, 33, 3, 1, 2},
                                              {64, 9, 128, 0, 8, 0},
                                              {7, 1, 300, 1, 0, 5}};
        static const int types[][2] = {
                {F32, F32}, {F16, F16}, {F16, F32}, {BF16, BF16}, {BF16, F32}};

        start();
        open_blas();
        for (size_t i = 0; i < ARRAY_SIZE(shapes); i++)
                for (size_t j = 0; j < ARRAY_SIZE(types); j++)
                        for (int trans = 0; trans < 4; trans++) {
                                try(&shapes[i], types[j][0], types[j][1], trans & 1, trans >> 1, 1,
                                    0);
                                try(&shapes[i], types[j][0], types[j][1], trans & 1, trans >> 1,
                                    -0.5f, 2);
                        }
}
END_TEST

START_TEST(a_batch) {
        const struct shape s = {3, 4, 5, 0, 0, 0};
        const float one = 1, zero = 0;
        const float before[12] = {0};
        float *a, *b, *c;
        unsigned seed = 1;

        start();
        open_blas();
        a = memory(4096);
        b = memory(4096);
        c = memory(4096);
        for (int i = 0; i < 100; i++) {
                a[i] = small(&seed);
                b[i] = small(&seed);
        }
        for (int i = 0; i < 40; i++)
                c[i] = NAN; /* multiplied by 0, not read */
        ck_assert_int_eq(blas.batched(handle, 0, 0, 3, 4, 5, &one, a, F32, 3, 16, b, F32, 5, 20,
                                      &zero, c, F32, 3, 13, 2, SUM_F32, -1),
                         0);
        OK(cuCtxSynchronize());
        ck_assert(isnan(c[12]) && isnan(c[25]));
        compare(&s, a, b, c, before, F32, F32, 0, 0, 3, 5, 3, 1, 0);
        compare(&s, a + 16, b + 20, c + 13, before, F32, F32, 0, 0, 3, 5, 3, 1, 0);
}
END_TEST

START_TEST(tf32_has_ten_bits) {
        const float one = 1, zero = 0;
        float *at;

        start();
        open_blas();
        at = memory(4096);
        at[0] = 1 + 1.0f / 1024 + 1.0f / 8192;
        at[1] = 1;
        ck_assert_int_eq(blas.gemm(handle, 0, 0, 1, 1, 1, &one, at, F32, 1, at + 1, F32, 1, &zero,
                                   at + 2, F32, 1, SUM_TF32, -1),
                         0);
        ck_assert_int_eq(blas.gemm(handle, 0, 0, 1, 1, 1, &one, at, F32, 1, at + 1, F32, 1, &zero,
                                   at + 3, F32, 1, SUM_F32, -1),
                         0);
        OK(cuCtxSynchronize());
        ck_assert(at[2] == 1 + 1.0f / 1024);
        ck_assert(at[3] == at[0]);
}
END_TEST

/*
 * Converts every fp16 number, including infinities and NaN, to fp32 and back by multiplying with 1.
 * Then does so with numbers between two fp16 numbers.
 */
START_TEST(sixteen_bits) {
        static const float between[][2] = {
                {1 + 0x1p-11f, 1},    {1 + 0x3p-11f, 1 + 0x1p-9f},
                {65519, 65504},       {65520, INFINITY},
                {0x1p-25f, 0},        {0x1.8p-25f, 0x1p-24f},
                {0x3p-25f, 0x1p-23f}, {-0x1.ffffp-15f, -0x1p-14f},
        };
        enum { N = 1 << 16 };
        const uint16_t one16 = 0x3c00;
        const float one = 1, zero = 0;
        uint16_t *from, *back, *unit;
        float *wide;

        start();
        open_blas();
        from = memory(N * 2);
        back = memory(N * 2);
        unit = memory(2);
        wide = memory(N * 4);
        *unit = one16;
        for (unsigned i = 0; i < N; i++)
                from[i] = (uint16_t)i;
        ck_assert_int_eq(blas.gemm(handle, 0, 0, N, 1, 1, &one, from, F16, N, unit, F16, 1, &zero,
                                   wide, F32, N, SUM_F32, -1),
                         0);
        ck_assert_int_eq(blas.gemm(handle, 0, 0, N, 1, 1, &one, from, F16, N, unit, F16, 1, &zero,
                                   back, F16, N, SUM_F32, -1),
                         0);
        OK(cuCtxSynchronize());
        for (unsigned i = 0; i < N; i++) {
                if ((i & 0x7c00) != 0x7c00)
                        ck_assert(wide[i] == of_half((uint16_t)i));
                else if (i & 0x3ff)
                        ck_assert(isnan(wide[i]) && (back[i] & 0x7c00) == 0x7c00 &&
                                  back[i] & 0x3ff);
                else
                        ck_assert(isinf(wide[i]));
                if (!isnan(wide[i]) && i != 0x8000) /* 0 + -0 is 0 */
                        ck_assert_uint_eq(back[i], i);
        }
        for (size_t i = 0; i < ARRAY_SIZE(between); i++) {
                ck_assert_int_eq(blas.gemm(handle, 0, 0, 1, 1, 1, &between[i][0], unit, F16, 1,
                                           unit, F16, 1, &zero, back, F16, 1, SUM_F32, -1),
                                 0);
                OK(cuCtxSynchronize());
                ck_assert((back[0] & 0x7fff) == 0x7c00 ? isinf(between[i][1]) :
                                                         of_half(back[0]) == between[i][1]);
        }
}
END_TEST

static void wait_a_little(void *data) {
        while (!*(_Atomic int *)data)
                continue;
}

START_TEST(products_are_in_their_stream) {
        const float one = 1, zero = 0;
        _Atomic int open = 0;
        cu_stream stream;
        float *at;
        int version;

        start();
        open_blas();
        stream = new_stream();
        at = memory(4096);
        at[0] = 3;
        at[1] = 5;
        at[2] = 0;
        ck_assert_int_eq(blas.version(handle, &version), 0);
        ck_assert_int_eq(version / 10000, 13);
        ck_assert_int_eq(blas.set_stream(handle, stream), 0);
        ck_assert_int_eq(blas.set_workspace(handle, memory(1 << 20), 1 << 20), 0);
        ck_assert_int_eq(blas.set_math_mode(handle, 16), 0);
        OK(cuLaunchHostFunc(stream, wait_a_little, &open));
        ck_assert_int_eq(blas.gemm(handle, 0, 0, 1, 1, 1, &one, at, F32, 1, at + 1, F32, 1, &zero,
                                   at + 2, F32, 1, SUM_F32, -1),
                         0);
        FAILS(CU_NOT_READY, cuStreamQuery(stream));
        ck_assert(at[2] == 0);
        open = 1;
        OK(cuStreamSynchronize(stream));
        ck_assert(at[2] == 15);
}
END_TEST

START_TEST(what_is_refused) {
        const float one = 1, zero = 0;
        float *at, host[4] = {0};
        void *other;

        start();
        open_blas();
        at = memory(4096);
#define GEMM(h, m, n, k, type, lda, compute) \
        blas.gemm(h, 0, 0, m, n, k, &one, at, type, lda, at, type, 8, &zero, at, F32, 8, compute, \
                  -1)
        ck_assert_int_eq(GEMM(handle, 2, 2, 2, F32, 1, SUM_F32), 7);
        ck_assert_int_eq(GEMM(handle, -1, 2, 2, F32, 8, SUM_F32), 7);
        ck_assert_int_eq(GEMM(handle, 2, 2, 2, 1 /* double */, 8, SUM_F32), 15);
        ck_assert_int_eq(GEMM(handle, 2, 2, 2, F32, 8, 64 /* sums of 16 bits */), 15);
        ck_assert_int_eq(GEMM(NULL, 2, 2, 2, F32, 8, SUM_F32), 1);
        ck_assert_int_eq(GEMM(handle, 0, 2, 2, F32, 8, SUM_F32), 0);
        ck_assert_int_eq(blas.set_workspace(handle, host, 4), 7);
        ck_assert_int_eq(blas.create(&other), 0);
        ck_assert_int_eq(blas.destroy(other), 0);
        ck_assert_int_eq(blas.destroy(other), 1);
        ck_assert_int_eq(GEMM(other, 2, 2, 2, F32, 8, SUM_F32), 1);
        OK(cuCtxSynchronize());
        ck_assert_int_eq(blas.gemm(handle, 0, 0, 1, 1, 1, &one, host, F32, 1, at, F32, 1, &zero, at,
                                   F32, 1, SUM_F32, -1),
                         0);
        FAILS(CU_ILLEGAL_ADDRESS, cuCtxSynchronize()); /* memory that is not the device's */
        ck_assert_int_eq(GEMM(handle, 2, 2, 2, F32, 8, SUM_F32), 13);
        ck_assert_int_eq(blas.create(&other), 1);
}
END_TEST

SUITE("cublas",
      TESTS(products, a_batch, sixteen_bits, tf32_has_ten_bits, products_are_in_their_stream,
            what_is_refused))
