/* SPDX-License-Identifier: Apache-2.0 */

/*
 * cuBLAS without a GPU: libcublas.so.13 with the few functions that matrix products need, on the
 * stand-in driver's streams. Numbers of 16 bits are widened, and products are summed in fp32, in 16
 * running sums in a fixed order. Scalars are in host memory, as by default. Combinations of types
 * that cuBLAS does not accept are refused in the same way.
 */

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/run.h"

enum {
        SUCCESS = 0,
        NOT_INITIALIZED = 1,
        ALLOC_FAILED = 3,
        INVALID_VALUE = 7,
        EXECUTION_FAILED = 13,
        NOT_SUPPORTED = 15
};
enum { F32 = 0, F16 = 2, BF16 = 14 }; /* cudaDataType */
enum { PLAIN = 0, TRANSPOSED = 1 };
enum { SUM_F32 = 68, SUM_F32_PEDANTIC = 69, SUM_F32_TF32 = 77 }; /* cublasComputeType_t */
enum { VERSION = 130000, LANES = 16 };

/* Handles are never reused, so that a destroyed one is recognised. */
struct handle {
        struct handle *next;
        bool alive;
        cu_stream stream;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle *handles; /* under lock */

struct matrix {
        cu_address at;
        int type, ld, trans;
        int64_t rows, columns; /* as stored in memory, column by column */
        long long stride;      /* elements from one matrix of a batch to the next */
};

struct product {
        int m, n, k, batch;
        float alpha, beta;
        struct matrix a, b, c;
        bool tf32;
};

/* ---- numbers --------------------------------------------------------------------------------- */

static float from_bits(uint32_t bits) {
        float x;

        memcpy(&x, &bits, sizeof x);
        return x;
}

static uint32_t to_bits(float x) {
        uint32_t bits;

        memcpy(&bits, &x, sizeof bits);
        return bits;
}

static size_t size_of(int type) {
        return type == F32 ? 4 : 2;
}

/* By arithmetic, so that subnormal fp16 numbers become normal fp32 numbers. */
static float from_f16(uint16_t word) {
        uint32_t bits = (uint32_t)(word & 0x7fff) << 13;
        float x = (word & 0x7c00) == 0x7c00 ? from_bits(bits | 0x7f800000) :
                                              from_bits(bits) * 0x1p112f;

        return word & 0x8000 ? -x : x;
}

/*
 * Rounds to nearest even. Below the least normal number, adding 0.5 leaves only the digits that
 * fit.
 */
static uint16_t to_f16(float x) {
        uint32_t bits = to_bits(x) & 0x7fffffff;
        uint16_t sign = (uint16_t)(to_bits(x) >> 16 & 0x8000);

        if (bits >= to_bits(65520))
                return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
        if (bits < to_bits(0x1p-14f))
                return (uint16_t)(sign | (to_bits(from_bits(bits) + 0.5f) - to_bits(0.5f)));
        return (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

static float load(const uint8_t *at, int type) {
        uint16_t word;
        float x;

        if (type == F32) {
                memcpy(&x, at, sizeof x);
                return x;
        }
        memcpy(&word, at, sizeof word);
        return type == F16 ? from_f16(word) : from_bits((uint32_t)word << 16);
}

/* Rounds to nearest even. NaN stays NaN. */
static uint16_t to_bf16(float x) {
        uint32_t bits = to_bits(x);

        if (x != x)
                return (uint16_t)(bits >> 16 | 0x40);
        return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void save(uint8_t *at, int type, float x) {
        uint16_t word = type == F16 ? to_f16(x) : to_bf16(x);

        if (type == F32)
                memcpy(at, &x, sizeof x);
        else
                memcpy(at, &word, sizeof word);
}

static float to_tf32(float x) {
        uint32_t bits = to_bits(x);

        return x != x ? x : from_bits((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

/* ---- the product ----------------------------------------------------------------------------- */

static uint8_t *element(const struct matrix *m, int batch, int64_t row, int64_t column) {
        return (uint8_t *)(uintptr_t)m->at +
               (size_t)(batch * m->stride + column * m->ld + row) * size_of(m->type);
}

/* Copies to n rows of k numbers: the rows of op(A), or the columns of op(B). */
static float *pack(const struct matrix *m, int batch, int n, int k, bool k_is_column, bool tf32) {
        float *to = malloc((size_t)n * k * sizeof *to);

        if (!to)
                abort();
        for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < k; j++) {
                        float x = load(k_is_column ? element(m, batch, i, j) :
                                                     element(m, batch, j, i),
                                       m->type);

                        to[i * k + j] = tf32 ? to_tf32(x) : x;
                }
        return to;
}

static float dot(const float *a, const float *b, int n) {
        float sums[LANES] = {0}, sum = 0;
        int i = 0;

        for (; i + LANES <= n; i += LANES)
                for (int j = 0; j < LANES; j++)
                        sums[j] += a[i + j] * b[i + j];
        for (; i < n; i++)
                sums[i % LANES] += a[i] * b[i];
        for (int j = 0; j < LANES; j++)
                sum += sums[j];
        return sum;
}

static void multiply(const struct product *p, int batch) {
        float *a = pack(&p->a, batch, p->m, p->k, p->a.trans == PLAIN, p->tf32);
        float *b = pack(&p->b, batch, p->n, p->k, p->b.trans == TRANSPOSED, p->tf32);

        for (int64_t j = 0; j < p->n; j++)
                for (int64_t i = 0; i < p->m; i++) {
                        uint8_t *to = element(&p->c, batch, i, j);
                        float x = p->alpha * dot(a + i * p->k, b + j * p->k, p->k);

                        /* With beta 0, C is not read: it may be NaN. */
                        save(to, p->c.type, p->beta != 0 ? x + p->beta * load(to, p->c.type) : x);
                }
        free(a);
        free(b);
}

static bool allows(const struct matrix *m, int batch, int access) {
        size_t n = (size_t)((m->columns - 1) * m->ld + m->rows);

        return m->rows == 0 || m->columns == 0 ||
               fakecuda_allows((cu_address)(uintptr_t)element(m, batch, 0, 0), n * size_of(m->type),
                               access);
}

static cu_result run(void *data) {
        const struct product *p = data;

        for (int i = 0; i < p->batch; i++) {
                if ((p->k &&
                     (!allows(&p->a, i, CU_ACCESS_READ) || !allows(&p->b, i, CU_ACCESS_READ))) ||
                    !allows(&p->c, i, CU_ACCESS_READ_WRITE))
                        return CU_ILLEGAL_ADDRESS;
                multiply(p, i);
        }
        return CU_OK;
}

/* ---- what programs call ---------------------------------------------------------------------- */

#define CUBLAS __attribute__((visibility("default")))

CUBLAS int cublasCreate_v2(void **ret);
CUBLAS int cublasDestroy_v2(void *handle);
CUBLAS int cublasGetVersion_v2(void *handle, int *ret);
CUBLAS int cublasSetStream_v2(void *handle, void *stream);
CUBLAS int cublasSetWorkspace_v2(void *handle, void *at, size_t bytes);
CUBLAS int cublasSetMathMode(void *handle, int mode);
CUBLAS int cublasGemmEx(void *handle, int transa, int transb, int m, int n, int k,
                        const void *alpha, const void *a, int a_type, int lda, const void *b,
                        int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                        int compute, int algorithm);
CUBLAS int cublasGemmStridedBatchedEx(void *handle, int transa, int transb, int m, int n, int k,
                                      const void *alpha, const void *a, int a_type, int lda,
                                      long long a_stride, const void *b, int b_type, int ldb,
                                      long long b_stride, const void *beta, void *c, int c_type,
                                      int ldc, long long c_stride, int batch, int compute,
                                      int algorithm);

static struct handle *find(void *handle) {
        struct handle *it;

        pthread_mutex_lock(&lock);
        for (it = handles; it && (void *)it != handle; it = it->next)
                continue;
        pthread_mutex_unlock(&lock);
        return it && it->alive ? it : NULL;
}

static cu_result nothing(void *data) {
        return CU_OK;
}

/* Needs a current context that is not broken. */
int cublasCreate_v2(void **ret) {
        struct handle *it;

        if (!ret)
                return INVALID_VALUE;
        if (fakecuda_run(NULL, nothing, NULL) != CU_OK)
                return NOT_INITIALIZED;
        it = calloc(1, sizeof *it);
        if (!it)
                return ALLOC_FAILED;
        it->alive = true;
        pthread_mutex_lock(&lock);
        it->next = handles;
        handles = it;
        pthread_mutex_unlock(&lock);
        *ret = it;
        return SUCCESS;
}

int cublasDestroy_v2(void *handle) {
        struct handle *it = find(handle);

        if (it)
                it->alive = false;
        return it ? SUCCESS : NOT_INITIALIZED;
}

int cublasGetVersion_v2(void *handle, int *ret) {
        if (!find(handle))
                return NOT_INITIALIZED;
        if (!ret)
                return INVALID_VALUE;
        *ret = VERSION;
        return SUCCESS;
}

int cublasSetStream_v2(void *handle, void *stream) {
        struct handle *it = find(handle);

        if (it)
                it->stream = stream;
        return it ? SUCCESS : NOT_INITIALIZED;
}

int cublasSetWorkspace_v2(void *handle, void *at, size_t bytes) {
        if (!find(handle))
                return NOT_INITIALIZED;
        return (uintptr_t)at % 256 || !fakecuda_allows((cu_address)(uintptr_t)at, bytes,
                                                       CU_ACCESS_READ_WRITE) ?
                       INVALID_VALUE :
                       SUCCESS;
}

int cublasSetMathMode(void *handle, int mode) {
        enum { DEFAULT = 0, PEDANTIC = 2, TF32 = 3, NO_REDUCED_SUMS = 16 };

        if (!find(handle))
                return NOT_INITIALIZED;
        mode &= ~NO_REDUCED_SUMS;
        return mode == DEFAULT || mode == PEDANTIC || mode == TF32 ? SUCCESS : INVALID_VALUE;
}

static struct matrix matrix(const void *at, int type, int ld, int trans, int rows, int columns,
                            long long stride) {
        return (struct matrix){(cu_address)(uintptr_t)at,
                               type,
                               ld,
                               trans,
                               trans == PLAIN ? rows : columns,
                               trans == PLAIN ? columns : rows,
                               stride};
}

static int check(const struct product *p, int compute) {
        const struct matrix *all[] = {&p->a, &p->b, &p->c};

        if (p->m < 0 || p->n < 0 || p->k < 0 || p->batch < 0 || p->a.trans < 0 || p->a.trans > 2 ||
            p->b.trans < 0 || p->b.trans > 2)
                return INVALID_VALUE;
        for (size_t i = 0; i < ARRAY_SIZE(all); i++)
                if (all[i]->ld < MAX(1, all[i]->rows))
                        return INVALID_VALUE;
        if (compute != SUM_F32 && compute != SUM_F32_PEDANTIC &&
            (compute != SUM_F32_TF32 || p->a.type != F32))
                return NOT_SUPPORTED;
        if ((p->a.type != F32 && p->a.type != F16 && p->a.type != BF16) || p->a.type != p->b.type ||
            (p->c.type != F32 && p->c.type != p->a.type))
                return NOT_SUPPORTED;
        return SUCCESS;
}

static int submit(struct handle *handle, const struct product *like, int compute) {
        struct product *p;
        int status = handle ? check(like, compute) : NOT_INITIALIZED;

        if (status || !like->m || !like->n || !like->batch)
                return status;
        p = malloc(sizeof *p);
        if (!p)
                return ALLOC_FAILED;
        *p = *like;
        if (fakecuda_run(handle->stream, run, p) == CU_OK)
                return SUCCESS;
        free(p);
        return EXECUTION_FAILED;
}

int cublasGemmStridedBatchedEx(void *handle, int transa, int transb, int m, int n, int k,
                               const void *alpha, const void *a, int a_type, int lda,
                               long long a_stride, const void *b, int b_type, int ldb,
                               long long b_stride, const void *beta, void *c, int c_type, int ldc,
                               long long c_stride, int batch, int compute, int algorithm) {
        struct product p = {
                .m = m,
                .n = n,
                .k = k,
                .batch = batch,
                .a = matrix(a, a_type, lda, transa, m, k, a_stride),
                .b = matrix(b, b_type, ldb, transb, k, n, b_stride),
                .c = matrix(c, c_type, ldc, PLAIN, m, n, c_stride),
                .tf32 = compute == SUM_F32_TF32,
        };

        if (!alpha || !beta)
                return INVALID_VALUE;
        memcpy(&p.alpha, alpha, sizeof p.alpha);
        memcpy(&p.beta, beta, sizeof p.beta);
        return submit(find(handle), &p, compute);
}

int cublasGemmEx(void *handle, int transa, int transb, int m, int n, int k, const void *alpha,
                 const void *a, int a_type, int lda, const void *b, int b_type, int ldb,
                 const void *beta, void *c, int c_type, int ldc, int compute, int algorithm) {
        return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, a, a_type, lda, 0,
                                          b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute,
                                          algorithm);
}
