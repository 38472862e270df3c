/* SPDX-License-Identifier: Apache-2.0 */

/* Labels of keys and queries; compiled once for each instruction set. */

#include <float.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/interleave.h"
#include "kernels/label_store.h"
#include "kernels/rows.h"

/* ---- labels ---- */

/*
 * With a constant number of channels the loops unroll. The loops over scalar lanes are unrolled
 * sixteenfold anyway, so the reference is compiled only once.
 */
#if defined(KVD_ISA_SCALAR)
#define PER_LABEL static
#else
#define PER_LABEL KERNEL
#endif

struct quantised {
        float codes[KVD_LABEL_CHANNELS_MAX + KVD_LANES];
        float least, step;
};

KERNEL float through_f16(float f) {
        uint16_t half;

        lanes_narrow_n(&half, lanes_set(f), 1, KVD_NUMBER_F16);
        return lanes_sum(lanes_widen_n(&half, 1, KVD_NUMBER_F16));
}

/* x: n channels, padded with the first one to a multiple of 16. */
PER_LABEL void quantise(struct quantised *to, const float *x, uint32_t n, bool stored) {
        lanes least = lanes_load(x), most = least, check = lanes_zero();
        float largest, range;

        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                lanes xi = lanes_load(x + i);

                least = lanes_min(least, xi);
                most = lanes_max(most, xi);
                check = lanes_add(check, lanes_sub(xi, xi)); /* NaN if xi is not finite */
        }
        if (lanes_sum(check) != 0.0f) {
                memset(to, 0, sizeof *to);
                to->step = 1.0f;
                return;
        }
        to->least = MAX(lanes_least(least), stored ? -65504.0f : -FLT_MAX);
        largest = MIN(lanes_largest(most), stored ? 65504.0f : FLT_MAX);
        range = largest - to->least;
        to->step = range / 15.0f;
        if (stored) {
                to->least = through_f16(to->least);
                to->step = through_f16(to->step);
        }
        if (!(to->step > 0.0f))
                to->step = 1.0f;
        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                lanes offset = lanes_sub(lanes_load(x + i), lanes_set(to->least));
                lanes code = lanes_round(lanes_div(offset, lanes_set(to->step)));

                lanes_store(to->codes + i,
                            lanes_max(lanes_min(code, lanes_set(15.0f)), lanes_zero()));
        }
}

KERNEL bool is_half(enum kvd_number type) {
        return type == KVD_NUMBER_F16 || type == KVD_NUMBER_BF16;
}

/* The channels of a key of less than 16 bits an element. Neighbours are mostly of one group. */
KERNEL void expand_channels(float *to, const void *k, uint32_t dim, const uint16_t *channels,
                            uint32_t n, enum kvd_number type) {
        uint32_t here = UINT32_MAX;
        float group[KVD_GROUP];

        for (uint32_t i = 0; i < n; i++) {
                uint32_t first = channels[i] / KVD_GROUP * KVD_GROUP;

                if (first != here)
                        key_group(group, k, first, dim, type);
                here = first;
                to[i] = group[channels[i] - first];
        }
}

/* The channels of one key, padded as quantise() expects. */
KERNEL void pick_channels(float *to, const void *k, uint32_t dim, const uint16_t *channels,
                          uint32_t n, enum kvd_number type) {
        uint16_t half[KVD_LABEL_CHANNELS_MAX];
        uint32_t padded = ALIGN_UP(n, KVD_LANES);

        if (kvd_is_narrow(type)) {
                expand_channels(to, k, dim, channels, n, type);
                for (uint32_t i = n; i < padded; i++)
                        to[i] = to[0];
                return;
        }
        for (uint32_t i = 0; i < padded; i++)
                if (is_half(type))
                        half[i] = ((const uint16_t *)k)[channels[i < n ? i : 0]];
                else
                        to[i] = ((const float *)k)[channels[i < n ? i : 0]];
        for (uint32_t i = 0; i < padded && is_half(type); i += KVD_LANES)
                lanes_store(to + i, lanes_widen(half + i, type));
}

PER_LABEL void store_label(uint8_t *label, const struct quantised *from, uint32_t n) {
        uint8_t codes[KVD_LABEL_CHANNELS_MAX + 1];
        uint32_t bytes = (n + 1) / 2;

        for (uint32_t i = 0; i < n; i++)
                codes[i] = (uint8_t)(int)from->codes[i];
        codes[n] = 0;
        for (uint32_t j = 0; j < bytes; j++)
                label[j] = (uint8_t)(codes[2 * j] | codes[2 * j + 1] << 4);
        lanes_narrow_n(label + bytes, lanes_set(from->least), 1, KVD_NUMBER_F16);
        lanes_narrow_n(label + bytes + 2, lanes_set(from->step), 1, KVD_NUMBER_F16);
}

KERNEL void label_type(uint8_t *labels, const uint8_t *k, size_t stride, uint32_t n, uint32_t dim,
                       const uint16_t *channels, uint32_t n_channels, enum kvd_number type) {
        float x[KVD_LABEL_CHANNELS_MAX] = {0};
        struct quantised q = {0};

        for (uint32_t i = 0; i < n; i++, labels += kvd_label_bytes(n_channels)) {
                pick_channels(x, k + i * stride, dim, channels, n_channels, type);
                quantise(&q, x, n_channels, true);
                store_label(labels, &q, n_channels);
        }
}

/* ---- labels of 16 keys, one key a lane, in the order of quantise() --------------------------- */

#if !defined(KVD_ISA_SCALAR)

/* Keys, of which elements up to index most are read. */
struct keys {
        const uint8_t *next; /* those to prefetch, or NULL */
        size_t stride;
        uint32_t dim, most;
};

/* The channels of 16 keys; 16-bit elements are packed two to a word. */
KERNEL void copy_channels(uint8_t rows[KVD_LANES][USUAL * 4], const uint8_t *k, size_t stride,
                          const uint16_t *channels, enum kvd_number type) {
        for (uint32_t t = 0; t < KVD_LANES; t++)
                for (uint32_t i = 0; i < USUAL; i++)
                        memcpy(rows[t] + i * number_size(type),
                               row_at(k + t * stride, channels[i], type), number_size(type));
}

#if defined(KVD_ISA_AVX512)

enum { WITHIN = 128 };

/*
 * The same for 16-bit elements if all channels are below WITHIN: they are found in four registers.
 */
KERNEL void permute_channels(uint8_t rows[KVD_LANES][USUAL * 4], const uint8_t *k, size_t stride,
                             const uint16_t *channels, uint32_t most) {
        __m512i at = _mm512_loadu_si512(channels), part[4];
        __mmask32 upper = _mm512_cmpge_epu16_mask(at, _mm512_set1_epi16(64)), there[4];

        for (uint32_t i = 0; i < 4; i++)
                there[i] = most >= 32 * i + 31 ? ~0u :
                           most < 32 * i       ? 0 :
                                                 (2u << (most - 32 * i)) - 1;
        for (uint32_t t = 0; t < KVD_LANES; t++) {
                const uint16_t *key = (const void *)(k + t * stride);
                __m512i low, high;

                for (int i = 0; i < 4; i++)
                        part[i] = _mm512_maskz_loadu_epi16(there[i], key + (ptrdiff_t)i * 32);
                low = _mm512_permutex2var_epi16(part[0], at, part[1]);
                high = _mm512_permutex2var_epi16(part[2], at, part[3]);
                _mm512_storeu_si512(rows[t], _mm512_mask_mov_epi16(low, upper, high));
        }
}

/* The same for floats, 32 of them in two registers. */
KERNEL void permute_floats(uint8_t rows[KVD_LANES][USUAL * 4], const uint8_t *keys, size_t stride,
                           const uint16_t *channels, uint32_t most) {
        for (uint32_t t = 0; t < KVD_LANES; t++)
                for (uint32_t half = 0; half < 2; half++) {
                        const float *k = (const void *)(keys + t * stride);
                        __m512i at = _mm512_cvtepu16_epi32(
                                _mm256_loadu_si256((const void *)(channels + 16 * half)));
                        __m512 found = _mm512_setzero_ps();

                        for (uint32_t i = 0; i <= most; i += 32) {
                                uint32_t left = most + 1 - i;
                                __mmask16 low = left >= 16 ? 0xffff : lanes_mask(left);
                                __mmask16 high = left >= 32 ? 0xffff :
                                                 left <= 16 ? 0 :
                                                              lanes_mask(left - 16);
                                __m512 a = _mm512_maskz_loadu_ps(low, k + i);
                                __m512 b = _mm512_maskz_loadu_ps(high, k + i + 16);
                                __mmask16 here = _mm512_cmpge_epu32_mask(at,
                                                                         _mm512_set1_epi32((int)i));

                                found = _mm512_mask_mov_ps(found, here,
                                                           _mm512_permutex2var_ps(a, at, b));
                        }
                        _mm512_storeu_ps(rows[t] + (size_t)half * KVD_LINE, found);
                }
}

#endif

/* The channels of 16 keys, one key a lane, from rows of them. */
KERNEL void place_channels(lanes x[USUAL], uint8_t rows[KVD_LANES][USUAL * 4],
                           enum kvd_number type) {
        uint8_t words[KVD_LINE_WORDS * KVD_LINE];
        const uint8_t *row[KVD_LANES];

        for (int t = 0; t < KVD_LANES; t++)
                row[t] = rows[t];
        for (uint32_t line = 0; line < USUAL * number_size(type) / KVD_LINE; line++) {
                lanes_interleave(words, row, (size_t)line * KVD_LINE, KVD_LINE, type);
                for (uint32_t w = 0; w < KVD_LINE_WORDS; w++)
                        if (type == KVD_NUMBER_F32)
                                x[line * KVD_LINE_WORDS + w] = lanes_load(
                                        (const float *)(words + w * KVD_LINE));
                        else
                                lanes_widen_2(words + w * KVD_LINE, type, &x[2 * w], &x[2 * w + 1]);
        }
}

/* The channels of 16 keys of less than 16 bits an element, as floats. */
KERNEL void expand_rows(uint8_t rows[KVD_LANES][USUAL * 4], const uint8_t *k,
                        const struct keys *keys, const uint16_t *channels, enum kvd_number type) {
        float row[USUAL];

        for (uint32_t t = 0; t < KVD_LANES; t++) {
                expand_channels(row, k + t * keys->stride, keys->dim, channels, USUAL, type);
                memcpy(rows[t], row, sizeof row);
        }
}

KERNEL void pick_16(lanes x[USUAL], const uint8_t *k, const struct keys *keys,
                    const uint16_t *channels, enum kvd_number type) {
        uint8_t rows[KVD_LANES][USUAL * 4];

        if (kvd_is_narrow(type))
                expand_rows(rows, k, keys, channels, type);
#if defined(KVD_ISA_AVX512)
        else if (type == KVD_NUMBER_F32)
                permute_floats(rows, k, keys->stride, channels, keys->most);
        else if (keys->most < WITHIN)
                permute_channels(rows, k, keys->stride, channels, keys->most);
#endif
        else
                copy_channels(rows, k, keys->stride, channels, type);
        place_channels(x, rows, kvd_is_narrow(type) ? KVD_NUMBER_F32 : type);
}

struct range_16 {
        lanes least, step;
        lanes most_code; /* 15, or 0 for the label of all zeros */
};

KERNEL lanes better(lanes a, lanes b, bool largest) {
        return largest ? lanes_max(a, b) : lanes_min(a, b);
}

/* The best of channels i, i + 4, i + 8 and so on, in tree order. */
KERNEL lanes best_of_8(const lanes x[USUAL], int i, bool largest) {
        lanes a = better(better(x[i], x[i + 16], largest), better(x[i + 8], x[i + 24], largest),
                         largest);
        lanes b = better(better(x[i + 4], x[i + 20], largest),
                         better(x[i + 12], x[i + 28], largest), largest);

        return better(a, b, largest);
}

KERNEL lanes best_of(const lanes x[USUAL], bool largest) {
        lanes even = better(best_of_8(x, 0, largest), best_of_8(x, 2, largest), largest);
        lanes odd = better(best_of_8(x, 1, largest), best_of_8(x, 3, largest), largest);

        return better(even, odd, largest);
}

KERNEL struct range_16 range_of_16(const lanes x[USUAL]) {
        lanes part[4], check;
        struct range_16 r;

        /* NaN if a channel is not finite */
        for (int i = 0; i < USUAL; i++)
                part[i % 4] = i < 4 ? lanes_mul(x[i], lanes_zero()) :
                                      lanes_fma(x[i], lanes_zero(), part[i % 4]);
        check = lanes_add(lanes_add(part[0], part[1]), lanes_add(part[2], part[3]));
        r.least = lanes_max(best_of(x, false), lanes_set(-65504.0f));
        r.step = lanes_div(lanes_sub(lanes_min(best_of(x, true), lanes_set(65504.0f)), r.least),
                           lanes_set(15.0f));
        r.least = lanes_select_less(check, lanes_set(1.0f), r.least, lanes_zero());
        r.step = lanes_select_less(check, lanes_set(1.0f), r.step, lanes_zero());
        r.most_code = lanes_select_less(check, lanes_set(1.0f), lanes_set(15.0f), lanes_zero());
        return r;
}

/* As through_f16() for 16 lanes: -0 becomes 0. */
KERNEL lanes through_f16_16(lanes a) {
        uint16_t half[KVD_LANES];

        lanes_narrow(half, a, KVD_NUMBER_F16);
        return lanes_add(lanes_widen(half, KVD_NUMBER_F16), lanes_zero());
}

/*
 * Prefetches part i of USUAL of the next 16 keys, two parts per key. All at once, the prefetches
 * would wait for each other, and the computation for all of them.
 */
KERNEL void expect_part(const struct keys *keys, uint32_t i, enum kvd_number type) {
        uint32_t from = i % 2 * 64;

        if (keys->next && from <= keys->most)
                lanes_expect(row_at(keys->next + i / 2 * keys->stride, from, type),
                             kvd_code_bytes(type, 64));
}

/*
 * Computes the quotients that quantise() rounds, by multiplication. A step has 11 bits, so the
 * remainder of the first quotient is exact, and the second quotient equals the correctly rounded
 * one: a quotient of 24 bits by 11 bits is never closer to the midpoint of two floats than 2^-12 of
 * their distance, and the error of the second quotient is 2^-23 of it.
 */
KERNEL void codes_of(lanes x[USUAL], const struct range_16 *r, const struct keys *keys,
                     enum kvd_number type) {
        lanes inverse = lanes_div(lanes_set(1.0f), r->step);
        lanes minus = lanes_sub(lanes_zero(), r->step), most = lanes_mul(r->most_code, r->step);

        for (uint32_t i = 0; i < USUAL; i++) {
                lanes offset = lanes_max(lanes_min(lanes_sub(x[i], r->least), most), lanes_zero());
                lanes quotient = lanes_mul(offset, inverse);

                quotient = lanes_fma(lanes_fma(quotient, minus, offset), inverse, quotient);
                x[i] = lanes_round(quotient);
                expect_part(keys, i, type);
        }
}

/* Packs four codes of 4 bits each into one number. */
KERNEL lanes four_codes(const lanes code[4]) {
        lanes sixteen = lanes_set(16.0f);

        return lanes_fma(lanes_fma(lanes_fma(code[3], sixteen, code[2]), sixteen, code[1]), sixteen,
                         code[0]);
}

KERNEL void label_16(uint8_t *labels, const uint8_t *k, const uint16_t *channels,
                     const struct keys *keys, enum kvd_number type) {
        lanes x[USUAL], low[4], high[4];
        struct range_16 r;

        pick_16(x, k, keys, channels, type);
        r = range_of_16(x);
        r.least = through_f16_16(r.least);
        r.step = through_f16_16(r.step);
        r.step = lanes_select_less(lanes_zero(), r.step, r.step, lanes_set(1.0f));
        codes_of(x, &r, keys, type);
        for (int w = 0; w < 4; w++) {
                low[w] = four_codes(x + (ptrdiff_t)w * 8);
                high[w] = four_codes(x + (ptrdiff_t)w * 8 + 4);
        }
        store_labels(labels, low, high, r.least, r.step);
}

KERNEL void label_usual(uint8_t *labels, const uint8_t *k, size_t stride, uint32_t n, uint32_t dim,
                        const uint16_t *channels, enum kvd_number type) {
        struct keys keys = {.stride = stride, .dim = dim};
        uint32_t i = 0;

        for (uint32_t c = 0; c < USUAL; c++)
                keys.most = MAX(keys.most, channels[c]);
        for (; i + KVD_LANES <= n; i += KVD_LANES) {
                bool more = i + 2 * KVD_LANES <= n;

                keys.next = more ? k + (i + KVD_LANES) * stride : NULL;
                label_16(labels + (size_t)i * USUAL_BYTES, k + i * stride, channels, &keys, type);
        }
        label_type(labels + (size_t)i * USUAL_BYTES, k + i * stride, stride, n - i, dim, channels,
                   USUAL, type);
}

#else

KERNEL void label_usual(uint8_t *labels, const uint8_t *k, size_t stride, uint32_t n, uint32_t dim,
                        const uint16_t *channels, enum kvd_number type) {
        label_type(labels, k, stride, n, dim, channels, USUAL, type);
}

#endif

KERNEL void label_some(uint8_t *labels, const uint8_t *k, size_t stride, uint32_t n, uint32_t dim,
                       const uint16_t *channels, uint32_t n_channels, enum kvd_number type) {
        if (n_channels == USUAL)
                label_usual(labels, k, stride, n, dim, channels, type);
        else
                label_type(labels, k, stride, n, dim, channels, n_channels, type);
}

void KVD_VARIANT(kvd_labels_of_keys)(uint8_t *labels, const void *k, size_t stride,
                                     enum kvd_number type, uint32_t n, uint32_t dim,
                                     const uint16_t *channels, uint32_t n_channels) {
        TYPED(type, label_some, labels, k, stride, n, dim, channels, n_channels);
}

void KVD_VARIANT(kvd_label_of_query)(struct kvd_label_query *to, const float *q,
                                     const uint16_t *channels, uint32_t n_channels) {
        float x[KVD_LABEL_CHANNELS_MAX] = {0};
        struct quantised label = {0};

        pick_channels(x, q, 0, channels, n_channels, KVD_NUMBER_F32);
        quantise(&label, x, n_channels, false);
        *to = (struct kvd_label_query){.least = label.least, .step = label.step};
        for (uint32_t i = 0; i < n_channels; i++) {
                (i % 2 ? to->high : to->low)[i / 2] = (uint8_t)(int)label.codes[i];
                to->sum += (uint32_t)label.codes[i];
        }
}
