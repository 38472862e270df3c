/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Shares: a domain gets what is guaranteed to it, whatever others did before, and a process gets
 * its share once, however many connections it makes. In most tests `greedy` takes all that it can
 * get in some way; then `poor`, whose guarantee is half of the pool, makes its first requests.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "store/account.h"
#include "store/cache/cache.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

enum { POOL_BLOCKS = 512, HALF = POOL_BLOCKS / 2 };

static struct domain *greedy, *poor;

static void reserve_half(struct domain **ret) {
        const struct domain_config config = {.name = "poor",
                                             .guarantee = (uint64_t)HALF * BLOCK_BYTES,
                                             .client_quota = UINT64_MAX};

        ck_assert_int_eq(store_domain(store, &config, ret), 0);
}

static void set_up(void) {
        fixture_open(POOL_BLOCKS, POOL_BLOCKS);
        greedy = domain;
        reserve_half(&poor);
}

static void tear_down(void) {
        fixture_close();
}

static struct space *space_of(struct domain *of, const char *name) {
        domain = of;
        return fixture_space(name, POOL_BLOCKS);
}

/* Allocates until it is refused; *refs is large enough. */
static uint32_t take(struct attachment *a, kvd_ref *refs) {
        uint32_t got = 0;
        int n;

        while ((n = space_allocate(a, 64, refs + got)) > 0)
                got += (uint32_t)n;
        ck_assert_msg(n == -ENOBUFS || n == -EDQUOT, "%s", store_why(store));
        return got;
}

static void expect_guarantee(void) {
        static kvd_ref refs[2 * POOL_BLOCKS];
        struct space *space = space_of(poor, "poor");
        struct attachment *a = fixture_attach(space);

        ck_assert_uint_ge(take(a, refs), HALF);
        check_clean(space);
}

/* ---- ways to take all of the pool ------------------------------------------------------------ */

START_TEST(filling_by_several_connections_leaves_the_guarantee) {
        static kvd_ref refs[2 * POOL_BLOCKS];
        struct space *space = space_of(greedy, "greedy");
        uint32_t got = take(fixture_attach_as(space, 1), refs);

        got += take(fixture_attach_as(space, 1), refs + got);
        got += take(fixture_attach_as(space, 2), refs + got);
        ck_assert_uint_eq(got, HALF);
        expect_guarantee();
}

static void seal(struct attachment *a, kvd_ref ref, uint32_t number) {
        uint32_t tokens[BT] = {number};
        kvd_ref sealed;

        ck_assert_int_eq(space_seal(a,
                                    &(struct seal_request){.n_blocks = 1,
                                                           .blocks = &ref,
                                                           .n_tokens = BT,
                                                           .tokens = tokens},
                                    &sealed),
                         0);
}

START_TEST(pinning_everything_leaves_the_guarantee) {
        static kvd_ref refs[2 * POOL_BLOCKS];
        struct space *space = space_of(greedy, "greedy");
        struct attachment *a = fixture_attach(space);
        uint32_t n = take(a, refs);

        for (uint32_t i = 0; i < n; i++)
                seal(a, refs[i], i);
        for (uint32_t i = 0; i < space_index(space)->capacity; i++)
                atomic_store(&a->words[i].pins, 1);
        ck_assert_uint_eq(n + take(a, refs), HALF);
        expect_guarantee();
}

START_TEST(orphaned_blocks_leave_the_guarantee) {
        static kvd_ref refs[2 * POOL_BLOCKS];
        struct space *space = space_of(greedy, "greedy");

        for (uint64_t process = 1; process < 5; process++) {
                struct attachment *a = fixture_attach_as(space, process);

                take(a, refs);
                attachment_orphan(a); /* its socket is closed, and the process still runs */
        }
        expect_guarantee();
}

/* A guarantee that is set later is met by evicting blocks of domains above their guarantee. */
START_TEST(a_later_guarantee_is_taken_from_the_greedy) {
        static kvd_ref refs[2 * POOL_BLOCKS];
        struct domain_config none = {.name = "poor", .client_quota = UINT64_MAX};
        struct attachment *a;
        uint32_t n;

        ck_assert_int_eq(store_domain(store, &none, &poor), 0);
        a = fixture_attach(space_of(greedy, "greedy"));
        n = take(a, refs);
        ck_assert_uint_eq(n, POOL_BLOCKS);
        for (uint32_t i = 0; i < n; i++)
                seal(a, refs[i], i);
        reserve_half(&poor);
        expect_guarantee();
}

/* The part of a cost that is kept for domains that have little of it. */
static uint64_t kept(enum kvd_cost cost) {
        return cost == KVD_COST_pool || cost == KVD_COST_spill ? 0 :
                                                                 store->account.limit[cost] / 16;
}

START_TEST(a_quota_is_a_share_of_every_cost) {
        const struct domain_config config = {.name = "small",
                                             .quota = (uint64_t)POOL_BLOCKS / 8 * BLOCK_BYTES};
        struct domain *small;

        ck_assert_int_eq(store_domain(store, &config, &small), 0);
        for (uint32_t i = 0; i < KVD_N_COSTS; i++) {
                uint64_t limit = store->account.limit[i];
                uint64_t fair = i == KVD_COST_spill ? limit / 2 / 2 / 3 : 0;

                ck_assert_uint_eq(domain_most(small, i), limit / 8);
                ck_assert_uint_eq(domain_most(greedy, i), limit - kept(i));
                ck_assert_uint_eq(domain_guaranteed(poor, i), limit / 2);
                ck_assert_uint_eq(account_room(greedy, i), limit - limit / 2 - kept(i) - fair);
                ck_assert_uint_eq(account_room(poor, i), limit - kept(i) - 2 * fair);
        }
}

/* ---- descriptors and the like, without guarantees -------------------------------------------- */

/* There are no guarantees, and one domain takes all that it gets. Others can still begin. */
START_TEST(a_hog_leaves_newcomers_what_cannot_be_evicted) {
        const struct domain_config none = {.name = "poor"};
        struct space *hog = space_of(greedy, "greedy");

        ck_assert_int_eq(store_domain(store, &none, &poor), 0);
        for (uint32_t i = 0; i < KVD_N_COSTS; i++) {
                while (account_room(greedy, i))
                        ck_assert_int_eq(account_charge(hog, i, account_room(greedy, i)), 0);
                ck_assert_int_lt(account_charge(hog, i, 1), 0);
                ck_assert_uint_eq(account_room(poor, i),
                                  i == KVD_COST_pool  ? 0 :
                                  i == KVD_COST_spill ? store->account.limit[i] / 4 :
                                                        store->account.limit[i] / 64);
        }
        ck_assert_ptr_nonnull(fixture_attach(space_of(poor, "poor")));
}

/* ---- shares of exact copies and sketches ----------------------------------------------------- */

START_TEST(exact_copies_have_shares) {
        struct space *hog = space_of(greedy, "greedy"), *other = space_of(poor, "poor");
        uint32_t n = 0, m = 0;

        while (place_available(hog) && place_take(hog) != KVD_NOWHERE)
                n++;
        while (place_available(other) && place_take(other) != KVD_NOWHERE)
                m++;
        ck_assert_uint_eq(n, HALF);
        ck_assert_uint_eq(m, HALF);
}

/* ---- what small blocks cost in addition to the pool ------------------------------------------ */

START_TEST(indexes_and_pin_pages_have_a_limit) {
        uint64_t limit = store->account.limit[KVD_COST_overhead], mapped = 0;
        uint32_t n = 0, attached = 0;
        struct space_spec spec = {.geometry = {.layers = 1,
                                               .kv_heads = 1,
                                               .head_dim = 1,
                                               .block_tokens = 1,
                                               .dtype = KVD_I8,
                                               .vocab = 10},
                                  .options = {.max_blocks = 400000}};
        struct space *space;
        bool created;
        int r;

        fixture_close(); /* opens another one, whose pool has room for them */
        fixture_open(4 * POOL_BLOCKS * 1024, 0);
        limit = store->account.limit[KVD_COST_overhead];
        do {
                snprintf(spec.name, sizeof spec.name, "tiny-%u", n);
                r = space_open(domain, &spec, true, &space, &created);
                if (r == 0) {
                        mapped += space_index(space)->size;
                        n++;
                        continue;
                }
        } while (r == 0 && n < 1000);
        ck_assert_int_eq(r, -EDQUOT);
        ck_assert_uint_gt(n, 0);
        space = space_by_name(domain, "tiny-0");
        while (attachment_new(space, NULL, 1 + attached, NULL, &(struct attachment *){NULL}) == 0) {
                mapped += kvd_pinpage_bytes(space_index(space));
                attached++;
        }
        ck_assert_uint_lt(mapped, limit);
        ck_assert_uint_le(store->account.used[KVD_COST_overhead], limit);
        for (uint32_t i = 0; i < n; i++) {
                snprintf(spec.name, sizeof spec.name, "tiny-%u", i);
                ck_assert_int_eq(space_delete(space_by_name(domain, spec.name), true), 0);
        }
        while (store_idle(store))
                ;
        for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                ck_assert_uint_eq(store->account.used[i], 0);
}

/* A method gets its memory beyond the pool when it is switched on: without, it would do nothing. */
START_TEST(a_method_that_gets_no_memory_is_refused) {
        struct space *space = space_of(greedy, "greedy");

        store->account.limit[KVD_COST_overhead] = store->account.used[KVD_COST_overhead];
        account_shares_changed(store);
        ck_assert_int_eq(space_set(space, "kvreviver", "on"), -EDQUOT);
        ck_assert_ptr_nonnull(strstr(store_why(store), "memory outside of the pool"));
        ck_assert(!kvd_setting_on(space_index(space)->settings, KVD_kvreviver_on));
        store->account.limit[KVD_COST_overhead] *= 8;
        account_shares_changed(store);
        ck_assert_int_eq(space_set(space, "kvreviver", "on"), 0);
}

/*
 * Requests that need a worker, and are possible while their method is off, were taken in a space
 * whose summaries got no memory, and nothing happened.
 */
START_TEST(a_request_whose_worker_gets_no_memory_is_refused) {
        struct space *space = space_of(greedy, "greedy");
        struct attachment *a = fixture_attach(space);
        static struct table t;
        kvd_ref blocks[2];
        uint64_t ticket;
        const struct compact_request compact = {.n = 4,
                                                .keep = 2 * BT,
                                                .n_scores = 1,
                                                .scores = blocks};
        const struct critical_request critical = {.n_blocks = 1,
                                                  .blocks = blocks,
                                                  .queries = 1,
                                                  .words = 1,
                                                  .selected = 1};

        table_open(&t, a, 8, false);
        ck_assert_int_eq(table_append(&t, 4 * BT, 10), 0);
        ck_assert_int_eq(space_allocate(a, 2, blocks), 2);
        store->account.limit[KVD_COST_overhead] = store->account.used[KVD_COST_overhead];
        account_shares_changed(store);
        ck_assert_int_eq(sequence_compact(a, t.number, &compact), -EDQUOT);
        ck_assert_ptr_nonnull(strstr(store_why(store), "memory outside of the pool"));
        ck_assert_int_eq(sequence_critical(a, t.number, &critical), -EDQUOT);
        ck_assert_int_eq(sequence_cool(a, t.number, KVD_COOL_SPILL, &(uint32_t){0}, 1), -EDQUOT);
        ck_assert_int_eq(space_sample(a, 50, 1, blocks, 2, &ticket), -EDQUOT);
        ck_assert_uint_eq(store_jobs_waiting(store), 0);
        store->account.limit[KVD_COST_overhead] *= 8;
        account_shares_changed(store);
        ck_assert_int_eq(sequence_compact(a, t.number, &compact), 4);
        ck_assert_int_eq(sequence_critical(a, t.number, &critical), 0);
        table_close(&t);
}

/* ---- one process ----------------------------------------------------------------------------- */

START_TEST(one_process_cannot_take_all_attachments) {
        struct space *space = space_of(greedy, "greedy");
        uint32_t max = store->config.max_attachments, n = 0;
        struct attachment *a, *last;

        while (n < max && attachment_new(space, NULL, 7, NULL, &a) == 0)
                n++;
        ck_assert_uint_eq(n, max - 1);
        ck_assert_int_eq(attachment_new(space, NULL, 7, NULL, &last), -EUSERS);
        ck_assert_int_eq(attachment_new(space, NULL, 8, NULL, &last), 0);
        attachment_free(a, false);
        ck_assert_int_eq(attachment_new(space, NULL, 7, NULL, &a), 0);
}

START_TEST(one_process_cannot_take_all_leases) {
        struct space *space = space_of(greedy, "greedy");
        struct attachment *a = fixture_attach_as(space, 1), *b = fixture_attach_as(space, 1),
                          *other = fixture_attach_as(space, 2);
        uint32_t n = 0;

        for (int r = 1; r == 1 && n < STORE_MAX_LEASES; n += r == 1)
                r = space_lease(n % 2 ? a : b, (struct kvd_key){n, 1}, 1);
        ck_assert_uint_eq(n, STORE_MAX_LEASES - STORE_MAX_LEASES / 16);
        ck_assert_int_eq(space_lease(other, (struct kvd_key){n, 1}, 1), 1);
}

START_TEST(connections_of_one_process_share_a_quota) {
        const struct domain_config config = {.name = "q", .client_quota = 8 * BLOCK_BYTES};
        struct attachment *a, *b;
        struct space *space;
        struct domain *q;
        kvd_ref refs[32];

        ck_assert_int_eq(store_domain(store, &config, &q), 0);
        space = space_of(q, "q");
        a = fixture_attach_as(space, 1);
        b = fixture_attach_as(space, 1);
        ck_assert_int_eq(space_allocate(a, 6, refs), 6);
        ck_assert_int_eq(space_allocate(b, 6, refs + 6), 2);
        attachment_orphan(a);
        ck_assert_int_eq(space_allocate(b, 6, refs + 8), -EDQUOT);
        attachment_free(a, true);
        ck_assert_int_eq(space_allocate(b, 32, refs + 8), 6);
}

/* ---- what others deleted ---------------------------------------------------------------------- */

static void reserve_quota(uint64_t blocks, struct domain **ret) {
        const struct domain_config config = {.name = "bounded",
                                             .quota = blocks * BLOCK_BYTES,
                                             .client_quota = UINT64_MAX};

        ck_assert_int_eq(store_domain(store, &config, ret), 0);
}

/* Waiting would gain nothing: eviction of its own blocks makes room at once. */
START_TEST(a_full_domain_does_not_wait_for_what_another_one_deleted) {
        static kvd_ref refs[2 * POOL_BLOCKS];
        struct space *gone = space_of(greedy, "gone");
        struct attachment *a = fixture_attach(gone);
        struct domain *bounded;
        uint64_t used;
        uint32_t n;

        ck_assert_int_gt(space_allocate(a, HALF / 4, refs), 0);
        reserve_quota(HALF / 4, &bounded);
        a = fixture_attach(space_of(bounded, "bounded"));
        n = take(a, refs);
        for (uint32_t i = 0; i < n; i++)
                seal(a, refs[i], i);
        ck_assert_int_eq(space_delete(gone, true), 0);
        used = store->account.used[KVD_COST_pool];
        ck_assert_int_eq(space_allocate(a, 1, refs), 1);
        ck_assert_uint_eq(store->account.used[KVD_COST_pool], used);
}

SUITE("account", FIXTURE(set_up, tear_down),
      TESTS(filling_by_several_connections_leaves_the_guarantee,
            pinning_everything_leaves_the_guarantee, orphaned_blocks_leave_the_guarantee,
            a_later_guarantee_is_taken_from_the_greedy, a_quota_is_a_share_of_every_cost,
            a_hog_leaves_newcomers_what_cannot_be_evicted, exact_copies_have_shares,
            indexes_and_pin_pages_have_a_limit, a_method_that_gets_no_memory_is_refused,
            a_request_whose_worker_gets_no_memory_is_refused,
            one_process_cannot_take_all_attachments, one_process_cannot_take_all_leases,
            connections_of_one_process_share_a_quota,
            a_full_domain_does_not_wait_for_what_another_one_deleted))
