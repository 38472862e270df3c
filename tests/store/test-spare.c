/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks are carried to servers through places of exact copies, as if from a GPU's pool. The pool
 * is in host memory, the tests' worker copies, and the test plays the remote process.
 */

#include "ipc/base/device.h"
#include "store/remote/inside.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define N 3u /* blocks per chain */

static struct space *space;
static struct attachment *a;

static void set_up(void) {
        const struct store_remote_config config = {.depth = N * BT};

        fixture_open(64, 64);
        store->config.backend = KVD_BACKEND_VMM; /* so that blocks to write are carried */
        ck_assert_int_eq(store_remote_begin(store, &config), 0);
        store->config.backend = KVD_BACKEND_HOST;
        store_remote_servers(store, 1, 0, NULL);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
}

static void tear_down(void) {
        check_clean(space);
        fixture_close();
}

static void seal_chain(void) {
        uint32_t tokens[N * BT];
        kvd_ref chain[N];
        struct seal_request q = {.n_blocks = N,
                                 .blocks = chain,
                                 .n_tokens = N * BT,
                                 .tokens = tokens};

        for (uint32_t i = 0; i < N * BT; i++)
                tokens[i] = 100 + i;
        ck_assert_int_eq(space_allocate(a, N, chain), N);
        ck_assert_int_eq(space_seal(a, &q, chain), 0);
}

static const struct store_remote_question *asked(void) {
        const struct store_remote_question *q = NULL;

        for (uint32_t i = 0; !q && i < 1000; i++) {
                idle();
                q = store_remote_next(store, &(bool){false});
                work();
        }
        ck_assert(q && q->what == STORE_REMOTE_PUT);
        return q;
}

/* Places are kept for the next blocks, and given back when there are none. */
START_TEST(places_go_back_when_nothing_is_carried) {
        const struct kvd_key names[N] = {{1, 1}, {2, 2}, {3, 3}};
        const int32_t errors[N] = {0};
        bool later = true;

        seal_chain();
        ck_assert_uint_eq(asked()->n, N);
        ck_assert_uint_eq(usage_of(space).copy_bytes, N * BLOCK_BYTES);
        store_remote_put(store, names, errors, N);
        ck_assert_uint_eq(usage_of(space).copy_bytes, N * BLOCK_BYTES);
        for (uint32_t i = 0; later && i < 1000; i++) {
                idle();
                ck_assert_ptr_null(store_remote_next(store, &later));
        }
        ck_assert(!later);
        ck_assert_uint_eq(usage_of(space).copy_bytes, 0);
}
END_TEST

/* A fetch that only asks what the servers have once waited for places of another space. */
START_TEST(a_question_of_names_does_not_wait_for_places) {
        const struct kvd_key names[N] = {{1, 1}, {2, 2}, {3, 3}};
        const int32_t errors[N] = {0};
        struct space *other = fixture_space("other", 0);
        struct attachment *b = fixture_attach(other);
        uint32_t tokens[N * BT];
        struct fetch_request q = {.n_tokens = N * BT, .tokens = tokens};
        bool later;
        int fd;

        for (uint32_t i = 0; i < N * BT; i++)
                tokens[i] = 900 + i;
        seal_chain();
        asked();
        store_remote_put(store, names, errors, N);
        ck_assert_int_eq(space_fetch(b, &q, &fd), 0);
        ck_assert_int_ge(fd, 0);
        ck_assert_ptr_nonnull(store_remote_next(store, &later));
        store_remote_found(store, NULL, 0);
}
END_TEST

SUITE("spare", FIXTURE(set_up, tear_down),
      TESTS(places_go_back_when_nothing_is_carried, a_question_of_names_does_not_wait_for_places))
