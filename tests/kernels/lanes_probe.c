/* SPDX-License-Identifier: Apache-2.0 */

/* The operations of one variant of kernels/lanes.h, as functions on memory. */

#include "kernels/lanes.h"
#include "tests/kernels/lanes_probe.h"

#define THROUGH_2(name) \
        static void on_##name(const float *in, float *out) { \
                lanes_store(out, lanes_##name(lanes_load(in), lanes_load(in + 16))); \
        }
#define THROUGH_1(name) \
        static void on_##name(const float *in, float *out) { \
                lanes_store(out, lanes_##name(lanes_load(in))); \
        }
#define TO_ONE(name) \
        static void on_##name(const float *in, float *out) { \
                *out = lanes_##name(lanes_load(in)); \
        }

THROUGH_2(add)
THROUGH_2(sub)
THROUGH_2(mul)
THROUGH_2(div)
THROUGH_2(min)
THROUGH_2(max)
THROUGH_1(abs)
THROUGH_1(sqrt)
THROUGH_1(round)
THROUGH_1(exp)
TO_ONE(sum)
TO_ONE(largest)
TO_ONE(least)

static void on_set(const float *in, float *out) {
        lanes_store(out, lanes_add(lanes_set(in[3]), lanes_zero()));
}

static void on_fma(const float *in, float *out) {
        lanes_store(out, lanes_fma(lanes_load(in), lanes_load(in + 16), lanes_load(in + 32)));
}

static void on_select(const float *in, float *out) {
        lanes_store(out, lanes_select_less(lanes_load(in), lanes_load(in + 16), lanes_load(in + 32),
                                           lanes_load(in + 48)));
}

static void on_spoil(const float *in, float *out) {
        lanes_store(out, lanes_spoil(lanes_load(in), lanes_load(in + 16), lanes_load(in + 32)));
}

#define OF_16(name) \
        static void on_##name(const float *in, float *out) { \
                lanes v[16]; \
\
                for (int i = 0; i < 16; i++) \
                        v[i] = lanes_load(in + i * 3); \
                lanes_store(out, lanes_##name(v)); \
        }

OF_16(sum_16)
OF_16(least_16)
OF_16(largest_16)

static void load_n(const float *in, float *out, uint32_t n) {
        lanes_store(out, lanes_load_n(in, n));
}

static void store_n(const float *in, float *out, uint32_t n) {
        lanes_store_n(out, lanes_load(in), n);
}

KERNEL void widen_as(const void *in, float *out, uint32_t n, enum kvd_number type) {
        lanes_store(out, n == KVD_LANES ? lanes_widen(in, type) : lanes_widen_n(in, n, type));
}

KERNEL void narrow_as(const float *in, void *out, uint32_t n, enum kvd_number type) {
        if (n == KVD_LANES)
                lanes_narrow(out, lanes_load(in), type);
        else
                lanes_narrow_n(out, lanes_load(in), n, type);
}

static void widen(const void *in, float *out, uint32_t n, enum kvd_number type) {
        switch (type) {
        case KVD_NUMBER_F32: widen_as(in, out, n, KVD_NUMBER_F32); break;
        case KVD_NUMBER_F16: widen_as(in, out, n, KVD_NUMBER_F16); break;
        case KVD_NUMBER_BF16: widen_as(in, out, n, KVD_NUMBER_BF16); break;
        case KVD_NUMBER_E4M3: widen_as(in, out, n, KVD_NUMBER_E4M3); break;
        case KVD_NUMBER_E5M2: widen_as(in, out, n, KVD_NUMBER_E5M2); break;
        default: break; /* quantised rows: test-variants.c */
        }
}

static void widen_2(const void *in, float *out, enum kvd_number type) {
        lanes a, b;

        if (type == KVD_NUMBER_F32)
                lanes_widen_2(in, KVD_NUMBER_F32, &a, &b);
        else if (type == KVD_NUMBER_F16)
                lanes_widen_2(in, KVD_NUMBER_F16, &a, &b);
        else if (type == KVD_NUMBER_BF16)
                lanes_widen_2(in, KVD_NUMBER_BF16, &a, &b);
        else if (type == KVD_NUMBER_E4M3)
                lanes_widen_2(in, KVD_NUMBER_E4M3, &a, &b);
        else
                lanes_widen_2(in, KVD_NUMBER_E5M2, &a, &b);
        lanes_store(out, a);
        lanes_store(out + 16, b);
}

static void narrow(const float *in, void *out, uint32_t n, enum kvd_number type) {
        switch (type) {
        case KVD_NUMBER_F32: narrow_as(in, out, n, KVD_NUMBER_F32); break;
        case KVD_NUMBER_F16: narrow_as(in, out, n, KVD_NUMBER_F16); break;
        case KVD_NUMBER_BF16: narrow_as(in, out, n, KVD_NUMBER_BF16); break;
        default: break; /* quantised rows: test-variants.c */
        }
}

const struct lanes_probe KVD_VARIANT(lanes_probe) = {
        .operations =
                {
                        {"add", on_add, 16},
                        {"sub", on_sub, 16},
                        {"mul", on_mul, 16},
                        {"div", on_div, 16},
                        {"min", on_min, 16},
                        {"max", on_max, 16},
                        {"abs", on_abs, 16},
                        {"sqrt", on_sqrt, 16},
                        {"round", on_round, 16},
                        {"exp", on_exp, 16},
                        {"sum_16", on_sum_16, 16},
                        {"least_16", on_least_16, 16},
                        {"largest_16", on_largest_16, 16},
                        {"set", on_set, 16},
                        {"fma", on_fma, 16},
                        {"select", on_select, 16},
                        {"spoil", on_spoil, 16},
                        {"sum", on_sum, 1},
                        {"largest", on_largest, 1},
                        {"least", on_least, 1},
                },
        .load_n = load_n,
        .store_n = store_n,
        .widen = widen,
        .widen_2 = widen_2,
        .narrow = narrow,
};
