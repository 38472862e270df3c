/* SPDX-License-Identifier: Apache-2.0 */

/* The compiler compares our declarations of cuBLAS with its header. C++ can take a function's type apart. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

namespace ours {
#include "kernels/cuda/cublas.h"
}

#include <cublas_v2.h>

/* Function types match if they have as many parameters, of equal sizes, and pointers at the same places. */
template <class T> struct is_pointer {
        static constexpr bool value = false;
};
template <class T> struct is_pointer<T *> {
        static constexpr bool value = true;
};

template <class A, class B> constexpr bool same_passing() {
        return sizeof(A) == sizeof(B) && is_pointer<A>::value == is_pointer<B>::value;
}

template <class A, class B> struct same_function {
        static constexpr bool value = false;
};
template <class R, class S, class... A, class... B> struct same_function<R (*)(A...), S (*)(B...)> {
        template <size_t n, size_t m> static constexpr bool parameters() {
                if constexpr (n == m)
                        return (same_passing<A, B>() && ... && true);
                else
                        return false;
        }
        static constexpr bool value = same_passing<R, S>() && parameters<sizeof...(A), sizeof...(B)>();
};

static_assert(!same_function<int (*)(int), int (*)(int, int)>::value, "another number of parameters is seen");
static_assert(!same_function<int (*)(int), int (*)(void *)>::value, "... and another size");

/* cublasGemmEx has an overload for C++, of an older type: what has a C name is meant. */
typedef cublasStatus_t (*their_gemm_ex)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                                        const void *, const void *, cudaDataType, int, const void *, cudaDataType, int,
                                        const void *, void *, cudaDataType, int, cublasComputeType_t,
                                        cublasGemmAlgo_t);
static_assert(sizeof(static_cast<their_gemm_ex>(cublasGemmEx)) > 0, "cublasGemmEx has that signature");

#define SAME(member, theirs) static_assert(same_function<decltype(ours::cublas::member), theirs>::value, #member)
SAME(create, decltype(&cublasCreate_v2));
SAME(destroy, decltype(&cublasDestroy_v2));
SAME(get_version, decltype(&cublasGetVersion_v2));
SAME(set_stream, decltype(&cublasSetStream_v2));
SAME(set_workspace, decltype(&cublasSetWorkspace_v2));
SAME(set_math_mode, decltype(&cublasSetMathMode));
SAME(gemm_ex, their_gemm_ex);

#define NUMBERS(IS) \
        IS(CUBLAS_F32, CUDA_R_32F) \
        IS(CUBLAS_F16, CUDA_R_16F) \
        IS(CUBLAS_BF16, CUDA_R_16BF) \
        IS(CUBLAS_PLAIN, CUBLAS_OP_N) \
        IS(CUBLAS_TRANSPOSED, CUBLAS_OP_T) \
        IS(CUBLAS_SUM_F32, CUBLAS_COMPUTE_32F) \
        IS(CUBLAS_SUM_TF32, CUBLAS_COMPUTE_32F_FAST_TF32) \
        IS(CUBLAS_ALGORITHM_DEFAULT, CUBLAS_GEMM_DEFAULT) \
        IS(CUBLAS_MATH_DEFAULT, CUBLAS_DEFAULT_MATH) \
        IS(CUBLAS_MATH_NO_REDUCED_SUMS, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)

#define NUMBER(mine, other) static_assert((long)ours::mine == (long)(other), #mine);
NUMBERS(NUMBER)

#define ONE(...) +1

int main() {
        printf("%d functions, %d numbers are those of cuBLAS %d.%d\n", 0 KVD_CUBLAS_CALLS(ONE), 0 NUMBERS(ONE),
               CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR);
        return 0;
}
