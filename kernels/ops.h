/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_OPS_H
#define KVD_KERNELS_OPS_H

/*
 * One table of operations, filled once per instruction set. kvd_ops_pick() finds the fastest table
 * that the processor can run. An operation is written once, in terms of kernels/lanes.h, and
 * compiled for each table: those of a method are in a file of that method, the others in vectors.c.
 *
 * The bit contract. Every variant of an operation gives the same bits as the scalar reference, so
 * that a cache block does not depend on which process computed it, or in which batch. It holds
 * because the order of the additions is part of an operation's definition, never of its tiling:
 *
 *   chain    acc = fma(a[i], b[i], acc) for i ascending from acc = 0 (or the stated start): matmul,
 *            sums of attention
 *   lanes    lane j of 16 is the chain of the elements i = j (mod 16); then lanes j and j + 8 are added, j and
 *            j + 4, j and j + 2, j and j + 1: rmsnorm, softmax, scores of attention
 *
 * A multiply-add is always one fused operation, in full tiles and remainders alike; nothing else is
 * contracted (the files are compiled with -ffp-contract=off). NaN results are NaN in every variant,
 * with unspecified payload.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVD_PANEL 16 /* rows interleaved in a panel; lanes of a reduction */

/* Element types in memory; the numbers are those of enum kvd_dtype in the public header. */
enum kvd_number {
        KVD_NUMBER_F32 = 1,
        KVD_NUMBER_F16 = 2,
        KVD_NUMBER_BF16 = 3,
        KVD_NUMBER_Q8 = 5, /* quantised, see kvd_ops.write_row */
        KVD_NUMBER_Q4 = 6,
        KVD_NUMBER_E4M3 = 7, /* of 8 bits, see kvd_ops.write_row */
        KVD_NUMBER_E5M2 = 8,
};

struct kvd_attend_ops;
struct kvd_block_ops;
struct kvd_keydiff_ops;
struct kvd_memshare_ops;
struct kvd_sketch_ops;
struct kvd_hshare_ops;
struct kvd_bicache_ops;

struct kvd_ops {
        const char *name;
        bool (*works)(void); /* whether this processor supports the table's instructions */

        /* ---- one table for each method: kernels/block.h, keydiff.h, memshare.h, ... ---------- */

        const struct kvd_attend_ops *attend; /* kernels/attend_rows.h */
        const struct kvd_block_ops *block;
        const struct kvd_keydiff_ops *keydiff;
        const struct kvd_memshare_ops *memshare;
        const struct kvd_sketch_ops *sketch;
        const struct kvd_hshare_ops *hshare;
        const struct kvd_bicache_ops *bicache;

        /* ---- matrices ---- */

        /*
         * Interleaves n rows of dim floats, stride floats apart, as rows first, first + 1, ... of a
         * packed matrix: element (row, d) of a packed matrix is at panels[(row / 16 * dim + d) * 16
         * + row % 16]. Other rows of a panel are left as they are.
         */
        void (*pack)(float *panels, uint32_t first, const float *rows, size_t stride, uint32_t n,
                     uint32_t dim);

        /*
         * y[r][o] = chain over i < n_in of x[r][i] * w(o, i), r < rows, o < n_out, w packed. ldx
         * and ldy: floats from row to row.
         */
        void (*matmul)(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows,
                       const float *w, uint32_t n_in, uint32_t n_out);

        /* ---- vectors ---- */

        /* y = x / sqrt(mean of squares + eps) * w */
        void (*rmsnorm)(float *y, const float *x, const float *w, uint32_t n, float eps);

        /*
         * Rotates pairs (x[i], x[i + half]), i < half, by angles given as cosine[i] and sine[i]
         * (Hugging Face's rotate_half).
         */
        void (*rope)(float *x, const float *cosine, const float *sine, uint32_t half);

        /* y = silu(gate) * up */
        void (*swiglu)(float *y, const float *gate, const float *up, size_t n);

        /* y += x */
        void (*add)(float *y, const float *x, size_t n);

        /* x = cap * tanh(scale * x / cap), cap > 0 */
        void (*cap)(float *x, uint32_t n, float scale, float cap);

        /* The largest of x, n > 0. */
        float (*largest)(const float *x, uint32_t n);

        /*
         * x = exp(scale * x - max(scale * x)), scale > 0, n > 0; returns the sum (order "lanes").
         */
        float (*softmax)(float *x, uint32_t n, float scale);

        /* ---- memory ---- */

        /*
         * Convert n numbers from or to a 16-bit type, KVD_NUMBER_F16 or KVD_NUMBER_BF16; round to
         * nearest, ties to even.
         */
        void (*widen)(float *to, const uint16_t *from, size_t n, enum kvd_number type);
        void (*narrow)(uint16_t *to, const float *from, size_t n, enum kvd_number type);

        /*
         * Write or read a row: the dim numbers of a token and KV head, of any type, in
         * kvd_row_bytes() bytes of any alignment. Of a quantised type, dim is even, and a row is dim
         * codes of 8 or 4 bits without a sign (of 4 bits: two to a byte, the first in the low half),
         * then the scale and the least number of each 64 codes (or fewer, at the end), two f16.
         * Number i is fma(code, scale, least). When written, the least number is rounded to f16, the
         * scale is (largest - least) / (codes - 1), rounded to f16 but at least 2^-14, and the code
         * (x - least) / scale, rounded to nearest, ties to even; all are limited to what they can
         * hold. If one of a group's numbers is not finite, all become NaN. A row of zero bytes is
         * zeros.
         *
         * Numbers of 8 bits are those of the Open Compute Project (OFP8, revision 1.0). E4M3 has no
         * infinity. When written, a number is rounded to nearest, ties to even, and limited to the
         * largest finite one (448 or 57344), also if it is infinite. NaN stays NaN.
         */
        void (*write_row)(void *row, const float *from, uint32_t dim, enum kvd_number type);
        void (*read_row)(float *to, const void *row, uint32_t dim, enum kvd_number type);

        /*
         * The same for the row of a key. Of a quantised one, a transform is stored that is its own
         * inverse (libkvd(3)). All other operations expect that of quantised keys.
         */
        void (*write_key)(void *row, const float *from, uint32_t dim, enum kvd_number type);
        void (*read_key)(float *to, const void *row, uint32_t dim, enum kvd_number type);

        /* memcpy past the caches; visible to other processors, in order, when it returns. */
        void (*copy_nt)(void *to, const void *from, size_t bytes);
};

/*
 * The table of that name ("scalar", "avx2", "avx512"), or the fastest that runs here if name is
 * NULL. NULL if there is no such table or it does not run here. Tables are static.
 */
const struct kvd_ops *kvd_ops_pick(const char *name);

/* All tables of this build, fastest first, runnable here or not; NULL ends the list. */
const struct kvd_ops *const *kvd_ops_list(void);

/* Bytes of a row of dim numbers, with its scales. */
size_t kvd_row_bytes(enum kvd_number type, uint32_t dim);

/* Number of floats of a packed matrix of rows rows. */
static inline size_t kvd_packed_floats(uint32_t rows, uint32_t dim) {
        return ((size_t)rows + KVD_PANEL - 1) / KVD_PANEL * KVD_PANEL * dim;
}

#ifdef __cplusplus
}
#endif

#endif
