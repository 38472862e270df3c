/* SPDX-License-Identifier: Apache-2.0 */

/* The parts of HShare that work on short lists: windows and the sharing configuration. */

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/hshare.h"

void kvd_label_channels(const float *weights, uint32_t dim, uint32_t n_channels,
                        uint16_t *channels) {
        uint32_t n = 0;

        for (uint32_t d = 0; d < dim && n < n_channels; d++) {
                uint32_t before = 0; /* number of dimensions that rank above d */

                for (uint32_t e = 0; e < dim; e++)
                        before += weights[e] > weights[d] || (weights[e] == weights[d] && e < d);
                if (before < n_channels)
                        channels[n++] = (uint16_t)d;
        }
}

/* ---- windows ---- */

uint32_t kvd_window_middle(const struct kvd_window *w, uint32_t n, uint32_t *from) {
        *from = w->sinks;
        if (n <= (uint64_t)w->sinks + w->recent + w->middle)
                return 0;
        return n - w->recent - w->sinks;
}

static uint32_t append(uint32_t *to, uint32_t n, uint32_t from, uint32_t end) {
        while (from < end)
                to[n++] = from++;
        return n;
}

uint32_t kvd_window_positions(const struct kvd_window *w, const uint32_t *middle, uint32_t n_middle,
                              uint32_t n_then, uint32_t n_now, uint32_t *to) {
        uint32_t from, n;

        if (kvd_window_middle(w, n_then, &from) == 0)
                return append(to, 0, 0, n_now);
        n = append(to, 0, 0, w->sinks);
        memcpy(to + n, middle, n_middle * sizeof *to);
        return append(to, n + n_middle, n_then - w->recent, n_now);
}

/* ---- sharing ---- */

double kvd_share_similarity(const uint32_t *both, const uint32_t *in_a, const uint32_t *in_b,
                            uint32_t rows) {
        double sum = 0.0;

        for (uint32_t r = 0; r < rows; r++)
                sum += both[r] > 0 ? (double)both[r] / (double)MAX(in_a[r], in_b[r]) : 0.0;
        return rows > 0 ? sum / rows : 0.0;
}

uint32_t kvd_share_count(double ratio, uint32_t n) {
        long k = lrint((1.0 - ratio) * (double)n);

        return n == 0 || k <= 0 ? 0 : (uint32_t)MIN(k, (long)n - 1);
}

/*
 * A row that already shares is skipped, both as a row and as a column; algorithm 1 sets it to zeros
 * for that. Returns false if no remaining pair is similar at all.
 */
static bool most_similar(const float *similarity, uint32_t n, const uint32_t *source, uint32_t *row,
                         uint32_t *column) {
        float most = 0.0f;

        for (uint32_t i = 1; i < n; i++)
                for (uint32_t j = 0; j < i && source[i] == i; j++)
                        if (source[j] == j && similarity[(size_t)i * n + j] > most) {
                                most = similarity[(size_t)i * n + j];
                                *row = i;
                                *column = j;
                        }
        return most > 0.0f;
}

static void greedy(const float *similarity, uint32_t n, uint32_t k, uint32_t *source) {
        uint32_t row = 0, column = 0;

        for (uint32_t i = 0; i < k && most_similar(similarity, n, source, &row, &column); i++)
                source[row] = column;
}

/* A source comes before those that share with it, so one pass in order is enough. */
static void compress(uint32_t n, uint32_t *source) {
        for (uint32_t i = 0; i < n; i++)
                source[i] = source[source[i]];
}

/*
 * The total gain in similarity if candidate becomes a source. best: the current similarity of each
 * with its source; 1 for a source.
 */
static float gain(const float *similarity, uint32_t n, const float *best, uint32_t candidate) {
        float sum = 1.0f - best[candidate];

        for (uint32_t i = candidate + 1; i < n; i++)
                sum += MAX(0.0f, similarity[(size_t)i * n + candidate] - best[i]);
        return sum;
}

static void add_source(const float *similarity, uint32_t n, uint32_t added, uint32_t *source,
                       float *best) {
        best[added] = 1.0f;
        source[added] = added;
        for (uint32_t i = added + 1; i < n; i++) {
                float s = MIN(1.0f, similarity[(size_t)i * n + added]);

                if (s > best[i]) {
                        best[i] = s;
                        source[i] = added;
                }
        }
}

/* Row 0 has no predecessor, so it is a source. A row that resembles no source stays one as well. */
static void star(const float *similarity, uint32_t n, uint32_t k, uint32_t *source, float *best) {
        memset(best, 0, n * sizeof *best);
        add_source(similarity, n, 0, source, best);
        for (uint32_t sources = 1; sources < n - k; sources++) {
                uint32_t choice = 0;
                float most = -1.0f;

                for (uint32_t i = 1; i < n; i++) {
                        float g = best[i] == 1.0f && source[i] == i ? -2.0f :
                                                                      gain(similarity, n, best, i);

                        if (g > most) {
                                most = g;
                                choice = i;
                        }
                }
                add_source(similarity, n, choice, source, best);
        }
}

void kvd_share_plan(const float *similarity, uint32_t n, uint32_t k, enum kvd_share how,
                    uint32_t *source, float *scratch) {
        for (uint32_t i = 0; i < n; i++)
                source[i] = i;
        if (n == 0)
                return;
        k = MIN(k, n - 1);
        if (how == KVD_SHARE_STAR) {
                star(similarity, n, k, source, scratch);
                return;
        }
        greedy(similarity, n, k, source);
        if (how == KVD_SHARE_GREEDY_ROOT)
                compress(n, source);
}

uint32_t kvd_share_check(const uint32_t *source, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                if (source[i] > i || source[source[i]] != source[i])
                        return i;
        return n;
}
