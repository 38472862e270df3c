/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_HSHARE_H
#define KVD_KERNELS_HSHARE_H

/*
 * HShare: which tokens matter is estimated from labels, a few channels of each key at 4 bit; what
 * was found for one layer, head and query is used by others like it.
 *
 * The label of a key, (n_channels + 1) / 2 + 4 bytes (20 for 32 channels), those of a head and
 * block one after the other, little endian:
 *
 *      u8  codes[(n_channels + 1) / 2]      byte j: channel 2 j in the low half, channel 2 j + 1 in the high half
 *      f16 least, step
 *
 * A channel's value is least + code * step: least the smallest of the key's channels and step a
 * 15th of their range (1 where that is 0), both rounded to f16. A key with a channel that is not
 * finite has the label of zeros.
 */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVD_LABEL_CHANNELS_MAX = 256 };

/* A query head's label; its numbers are not rounded to f16. */
struct kvd_label_query {
        /* codes of even and odd channels */
        uint8_t low[KVD_LABEL_CHANNELS_MAX / 2], high[KVD_LABEL_CHANNELS_MAX / 2];
        float least, step;
        uint32_t sum; /* of the codes */
};

enum kvd_aggregate { KVD_AGGREGATE_SUM, KVD_AGGREGATE_MAX };

struct kvd_hshare_ops {
        /*
         * The labels of n keys, stride elements apart. channels: each below the keys' dimension; up
         * to KVD_LABEL_CHANNELS_MAX of them.
         */
        void (*label)(uint8_t *labels, const void *k, size_t stride, enum kvd_number type,
                      uint32_t n, const uint16_t *channels, uint32_t n_channels);

        /* The label of a query head. */
        void (*query)(struct kvd_label_query *to, const float *q, const uint16_t *channels,
                      uint32_t n_channels);

        /*
         * to[g * ld + i] = inner product of the labels of query g and of position first + i, which
         * is slot (first + i) % block_tokens of those at blocks[(first + i) / block_tokens] +
         * offset; -inf where the block is NULL.
         */
        void (*scores)(float *to, size_t ld, const uint8_t *const *blocks, size_t offset,
                       uint32_t block_tokens, uint32_t n_channels,
                       const struct kvd_label_query *queries, uint32_t n_queries, uint32_t first,
                       uint32_t n);

        /*
         * One score per position for the query heads that share a KV head: the sum (or the largest)
         * over the heads of softmax(scale * scores). With one head the scores themselves: their
         * ranking is that of the softmax, and has no underflow. -inf stays. scores is scratch
         * afterwards; scale > 0.
         */
        void (*aggregate)(float *to, float *scores, size_t ld, uint32_t n, uint32_t group,
                          float scale, enum kvd_aggregate how);

        /*
         * The positions of the z largest of n scores, plus first, ascending; of equal ones the
         * earliest. -inf and NaN are never among them. Returns how many. scratch: 2 n numbers.
         */
        uint32_t (*top)(uint32_t *to, const float *scores, uint32_t n, uint32_t z, uint32_t first,
                        uint32_t *scratch);

        /*
         * to[r] = number of bits that row r of a and row r of b have in common; words 64-bit words
         * a row.
         */
        void (*overlap)(uint32_t *to, const uint64_t *a, const uint64_t *b, uint32_t rows,
                        uint32_t words);

        /*
         * Calibration: weights[d] += |q . k| of dimension d, over n tokens and the group heads of
         * each query; head g of token i is q + i * ldq + g * dim.
         */
        void (*weigh)(float *weights, const float *q, size_t ldq, uint32_t group, const void *k,
                      size_t stride, enum kvd_number type, uint32_t n, uint32_t dim);
};

extern const struct kvd_hshare_ops kvd_hshare_scalar, kvd_hshare_avx2, kvd_hshare_avx512;

/* Bytes of a key's label. */
static inline size_t kvd_label_bytes(uint32_t n_channels) {
        return (n_channels + 1) / 2 + 4;
}

/* ---- label channels ---- */

/*
 * The n_channels dimensions of the largest weights, ascending; of equal ones the first. n_channels
 * <= dim.
 */
void kvd_label_channels(const float *weights, uint32_t dim, uint32_t n_channels,
                        uint16_t *channels);

/* ---- critical tokens: sinks, then the top of the middle, then what is recent ----------------- */

struct kvd_window {
        uint32_t sinks, recent, middle; /* x, y, z */
};

/*
 * The middle of n tokens, from which z are chosen: positions [*from, *from + result). 0: n is at
 * most x + y + z, all tokens are critical.
 */
uint32_t kvd_window_middle(const struct kvd_window *w, uint32_t n, uint32_t *from);

/*
 * The critical tokens of a sequence of n_now tokens, when the middle was chosen at n_then <= n_now
 * tokens: what was recent then stays, and all that came since. Ascending, none twice. Room: sinks +
 * n_middle + recent + n_now - n_then, or n_now if all of n_then were critical. Returns their
 * number.
 */
uint32_t kvd_window_positions(const struct kvd_window *w, const uint32_t *middle, uint32_t n_middle,
                              uint32_t n_then, uint32_t n_now, uint32_t *to);

/* ---- sharing ---- */

enum kvd_share {
        KVD_SHARE_GREEDY,      /* algorithm 1 as printed: chains stay */
        /* the official code: whoever shared with a sharer shares with its source */
        KVD_SHARE_GREEDY_ROOT,
        /* sources chosen for the similarity that all others then have with theirs */
        KVD_SHARE_STAR,
};

/*
 * Equation 3: |A and B| / max(|A|, |B|), averaged over rows (a query and a head, or a query each).
 */
double kvd_share_similarity(const uint32_t *both, const uint32_t *in_a, const uint32_t *in_b,
                            uint32_t rows);

/* k of n that share, when a fraction ratio must not: lrint((1 - ratio) n), at most n - 1. */
uint32_t kvd_share_count(double ratio, uint32_t n);

/*
 * source[i] = whose indices i uses, itself or an earlier one; at most k share. similarity: n rows
 * of n, of which those below the diagonal are read. Where several are as similar, the first in row
 * order. scratch: n floats (STAR).
 */
void kvd_share_plan(const float *similarity, uint32_t n, uint32_t k, enum kvd_share how,
                    uint32_t *source, float *scratch);

/*
 * The first i whose source is later than i or itself a sharer; n if there is none: a plan that may
 * be used.
 */
uint32_t kvd_share_check(const uint32_t *source, uint32_t n);

/*
 * Does layer l, head h choose its own critical tokens at this length? heads: n_heads sources for
 * each layer; queries come in groups of every. Who does not uses its own of before, or those of its
 * source: first the layer's, then the head's in that layer.
 */
static inline bool kvd_share_chooses(const uint32_t *layers, const uint32_t *heads,
                                     uint32_t n_heads, uint32_t l, uint32_t h, uint32_t length,
                                     uint32_t every) {
        return length % every == 0 && layers[l] == l && heads[(size_t)l * n_heads + h] == h;
}

#ifdef __cplusplus
}
#endif

#endif
