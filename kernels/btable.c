/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's table of how many layers of a stored prefix to use. It is built from samples of how
 * similar states are with and without the rest of the input, and is looked up by the prefix's share
 * of the input.
 */

#include "kernels/btable.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/bicache.h"

/* ---- similarity ---- */

double kvd_cosine(const struct kvd_products *p) {
        return p->aa == 0.0 || p->bb == 0.0 ? 0.0 : p->ab / (sqrt(p->aa) * sqrt(p->bb));
}

double kvd_similarity_flat(const struct kvd_products *keys, const struct kvd_products *values,
                           uint32_t tokens) {
        struct kvd_products sum = {0};

        for (uint32_t i = 0; i < tokens; i++) {
                sum.ab += keys[i].ab + values[i].ab;
                sum.aa += keys[i].aa + values[i].aa;
                sum.bb += keys[i].bb + values[i].bb;
        }
        return kvd_cosine(&sum);
}

double kvd_similarity_token_mean(const struct kvd_products *keys, const struct kvd_products *values,
                                 uint32_t tokens) {
        double sum = 0.0;

        for (uint32_t i = 0; i < tokens; i++)
                sum += kvd_cosine(keys + i) + kvd_cosine(values + i);
        return tokens > 0 ? sum / (2.0 * tokens) : 0.0;
}

/* ---- ratios and refreshes ---- */

/* Integer arithmetic: half a percent is exact here, and not always in a floating-point quotient. */
uint32_t kvd_ratio_percent(uint64_t m, uint64_t n) {
        unsigned __int128 hundredfold = (unsigned __int128)m * 100;
        uint64_t percent = (uint64_t)(hundredfold / n), rest = (uint64_t)(hundredfold % n);

        if (rest > n - rest || (rest == n - rest && percent % 2 == 1))
                percent++;
        return (uint32_t)percent;
}

bool kvd_refresh_due(uint32_t t, uint32_t delta) {
        return (t - 1) % delta == 0;
}

uint32_t kvd_layers_alike(const float *similarity, uint32_t n_layers, float tau, bool equal) {
        uint32_t b = 0;

        while (b < n_layers && (similarity[b] > tau || (equal && similarity[b] == tau)))
                b++;
        return b;
}

/* ---- profile and table ---- */

int kvd_bprofile_add(struct kvd_bprofile *profile, uint32_t percent, const float *similarity) {
        double *sum = profile->sum + (size_t)percent * profile->n_layers;

        if (percent >= KVD_BTABLE_STEPS)
                return -EINVAL;
        for (uint32_t l = 0; l < profile->n_layers; l++)
                if (!isfinite(similarity[l]))
                        return -EINVAL;
        for (uint32_t l = 0; l < profile->n_layers; l++)
                sum[l] += (double)similarity[l];
        profile->sum_b[percent] +=
                MAX(1, kvd_layers_alike(similarity, profile->n_layers, profile->tau, true));
        profile->requests[percent]++;
        return 0;
}

static uint32_t estimate(const struct kvd_bprofile *profile, enum kvd_estimator estimator,
                         uint32_t percent) {
        const double *sum = profile->sum + (size_t)percent * profile->n_layers;
        uint32_t n = profile->requests[percent], b = 0;

        if (n == 0)
                return 0;
        if (estimator == KVD_ESTIMATE_MEAN_B)
                return (uint32_t)(profile->sum_b[percent] / n);
        while (b < profile->n_layers && sum[b] / n > (double)profile->tau)
                b++;
        return b;
}

void kvd_btable_build(const struct kvd_bprofile *profile, enum kvd_estimator estimator,
                      struct kvd_btable *ret) {
        uint32_t most = 0;

        *ret = (struct kvd_btable){.ratio = profile->ratio};
        for (uint32_t r = 0; r < KVD_BTABLE_STEPS; r++) {
                uint32_t b = estimate(profile, estimator, r);

                if (b <= most)
                        continue;
                ret->steps[ret->n++] = (struct kvd_bstep){(uint8_t)r, (uint16_t)b};
                most = b;
        }
}

int kvd_btable_lookup(const struct kvd_btable *table, enum kvd_ratio ratio, uint32_t percent) {
        int b = 1;

        if (ratio != table->ratio)
                return -EINVAL;
        for (uint32_t i = 0; i < table->n && table->steps[i].percent <= percent; i++)
                b = table->steps[i].b;
        return b;
}
