/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_LANES_PROBE_H
#define KVD_TESTS_KERNELS_LANES_PROBE_H

#include "kernels/ops.h"

enum { LANES_OPERATIONS = 20 };

struct lanes_probe {
        struct {
                const char *name;
                void (*run)(const float in[64], float *out); /* up to four operands of 16 floats */
                uint32_t results;
        } operations[LANES_OPERATIONS];
        void (*load_n)(const float *in, float out[16], uint32_t n);
        void (*store_n)(const float in[16], float *out, uint32_t n);
        /* for n = 16, the variant without n */
        void (*widen)(const void *in, float out[16], uint32_t n, enum kvd_number type);
        void (*widen_2)(const void *in, float out[32], enum kvd_number type);
        void (*narrow)(const float in[16], void *out, uint32_t n, enum kvd_number type);
};

extern const struct lanes_probe lanes_probe_scalar, lanes_probe_avx2, lanes_probe_avx512,
        lanes_probe_neon;

#endif
