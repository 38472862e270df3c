/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_FAKECUDA_EMULATE_CUDA_H
#define KVD_TESTS_FAKECUDA_EMULATE_CUDA_H

/*
 * Replaces CUDA, and the GPU's part of device.cuh, for a .cu: included before it, as C++, with
 * KVD_EMULATE. Results equal those of the GPU bit by bit, except for functions that CUDA itself
 * only approximates (__expf, rsqrtf, ...). Where CUDA leaves a choice (the order of a matrix unit's
 * additions), the order here is ascending.
 *
 * Shared memory of fixed size is one variable: ASan watches its ends, and the data of the previous
 * block is still there.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tests/gpu/fakecuda/emulate.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifndef __restrict__
#define __restrict__ __restrict
#endif

#define KVD_KERNEL(name_, arguments_, threads_) \
        static void kvd_##name_(const arguments_ &a); \
        static void kvd_##name_##_thread(const void *a) { \
                kvd_##name_(*static_cast<const arguments_ *>(a)); \
        } \
        static void kvd_##name_##_run(const struct fake_launch *launch, const void *a) { \
                emulate_run("kvd_" #name_, threads_, launch, kvd_##name_##_thread, a); \
        } \
        extern "C" const struct fake_kernel fake_kernel_##name_; \
        const struct fake_kernel fake_kernel_##name_ = {"kvd_" #name_, sizeof(arguments_), \
                                                        threads_, kvd_##name_##_run}; \
        static void kvd_##name_(const arguments_ &a)
#define KVD_KERNEL_ROOMY(name_, arguments_, threads_) KVD_KERNEL(name_, arguments_, threads_)
#define KVD_SHARED(type, name) type *const name = reinterpret_cast<type *>(emulate_shared())

#define threadIdx emulate_thread
#define blockIdx emulate_block
#define blockDim emulate_threads
#define gridDim emulate_blocks
static const int warpSize = 32;

/* ---- vectors --------------------------------------------------------------------------------- */

#define EMULATE_VECTOR2(name, type, align) \
        struct __align__(align) name { \
                type x, y; \
        }; \
        static inline name make_##name(type x, type y) { \
                return {x, y}; \
        }
#define EMULATE_VECTOR4(name, type, align) \
        struct __align__(align) name { \
                type x, y, z, w; \
        }; \
        static inline name make_##name(type x, type y, type z, type w) { \
                return {x, y, z, w}; \
        }

EMULATE_VECTOR2(uint2, unsigned, 8)
EMULATE_VECTOR2(int2, int, 8)
EMULATE_VECTOR2(float2, float, 8)
EMULATE_VECTOR2(double2, double, 16)
EMULATE_VECTOR2(ulonglong2, unsigned long long, 16)
EMULATE_VECTOR4(uint4, unsigned, 16)
EMULATE_VECTOR4(int4, int, 16)
EMULATE_VECTOR4(float4, float, 16)
EMULATE_VECTOR4(ushort4, unsigned short, 8)

/* ---- barriers and fences --------------------------------------------------------------------- */

static inline void __syncthreads(const char *file = __builtin_FILE(), int at = __builtin_LINE()) {
        emulate_barrier(0, file, at);
}

static inline int __syncthreads_or(int x, const char *file = __builtin_FILE(),
                                   int at = __builtin_LINE()) {
        return emulate_barrier(x != 0, file, at).some;
}

static inline int __syncthreads_and(int x, const char *file = __builtin_FILE(),
                                    int at = __builtin_LINE()) {
        return !emulate_barrier(x == 0, file, at).some;
}

static inline int __syncthreads_count(int x, const char *file = __builtin_FILE(),
                                      int at = __builtin_LINE()) {
        return (int)emulate_barrier(x != 0, file, at).count;
}

static inline void __threadfence() {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_block() {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_system() {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* ---- warps ----------------------------------------------------------------------------------- */

static inline uint32_t lane_id() {
        return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31;
}

static const char emulate_xor[] = "warp_xor", emulate_from[] = "warp_from",
                  emulate_up[] = "warp_up", emulate_ballot[] = "warp_ballot", emulate_mma[] = "mma";

static inline void __syncwarp(int at = __builtin_LINE()) {
        emulate_warp_barrier(at);
}

template <typename T>
static inline T emulate_slot(const uint8_t (*slots)[EMULATE_SLOT], unsigned lane) {
        T x;

        memcpy(&x, slots[lane], sizeof x);
        return x;
}

template <typename T> static inline T warp_xor(T x, int mask, int at = __builtin_LINE()) {
        static_assert(sizeof x <= EMULATE_SLOT, "one slot");
        return emulate_slot<T>(emulate_exchange(&x, sizeof x, emulate_xor, at),
                               (lane_id() ^ (unsigned)mask) & 31);
}

template <typename T> static inline T warp_from(T x, int lane, int at = __builtin_LINE()) {
        static_assert(sizeof x <= EMULATE_SLOT, "one slot");
        return emulate_slot<T>(emulate_exchange(&x, sizeof x, emulate_from, at),
                               (unsigned)lane & 31);
}

template <typename T> static inline T warp_up(T x, int by, int at = __builtin_LINE()) {
        static_assert(sizeof x <= EMULATE_SLOT, "one slot");
        unsigned lane = lane_id();

        return emulate_slot<T>(emulate_exchange(&x, sizeof x, emulate_up, at),
                               lane >= (unsigned)by ? lane - (unsigned)by : lane);
}

static inline uint32_t warp_ballot(bool x, int at = __builtin_LINE()) {
        const uint8_t(*slots)[EMULATE_SLOT] = emulate_exchange(&x, sizeof x, emulate_ballot, at);
        uint32_t bits = 0;

        for (unsigned lane = 0; lane < 32; lane++)
                bits |= (uint32_t)emulate_slot<bool>(slots, lane) << lane;
        return bits;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static inline uint4 load_16(const void *from) {
        emulate_aligned(from, 16, "load_16");
        return *static_cast<const uint4 *>(from);
}

static inline void copy_16(void *shared, const void *global) {
        emulate_copy(shared, global);
}
static inline void copy_16_or_zeros(void *shared, const void *global, bool there) {
        static const uint4 zeros = {0, 0, 0, 0};

        emulate_copy(shared, there ? global : &zeros);
}
static inline void copy_commit() {
        emulate_commit();
}
template <int PENDING> static inline void copy_wait() {
        emulate_wait(PENDING);
}
template <typename T> static inline T __ldg(const T *from) {
        return *from;
}

/* ---- atomic operations ----------------------------------------------------------------------- */

template <typename T, typename F> static inline T emulate_atomic(T *at, F changed) {
        T old, next;

        __atomic_load(at, &old, __ATOMIC_RELAXED);
        do {
                next = changed(old);
        } while (!__atomic_compare_exchange(at, &old, &next, false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED));
        return old;
}

#define EMULATE_ATOMIC(name, type, changed) \
        static inline type name(type *at, type x) { \
                return emulate_atomic(at, [x](type old) -> type { return (type)(changed); }); \
        }
#define EMULATE_ATOMICS(type) \
        EMULATE_ATOMIC(atomicAdd, type, old + x) \
        EMULATE_ATOMIC(atomicExch, type, ((void)old, x))
#define EMULATE_ORDERED(type) \
        EMULATE_ATOMIC(atomicMax, type, old > x ? old : x) \
        EMULATE_ATOMIC(atomicMin, type, old < x ? old : x) \
        EMULATE_ATOMIC(atomicOr, type, old | x) \
        EMULATE_ATOMIC(atomicAnd, type, old &x) \
        EMULATE_ATOMIC(atomicXor, type, old ^ x) \
        static inline type atomicCAS(type *at, type is, type x) { \
                return emulate_atomic(at, [is, x](type old) { return old == is ? x : old; }); \
        }

EMULATE_ATOMICS(int)
EMULATE_ATOMICS(unsigned)
EMULATE_ATOMICS(unsigned long long)
EMULATE_ATOMICS(float)
EMULATE_ATOMICS(double)
EMULATE_ORDERED(int)
EMULATE_ORDERED(unsigned)
EMULATE_ORDERED(unsigned long long)

/* ---- bits ------------------------------------------------------------------------------------ */

template <typename TO, typename FROM> static inline TO emulate_bits(FROM x) {
        TO y;

        static_assert(sizeof x == sizeof y, "bits");
        memcpy(&y, &x, sizeof y);
        return y;
}

static inline float __uint_as_float(unsigned x) {
        return emulate_bits<float>(x);
}
static inline unsigned __float_as_uint(float x) {
        return emulate_bits<unsigned>(x);
}
static inline float __int_as_float(int x) {
        return emulate_bits<float>(x);
}
static inline int __float_as_int(float x) {
        return emulate_bits<int>(x);
}
static inline double __longlong_as_double(long long x) {
        return emulate_bits<double>(x);
}
static inline long long __double_as_longlong(double x) {
        return emulate_bits<long long>(x);
}

static inline int __popc(unsigned x) {
        return __builtin_popcount(x);
}
static inline int __popcll(unsigned long long x) {
        return __builtin_popcountll(x);
}
static inline int __clz(int x) {
        return x ? __builtin_clz((unsigned)x) : 32;
}
static inline int __clzll(long long x) {
        return x ? __builtin_clzll((unsigned long long)x) : 64;
}
static inline int __ffs(int x) {
        return __builtin_ffs(x);
}
static inline int __ffsll(long long x) {
        return __builtin_ffsll(x);
}

static inline unsigned __brev(unsigned x) {
        x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
        x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
        x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
        return __builtin_bswap32(x);
}

static inline unsigned long long __brevll(unsigned long long x) {
        return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}

/* Sum of the products of four bytes each. */
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
        for (int i = 0; i < 32; i += 8)
                c += (a >> i & 255) * (b >> i & 255);
        return c;
}

static inline unsigned __umulhi(unsigned a, unsigned b) {
        return (unsigned)((uint64_t)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
        return (unsigned long long)((unsigned __int128)a * b >> 64);
}

static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
        return (unsigned)(((uint64_t)high << 32 | low) << (by & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
        return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}

static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned pick) {
        uint64_t both = (uint64_t)b << 32 | a;
        unsigned to = 0;

        for (int i = 0; i < 4; i++)
                to |= (unsigned)(both >> (pick >> 4 * i & 7) * 8 & 255) << 8 * i;
        return to;
}

/* ---- numbers --------------------------------------------------------------------------------- */

#define EMULATE_MIN_MAX(type, a_type, b_type) \
        static inline type min(a_type a, b_type b) { \
                return (type)a < (type)b ? (type)a : (type)b; \
        } \
        static inline type max(a_type a, b_type b) { \
                return (type)a > (type)b ? (type)a : (type)b; \
        }

EMULATE_MIN_MAX(int, int, int)
EMULATE_MIN_MAX(unsigned, unsigned, unsigned)
EMULATE_MIN_MAX(unsigned, unsigned, int)
EMULATE_MIN_MAX(unsigned, int, unsigned)
EMULATE_MIN_MAX(long, long, long)
EMULATE_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMULATE_MIN_MAX(unsigned long, unsigned long, long)
EMULATE_MIN_MAX(unsigned long, long, unsigned long)
EMULATE_MIN_MAX(long long, long long, long long)
EMULATE_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
static inline float min(float a, float b) {
        return fminf(a, b);
}
static inline float max(float a, float b) {
        return fmaxf(a, b);
}
static inline double min(double a, double b) {
        return fmin(a, b);
}
static inline double max(double a, double b) {
        return fmax(a, b);
}

static inline float __fadd_rn(float a, float b) {
        return a + b;
}
static inline float __fsub_rn(float a, float b) {
        return a - b;
}
static inline float __fmul_rn(float a, float b) {
        return a * b;
}
static inline float __fdiv_rn(float a, float b) {
        return a / b;
}
static inline float __fmaf_rn(float a, float b, float c) {
        return fmaf(a, b, c);
}
static inline float __fsqrt_rn(float x) {
        return sqrtf(x);
}
static inline float __frcp_rn(float x) {
        return 1.0f / x;
}
static inline float __frsqrt_rn(float x) {
        return (float)(1.0 / sqrt((double)x));
}
static inline float rsqrtf(float x) {
        return (float)(1.0 / sqrt((double)x));
}
static inline float __fdividef(float a, float b) {
        return a / b;
}
#define __expf(x) expf(x) /* a name of libm's own */
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
static inline float __saturatef(float x) {
        return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f;
}
static inline double __dadd_rn(double a, double b) {
        return a + b;
}
static inline double __dmul_rn(double a, double b) {
        return a * b;
}
static inline double __fma_rn(double a, double b, double c) {
        return fma(a, b, c);
}

/* Saturates. NaN gives 0. */
static inline int __float2int_rn(float x) {
        return x != x             ? 0 :
               x >= 2147483648.0f ? INT32_MAX :
               x < -2147483648.0f ? INT32_MIN :
                                    (int)rintf(x);
}
static inline int __float2int_rz(float x) {
        return x != x             ? 0 :
               x >= 2147483648.0f ? INT32_MAX :
               x < -2147483648.0f ? INT32_MIN :
                                    (int)x;
}
static inline unsigned __float2uint_rn(float x) {
        return !(x > 0.0f) ? 0 : x >= 4294967296.0f ? UINT32_MAX : (unsigned)rintf(x);
}
static inline unsigned __float2uint_rz(float x) {
        return !(x > 0.0f) ? 0 : x >= 4294967296.0f ? UINT32_MAX : (unsigned)x;
}
static inline float __int2float_rn(int x) {
        return (float)x;
}
static inline float __uint2float_rn(unsigned x) {
        return (float)x;
}

static inline float f16_to_float(uint16_t x) {
        uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;

        if (exponent == 31)
                return __uint_as_float(sign | 0x7f800000u | fraction << 13);
        if (exponent == 0) /* fraction * 2^-24, exactly */
                return __uint_as_float(sign | __float_as_uint((float)fraction * 0x1p-24f));
        return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline uint16_t float_to_f16(float x) {
        uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;

        if (size > 0x7f800000u)
                return 0x7fff;
        if (size >= 0x477ff000u) /* 65520 and more */
                return (uint16_t)(sign | 0x7c00);
        if (size < 0x38800000u) /* subnormal: the addition rounds to multiples of 2^-24 */
                return (uint16_t)(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) -
                                          __float_as_uint(0.5f)));
        size += 0xfff + (size >> 13 & 1);
        return (uint16_t)(sign | (size - (112u << 23)) >> 13);
}

static inline float bf16_to_float(uint16_t x) {
        return __uint_as_float((uint32_t)x << 16);
}

static inline uint16_t float_to_bf16(float x) {
        uint32_t bits = __float_as_uint(x);

        if ((bits & 0x7fffffff) > 0x7f800000u)
                return 0x7fff;
        return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- matrix units ---------------------------------------------------------------------------- */

struct emulate_fragments {
        uint32_t a[4], b[2];
};

/*
 * The rows g and g + 8 of A and the columns 2t and 2t + 1 of B, from where mma.m16n8k16 keeps them,
 * and their products.
 */
template <float WIDE(uint16_t)>
static inline void emulate_multiply(float d[4], const uint32_t a[4], const uint32_t b[2], int at) {
        emulate_fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
        const uint8_t(*slots)[EMULATE_SLOT] = emulate_exchange(&mine, sizeof mine, emulate_mma, at);
        unsigned g = lane_id() / 4, t = lane_id() % 4;
        float rows[2][16], columns[2][16];

        for (unsigned k = 0; k < 16; k++) {
                unsigned pair = k % 8 / 2, half = k / 8, shift = k % 2 * 16;
                emulate_fragments of_a = emulate_slot<emulate_fragments>(slots, 4 * g + pair);

                for (unsigned i = 0; i < 2; i++) {
                        emulate_fragments of_b =
                                emulate_slot<emulate_fragments>(slots, 4 * (2 * t + i) + pair);

                        rows[i][k] = WIDE((uint16_t)(of_a.a[2 * half + i] >> shift));
                        columns[i][k] = WIDE((uint16_t)(of_b.b[half] >> shift));
                }
        }
        for (unsigned i = 0; i < 4; i++)
                for (unsigned k = 0; k < 16; k++)
                        d[i] += rows[i / 2][k] * columns[i % 2][k];
}

static inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2],
                            int at = __builtin_LINE()) {
        emulate_multiply<bf16_to_float>(d, a, b, at);
}

static inline void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2],
                           int at = __builtin_LINE()) {
        emulate_multiply<f16_to_float>(d, a, b, at);
}

#endif
