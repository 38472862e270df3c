/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_DEVICE_CUH
#define KVD_KERNELS_CUDA_DEVICE_CUH

/*
 * Kernels are written in CUDA C plus only what this file offers, so that the same source also runs
 * on a CPU: where KVD_EMULATE is defined, the names below, and CUDA's own, already exist. That is
 * how the everyday tests compare every kernel with its scalar reference.
 *
 *      KVD_KERNEL(name, struct arguments, threads) { ... a.member ... }      threads: the largest block
 *      KVD_KERNEL_ROOMY(...)                       the same, with more registers and fewer resident blocks
 *      KVD_SHARED(type, name)                      dynamic shared memory
 *      __shared__ type name[n];                    static shared memory: of fixed size, at the top of a function
 *
 * Rules that keep both worlds equal: every thread of a block reaches every __syncthreads(), and
 * every lane of a warp every warp_*() and __syncwarp(); no early return before one; no inline
 * assembly outside this file; no warp primitives but those named here; no recursion; sums in fp32
 * unless the reference uses fp64. The blocks of a launch may run in any order and never wait for
 * each other.
 */

#include <stdint.h>

#ifndef KVD_EMULATE

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define KVD_KERNEL(name, arguments, threads) \
        extern "C" __global__ void __launch_bounds__(threads) \
                kvd_##name(const __grid_constant__ arguments a)
#define KVD_KERNEL_ROOMY(name, arguments, threads) \
        extern "C" __global__ void __launch_bounds__(threads, 1) \
                kvd_##name(const __grid_constant__ arguments a)
#define KVD_SHARED(type, name) \
        extern __shared__ __align__(16) uint8_t kvd_shared_memory[]; \
        type *const name = reinterpret_cast<type *>(kvd_shared_memory)

/* ---- warps ----------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t lane_id() {
        return threadIdx.x & 31;
}

template <typename T> static __device__ __forceinline__ T warp_xor(T x, int mask) {
        return __shfl_xor_sync(0xffffffffu, x, mask);
}

template <typename T> static __device__ __forceinline__ T warp_from(T x, int lane) {
        return __shfl_sync(0xffffffffu, x, lane);
}

template <typename T> static __device__ __forceinline__ T warp_up(T x, int by) {
        return __shfl_up_sync(0xffffffffu, x, by);
}

static __device__ __forceinline__ uint32_t warp_ballot(bool x) {
        return __ballot_sync(0xffffffffu, x);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Loads 16 bytes from pool memory, which is read once, bypassing L1. at is aligned to 16. */
static __device__ __forceinline__ uint4 load_16(const void *at) {
        uint4 v;

        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
        return v;
}

/*
 * Copies 16 bytes from global to shared memory, asynchronously; visible after copy_wait and a
 * barrier.
 */
static __device__ __forceinline__ void copy_16(void *shared, const void *global) {
        uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);

        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

/*
 * The same, or zeros if there is false. Then nothing is read, but global must still be a device
 * address.
 */
static __device__ __forceinline__ void copy_16_or_zeros(void *shared, const void *global,
                                                        bool there) {
        uint32_t to = (uint32_t)__cvta_generic_to_shared(shared), bytes = there ? 16 : 0;

        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                     "r"(bytes)
                     : "memory");
}

static __device__ __forceinline__ void copy_commit() {
        asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most the last PENDING groups that this thread committed are in flight. */
template <int PENDING> static __device__ __forceinline__ void copy_wait() {
        asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

/* ---- matrix units ---------------------------------------------------------------------------- */

/*
 * D (16 x 8, fp32) += A (16 x 16, row) B (16 x 8, column), spread over a warp as PTX's mma.m16n8k16
 * defines: with g = lane / 4 and t = lane % 4, a[0..3] are the pairs at (g, 2t), (g + 8, 2t), (g,
 * 2t + 8), (g + 8, 2t + 8), b[0..1] the pairs at rows (2t, 2t + 8) of column g, d[0..3] the numbers
 * at (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
 */
static __device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4],
                                                const uint32_t b[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void mma_f16(float d[4], const uint32_t a[4],
                                               const uint32_t b[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* ---- numbers --------------------------------------------------------------------------------- */

static __device__ __forceinline__ float f16_to_float(uint16_t x) {
        return __half2float(__ushort_as_half(x));
}

static __device__ __forceinline__ uint16_t float_to_f16(float x) { /* nearest even */
        return __half_as_ushort(__float2half_rn(x));
}

static __device__ __forceinline__ float bf16_to_float(uint16_t x) {
        return __uint_as_float((uint32_t)x << 16);
}

static __device__ __forceinline__ uint16_t float_to_bf16(float x) { /* nearest even */
        return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

#endif

/* ---- the same on both ------------------------------------------------------------------------ */

static __device__ __forceinline__ float warp_sum(float x) {
        for (int mask = 16; mask; mask /= 2)
                x += warp_xor(x, mask);
        return x;
}

/* Element types in memory; the numbers are those of enum kvd_number (kernels/ops.h). */
enum number {
        NUMBER_F32 = 1,
        NUMBER_F16 = 2,
        NUMBER_BF16 = 3,
        NUMBER_Q8 = 5, /* those of less than 16 bits: narrow.cuh */
        NUMBER_Q4 = 6,
        NUMBER_E4M3 = 7,
        NUMBER_E5M2 = 8,
        NUMBER_NARROW, /* any of these: as floats, which is done when rows are loaded */
};

template <int NUMBER> struct element;
template <> struct element<NUMBER_F32> {
        typedef float type;
        static __device__ __forceinline__ float wide(float x) { return x; }
        static __device__ __forceinline__ float narrow(float x) { return x; }
};
template <> struct element<NUMBER_NARROW> : element<NUMBER_F32> {};
template <> struct element<NUMBER_F16> {
        typedef uint16_t type;
        static __device__ __forceinline__ float wide(uint16_t x) { return f16_to_float(x); }
        static __device__ __forceinline__ uint16_t narrow(float x) { return float_to_f16(x); }
};
template <> struct element<NUMBER_BF16> {
        typedef uint16_t type;
        static __device__ __forceinline__ float wide(uint16_t x) { return bf16_to_float(x); }
        static __device__ __forceinline__ uint16_t narrow(float x) { return float_to_bf16(x); }
};

/* 16 bytes as numbers of a type: N is 4 or 8. */
template <int NUMBER> struct vector {
        static const int N = 16 / sizeof(typename element<NUMBER>::type);

        static __device__ __forceinline__ void wide(float *to, uint4 v) {
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
                for (int i = 0; i < 4; i++) {
                        if (N == 4) {
                                to[i] = __uint_as_float(words[i]);
                        } else if (NUMBER == NUMBER_F16) {
                                to[2 * i] = f16_to_float((uint16_t)words[i]);
                                to[2 * i + 1] = f16_to_float((uint16_t)(words[i] >> 16));
                        } else {
                                to[2 * i] = __uint_as_float(words[i] << 16);
                                to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
                        }
                }
        }
};

#endif
