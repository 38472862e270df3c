/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_CUBLAS_H
#define KVD_KERNELS_CUDA_CUBLAS_H

/*
 * cuBLAS, loaded at run time (libcublas.so.13, then .so.12), for products of matrices. The
 * declarations of its ABI are our own (tests/ipc/base compares them with cublas_v2.h where that is
 * installed).
 *
 * Sums are in fp32. TF32 is used only where a product asks for it. With the same library on the
 * same device, a product of the same shape, types and alignments gives the same bits every time:
 * atomics are not allowed, and the workspace is ours, of one size. A different number of rows may
 * select a different algorithm and so give different bits: callers that need equal bits must use
 * equal shapes.
 *
 * Results: 0 or negative errno, the reason in gpu->why.
 */

#include "kernels/cuda/gpu.h"

enum { /* cudaDataType */
       CUBLAS_F32 = 0,
       CUBLAS_F16 = 2,
       CUBLAS_BF16 = 14,
};

enum { CUBLAS_PLAIN = 0, CUBLAS_TRANSPOSED = 1 };   /* cublasOperation_t */
enum { CUBLAS_SUM_F32 = 68, CUBLAS_SUM_TF32 = 77 }; /* cublasComputeType_t */
enum { CUBLAS_ALGORITHM_DEFAULT = -1 };             /* cublasGemmAlgo_t */
enum {                                              /* cublasMath_t */
       CUBLAS_MATH_DEFAULT = 0,
       CUBLAS_MATH_NO_REDUCED_SUMS = 16, /* never sum 16-bit products in less than fp32 */
};

/* CALL(name, symbol, parameters); each returns a cublasStatus_t, 0 is success */
#define KVD_CUBLAS_CALLS(CALL) \
        CALL(create, cublasCreate_v2, (void **ret)) \
        CALL(destroy, cublasDestroy_v2, (void *handle)) \
        CALL(get_version, cublasGetVersion_v2, (void *handle, int *ret)) \
        CALL(set_stream, cublasSetStream_v2, (void *handle, void *stream)) \
        CALL(set_workspace, cublasSetWorkspace_v2, (void *handle, void *at, size_t bytes)) \
        CALL(set_math_mode, cublasSetMathMode, (void *handle, int mode)) \
        CALL(gemm_ex, cublasGemmEx, \
             (void *handle, int transa, int transb, int m, int n, int k, const void *alpha, \
              const void *a, int a_type, int lda, const void *b, int b_type, int ldb, \
              const void *beta, void *c, int c_type, int ldc, int compute, int algorithm))

struct cublas {
#define KVD_CUBLAS_MEMBER(name, symbol, parameters) int(*name) parameters;
        KVD_CUBLAS_CALLS(KVD_CUBLAS_MEMBER)
#undef KVD_CUBLAS_MEMBER
};

/*
 * The library's functions, the same table at every call; thread-safe. Returns NULL if something is
 * missing; *why then says what, in one line.
 */
const struct cublas *cublas_load(const char **why);

struct gpu_blas {
        const struct cublas *calls;
        struct gpu *gpu;
        void *handle;
        cu_address workspace;
        int version; /* 130100: 13.1.0 */
};

/*
 * Opens cuBLAS for products on this stream. -ENODEV if there is no cuBLAS. gpu_blas_close also
 * accepts a half-opened one.
 */
int gpu_blas_open(struct gpu_blas *, struct gpu *, cu_stream stream);
void gpu_blas_close(struct gpu_blas *);

/*
 * to[r][o] = sum over i < n_in of from[r][i] * matrix[o][i], r < rows, o < n_out; to is fp32.
 * Asynchronous.
 */
struct gpu_product {
        cu_address to, from, matrix;
        uint32_t rows, n_in, n_out;
        uint32_t ld_to, ld_from; /* elements from row to row; those of the matrix are n_in */
        uint32_t number;         /* of from and matrix: 1 fp32, 2 fp16, 3 bf16 (enum kvd_number) */
        bool tf32;               /* fp32 only: multiply with 10 bits of mantissa */
};

int gpu_multiply(struct gpu_blas *, const struct gpu_product *);

#endif
