/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Clients count lookups and the duration of calls in their pin pages. They may write anything
 * there, so values are limited to what is possible before they are shown, or added to the sums of
 * the space, which outlive the client.
 */

#include <string.h>

#include "store/cache/inside.h"

/* Calls, tokens or nanoseconds: more than a client counts in a hundred days at full speed. */
#define MOST (UINT64_C(1) << 53)

static void cut(uint64_t *word, uint64_t most) {
        *word = MIN(*word, most);
}

/* A call counts for at most the upper end of its bucket. Fetches are counted by the daemon. */
static void cut_latency(uint64_t *words, enum kvd_latency which) {
        uint64_t *sum = &words[kvd_latency_sum(which)], most = 0;

        for (uint32_t i = 0; i < KVD_LATENCY_BUCKETS; i++) {
                uint64_t n = MIN(sum[1 + i], MOST >> (KVD_LATENCY_FIRST + i));

                sum[1 + i] = which == KVD_LATENCY_FETCH ? 0 : n;
                most += sum[1 + i] << (KVD_LATENCY_FIRST + i);
        }
        cut(sum, MIN(most, MOST));
}

static void cut_all(uint64_t *words) {
        for (uint32_t i = 0; i < KVD_CLIENT_COUNTERS_ROOM; i++)
                cut(&words[i], i < KVD_N_CLIENT_COUNTERS ? MOST : 0);
        cut(&words[KVD_CLIENT_HITS], words[KVD_CLIENT_LOOKUPS]);
        cut(&words[KVD_CLIENT_TOKENS_FOUND], words[KVD_CLIENT_TOKENS_ASKED]);
        for (uint32_t i = 0; i < KVD_N_LATENCIES; i++)
                cut_latency(words, (enum kvd_latency)i);
}

void attachment_counters(const struct attachment *a, uint32_t n, uint64_t *ret) {
        uint64_t words[KVD_CLIENT_WORDS];

        for (uint32_t i = 0; i < KVD_CLIENT_WORDS; i++)
                words[i] = atomic_load_explicit(&a->page->counters[i], memory_order_relaxed);
        cut_all(words);
        memcpy(ret, words, n * sizeof *ret);
}

void counters_add(const struct attachment *a, uint64_t *sums) {
        uint64_t words[KVD_CLIENT_WORDS];

        attachment_counters(a, KVD_CLIENT_WORDS, words);
        for (uint32_t i = 0; i < KVD_CLIENT_WORDS; i++)
                sums[i] += MIN(words[i], UINT64_MAX - sums[i]);
}

void space_count_latency(struct space *space, enum kvd_latency which, uint64_t ns) {
        uint64_t *words = space->account.past_counters;

        words[kvd_latency_sum(which)] += ns;
        words[kvd_latency_bucket(which, ns)]++;
}
