/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_HSHARE_H
#define KVD_KERNELS_HSHARE_H

/*
 * HShare ("Fast LLM decoding by hierarchical key-value sharing"): the critical tokens of a query
 * are estimated from labels, a few channels of each key at 4 bits (as in DoubleSparse). Critical
 * tokens found for one layer, head and query are shared with similar ones (sections 4.2 and 4.3).
 *
 * The label of a key has (n_channels + 1) / 2 + 4 bytes (20 for 32 channels). The labels of a head
 * and block are contiguous. Little endian:
 *
 *      u8  codes[(n_channels + 1) / 2]      byte j: channel 2 j in the low half, channel 2 j + 1 in the high half
 *      f16 least, step
 *
 * The value of a channel is least + code * step, where least is the smallest of the key's channels
 * and step a 15th of their range (1 if the range is 0), both rounded to f16. The label of a key
 * with a non-finite channel is all zeros.
 */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVD_LABEL_CHANNELS_MAX = 256 };

/* The label of a query head; least and step are not rounded to f16. */
struct kvd_label_query {
        /* codes of the even and of the odd channels */
        uint8_t low[KVD_LABEL_CHANNELS_MAX / 2], high[KVD_LABEL_CHANNELS_MAX / 2];
        float least, step;
        uint32_t sum; /* sum of all codes */
};

enum kvd_aggregate { KVD_AGGREGATE_SUM, KVD_AGGREGATE_MAX };

struct kvd_hshare_ops {
        /*
         * Makes the labels of n keys of dim elements, stride bytes apart, kvd_label_bytes() each.
         * channels: up to KVD_LABEL_CHANNELS_MAX indices below dim.
         */
        void (*label)(uint8_t *labels, const void *k, size_t stride, enum kvd_number type,
                      uint32_t n, uint32_t dim, const uint16_t *channels, uint32_t n_channels);

        /* Makes the label of a query head q, of which only channels are read. */
        void (*query)(struct kvd_label_query *to, const float *q, const uint16_t *channels,
                      uint32_t n_channels);

        /*
         * to[g * ld + i] = inner product of the labels of query g and of position first + i, i < n.
         * The label of a position is slot position % block_tokens of the labels at blocks[position
         * / block_tokens] + offset bytes. -inf where the block is NULL.
         */
        void (*scores)(float *to, size_t ld, const uint8_t *const *blocks, size_t offset,
                       uint32_t block_tokens, uint32_t n_channels,
                       const struct kvd_label_query *queries, uint32_t n_queries, uint32_t first,
                       uint32_t n);

        /*
         * to[i] = one score per position for the group query heads that share a KV head: the sum
         * (or maximum) over the heads of softmax(scale * scores), scale > 0. With one head, the
         * scores themselves: they rank as their softmax does and cannot underflow. -inf stays.
         * scores is [group] rows of ld; it is overwritten.
         */
        void (*aggregate)(float *to, float *scores, size_t ld, uint32_t n, uint32_t group,
                          float scale, enum kvd_aggregate how);

        /*
         * Stores first + the indices of the z largest of n scores, ascending, and returns their
         * number. Of equal scores the earliest is taken. -inf and NaN are never taken, so there may
         * be fewer than z. scratch: 2 n elements.
         */
        uint32_t (*top)(uint32_t *to, const float *scores, uint32_t n, uint32_t z, uint32_t first,
                        uint32_t *scratch);

        /*
         * to[r] = number of bits that are set in both row r of a and row r of b; a row has words
         * 64-bit words.
         */
        void (*overlap)(uint32_t *to, const uint64_t *a, const uint64_t *b, uint32_t rows,
                        uint32_t words);

        /*
         * Calibration of channels: weights[d] += |q[d] * k[d]|, d < dim, over n tokens and the
         * group query heads of each token; head g of token i is q + i * ldq + g * dim, key i is
         * stride bytes after key i - 1.
         */
        void (*weigh)(float *weights, const float *q, size_t ldq, uint32_t group, const void *k,
                      size_t stride, enum kvd_number type, uint32_t n, uint32_t dim);
};

extern const struct kvd_hshare_ops kvd_hshare_scalar, kvd_hshare_avx2, kvd_hshare_avx512,
        kvd_hshare_neon;

/* Bytes of a key's label. */
static inline size_t kvd_label_bytes(uint32_t n_channels) {
        return (n_channels + 1) / 2 + 4;
}

/* ---- label channels ---- */

/*
 * Stores the n_channels dimensions with the largest weights, ascending; ties go to the lower one.
 * n_channels <= dim.
 */
void kvd_label_channels(const float *weights, uint32_t dim, uint32_t n_channels,
                        uint16_t *channels);

/* ---- critical tokens: sinks, then the top of the middle, then recent tokens ------------------ */

struct kvd_window {
        uint32_t sinks, recent, middle; /* tokens: x, y, z of the paper */
};

/*
 * The middle of n tokens, from which z are chosen: positions [*from, *from + result). Returns 0 if
 * n is at most x + y + z: then all tokens are critical.
 */
uint32_t kvd_window_middle(const struct kvd_window *w, uint32_t n, uint32_t *from);

/*
 * Stores the critical tokens of a sequence of n_now tokens whose middle was chosen when it had
 * n_then <= n_now tokens: sinks, middle, the tokens that were recent then, and all that came since.
 * Strictly ascending; returns their number. Room in to: sinks + n_middle + recent + n_now - n_then,
 * or n_now if all of n_then were critical.
 */
uint32_t kvd_window_positions(const struct kvd_window *w, const uint32_t *middle, uint32_t n_middle,
                              uint32_t n_then, uint32_t n_now, uint32_t *to);

/* ---- sharing ---- */

enum kvd_share {
        KVD_SHARE_GREEDY, /* algorithm 1 as printed: chains stay */
        /* the official code: a sharer of a sharer uses the latter's source */
        KVD_SHARE_GREEDY_ROOT,
        /* sources that maximise the total similarity of the others with their sources */
        KVD_SHARE_STAR,
};

/*
 * Equation 3: |A and B| / max(|A|, |B|), averaged over rows (one per query and head, or per query).
 * both, in_a, in_b: sizes of the intersection and of the sets, [rows].
 */
double kvd_share_similarity(const uint32_t *both, const uint32_t *in_a, const uint32_t *in_b,
                            uint32_t rows);

/* Number k of n that share if a fraction ratio must not: lrint((1 - ratio) n), at most n - 1. */
uint32_t kvd_share_count(double ratio, uint32_t n);

/*
 * Algorithm 1: source[i] = the layer (or head) whose indices i uses, i itself or an earlier one. At
 * most k share. similarity: [n][n], of which only the part below the diagonal is read. Of equally
 * similar pairs the first in row order is taken. scratch: n floats (used by STAR only).
 */
void kvd_share_plan(const float *similarity, uint32_t n, uint32_t k, enum kvd_share how,
                    uint32_t *source, float *scratch);

/*
 * Validates a plan. Returns the first i whose source is later than i or itself shares, or n if the
 * plan is valid.
 */
uint32_t kvd_share_check(const uint32_t *source, uint32_t n);

/*
 * Whether layer l, head h chooses its own critical tokens at this length. layers: source of each
 * layer; heads: n_heads sources per layer; every: queries in a group that share. If not, it uses
 * its previous choice, or that of its source: first the layer's source, then the head's source in
 * that layer.
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
