/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Threads that share work: every piece is done once, by an existing thread, and each round sees
 * what the previous one has written. This test also runs under ThreadSanitizer (suite inproc).
 */

#include <stdatomic.h>
#include <stdlib.h>

#include "ipc/base/threads.h"
#include "tests/lib/suite.h"

enum { PIECES = 1000, MOST = 5 };

struct work {
        struct threads *threads;
        uint32_t n;            /* threads */
        uint32_t done[PIECES]; /* not atomic: one thread does each piece */
        uint32_t before[MOST], seen[MOST];
};

static void count_piece(void *data, uint32_t i, uint32_t thread) {
        struct work *w = data;

        ck_assert_uint_lt(thread, w->n);
        w->done[i]++;
}

static void exchange(void *data, uint32_t thread) {
        struct work *w = data;

        w->before[thread]++;
        threads_meet(w->threads);
        for (uint32_t i = 0; i < w->n; i++)
                w->seen[thread] += w->before[i];
}

static void begin(struct work *w, int wanted) {
        *w = (struct work){0};
        ck_assert_int_eq(threads_new((uint32_t)wanted, &w->threads), 0);
        w->n = threads_count(w->threads);
        ck_assert_uint_eq(w->n, (uint32_t)wanted);
}

START_TEST(every_piece_is_done_once) {
        static const uint32_t sizes[] = {0, 1, 2, 3, PIECES};
        struct work w;

        begin(&w, _i + 1);
        for (uint32_t round = 0; round < 50; round++)
                for (uint32_t s = 0; s < 5; s++)
                        threads_share(w.threads, sizes[s], count_piece, &w);
        for (uint32_t i = 0; i < PIECES; i++)
                ck_assert_uint_eq(w.done[i], 50 * (1 + (i < 3) + (i < 2) + (i < 1)));
        ck_assert_ptr_null(threads_free(w.threads));
}
END_TEST

START_TEST(all_meet_in_the_middle) {
        struct work w;

        begin(&w, _i + 1);
        for (uint32_t round = 1; round <= 200; round++)
                threads_all(w.threads, exchange, &w);
        for (uint32_t i = 0; i < w.n; i++)
                ck_assert_uint_eq(w.seen[i], w.n * 200 * 201 / 2);
        ck_assert_ptr_null(threads_free(w.threads));
}
END_TEST

SUITE("threads", LOOPS(MOST, every_piece_is_done_once, all_meet_in_the_middle))
