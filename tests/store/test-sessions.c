/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sessions of agents: which blocks are evicted after others or not at all; when that ends; and what
 * one user, one domain and one space may have of it. The clock is the test's.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/cache/inside.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define BLOCKS 64u
#define SECOND UINT64_C(1000000000)
#define ME 1000u
#define MANY 64u

static uint64_t clock_now = 1000 * SECOND;
static struct space *space;
static struct attachment *a;

static int tell_time(uint64_t *ret) {
        *ret = clock_now;
        return 0;
}

static void set_up(void) {
        static struct kvd_sys replaced;

        fixture_open(BLOCKS, 0);
        replaced = *sys;
        replaced.clock_ns = tell_time;
        sys = &replaced;
        space = fixture_space("s", BLOCKS);
        a = fixture_attach(space);
}

static void tear_down(void) {
        check_clean(space);
        fixture_close();
}

/* Seals n blocks behind parent with tokens that count up from first_token. Returns the last. */
static kvd_ref extend(kvd_ref parent, uint32_t first_token, uint32_t n) {
        kvd_ref blocks[BLOCKS];
        uint32_t tokens[BLOCKS * BT];
        struct seal_request q = {.parent = parent,
                                 .n_blocks = n,
                                 .blocks = blocks,
                                 .n_tokens = n * BT,
                                 .tokens = tokens};

        for (uint32_t i = 0; i < n * BT; i++)
                tokens[i] = first_token + i;
        for (uint32_t got = 0; got < n;)
                got += (uint32_t)space_allocate(a, n - got, blocks + got);
        ck_assert_msg(space_seal(a, &q, blocks) == 0, "%s", store_why(store));
        return blocks[n - 1];
}

static kvd_ref chain(uint32_t first_token, uint32_t n) {
        return extend(KVD_ROOT, first_token, n);
}

static int keep_of(uint32_t user, const char *name, uint32_t keep, uint32_t ttl_s, kvd_ref end) {
        return space_session(a, &(struct session_request){.name = name,
                                                          .user = user,
                                                          .keep = keep,
                                                          .ttl_s = ttl_s,
                                                          .n_blocks = 1,
                                                          .blocks = &end});
}

static void keep(const char *name, uint32_t how, uint32_t ttl_s, kvd_ref end) {
        ck_assert_msg(keep_of(ME, name, how, ttl_s, end) == 0, "%s", store_why(store));
}

static void end_session(const char *name) {
        ck_assert_int_eq(space_session_end(space, ME, name), 0);
}

/* Evicts up to n blocks, and says how many of them it evicted. */
static uint64_t evict(uint64_t n) {
        uint64_t evicted = 0;
        bool more = true;

        while (more && evicted < n)
                evicted += (uint64_t)space_evict(space, n - evicted, KVD_ROOT, &more);
        return evicted;
}

static bool there(kvd_ref ref) {
        return block_current(space, ref);
}

static void pass(uint64_t seconds) {
        clock_now += seconds * SECOND;
        for (uint32_t i = 0; i < STORE_MAX_SESSIONS / 64; i++)
                store_look_at_pins(store);
        idle();
}

/* Number of sessions that the user sees, and the first of them. */
static uint32_t sessions_of(const uint32_t *user, struct session_info *first) {
        struct session_info info;
        uint32_t cursor = 0, n = 0;

        while (space_next_session(space, user, &cursor, &info))
                if (n++ == 0 && first)
                        *first = info;
        return n;
}

/* ---- the order of eviction ------------------------------------------------------------------- */

static const char *const policies[] = {"lru", "fifo", "priority"};

START_TEST(high_goes_after_others) {
        kvd_ref high, cold, warm;

        set(space, "policy", policies[_i]);
        idle();
        high = chain(100, 4);
        cold = chain(200, 4);
        warm = chain(300, 4);
        keep("high", KVD_keep_high, 60, high);
        check_clean(space);
        ck_assert_uint_eq(evict(4), 4);
        ck_assert(there(high) && !there(cold) && there(warm));
        ck_assert_uint_eq(evict(4), 4);
        ck_assert(there(high) && !there(warm));
        ck_assert_uint_eq(evict(4), 4);
        ck_assert(!there(high));
}
END_TEST

START_TEST(pinned_is_not_evicted) {
        kvd_ref pinned = chain(100, 4), others[] = {chain(200, 4), chain(300, 4)};

        keep("pinned", KVD_keep_pinned, 60, pinned);
        ck_assert_uint_eq(evict(BLOCKS), 8);
        ck_assert(there(pinned) && !there(others[0]) && !there(others[1]));
        check_clean(space);
        end_session("pinned");
        ck_assert_uint_eq(evict(BLOCKS), 4);
}
END_TEST

START_TEST(a_pinned_chain_is_not_offered_to_clients) {
        store_look_at_pins(store);
        idle();
        ck_assert_uint_eq(a->page->available, BLOCKS);
        keep("pinned", KVD_keep_pinned, 60, chain(100, 7));
        store_look_at_pins(store);
        idle();
        ck_assert_uint_eq(a->page->available, BLOCKS - 7);
        pass(60);
        ck_assert_uint_eq(a->page->available, BLOCKS);
}
END_TEST

/* The next turn of a conversation extends its chain; until it is named again, it may lose that. */
START_TEST(a_chain_that_loses_its_end_stays_kept) {
        kvd_ref high = chain(100, 4), behind = extend(high, 500, 2), other = chain(200, 4);
        struct session_info info;

        keep("high", KVD_keep_high, 60, high);
        ck_assert_uint_eq(evict(6), 6);
        ck_assert(there(high) && !there(behind) && !there(other));
        ck_assert_uint_eq(evict(1), 1);
        ck_assert_uint_eq(sessions_of(NULL, &info), 1);
        ck_assert_uint_eq(info.blocks, 3);
        chain(300, 4);
        ck_assert_uint_eq(evict(4), 4);
        ck_assert_uint_eq(sessions_of(NULL, &info), 1);
        ck_assert_uint_eq(info.blocks, 3);
        check_clean(space);
        ck_assert_uint_eq(evict(3), 3);
        ck_assert_uint_eq(sessions_of(NULL, &info), 1);
        ck_assert_uint_eq(info.blocks, 0);
}
END_TEST

/* Eviction puts leaves in use aside, and gives them a new place afterwards, as a new policy does. */
START_TEST(high_stays_high_after_it_was_in_use) {
        kvd_ref high = chain(100, 4), later;

        keep("high", KVD_keep_high, 60, high);
        a->words[kvd_ref_id(high)].pins = 1;
        ck_assert_uint_eq(evict(1), 0);
        a->words[kvd_ref_id(high)].pins = 0;
        later = chain(200, 4);
        ck_assert_uint_eq(evict(4), 4);
        ck_assert(there(high) && !there(later));
        set(space, "policy", "fifo");
        idle();
        later = chain(200, 4);
        ck_assert_uint_eq(evict(4), 4);
        ck_assert(there(high) && !there(later));
}
END_TEST

START_TEST(the_strongest_of_several_counts) {
        kvd_ref shared = chain(100, 4), other = chain(200, 4);

        keep("a", KVD_keep_high, 60, shared);
        keep("b", KVD_keep_pinned, 60, shared);
        keep("c", KVD_keep_high, 60, shared);
        check_clean(space);
        ck_assert_uint_eq(evict(BLOCKS), 4);
        ck_assert(there(shared) && !there(other));
        end_session("b");
        end_session("c");
        check_clean(space);
        other = chain(200, 4);
        ck_assert_uint_eq(evict(4), 4);
        ck_assert(there(shared) && !there(other));
        end_session("a");
        other = chain(200, 4);
        ck_assert_uint_eq(evict(1), 1);
        ck_assert(!there(shared) && there(other));
}
END_TEST

/* ---- names and time -------------------------------------------------------------------------- */

START_TEST(a_name_again_replaces_chain_and_time) {
        kvd_ref first = chain(100, 4), second = chain(200, 4);
        struct session_info info;

        keep("one", KVD_keep_pinned, 60, first);
        clock_now += 30 * SECOND;
        keep("one", KVD_keep_high, 60, second);
        pass(31);
        ck_assert_uint_eq(sessions_of(NULL, &info), 1);
        ck_assert_uint_eq(info.left_ms, 29000);
        ck_assert_uint_eq(info.keep, KVD_keep_high);
        ck_assert_uint_eq(evict(4), 4);
        ck_assert(!there(first) && there(second));
        ck_assert_uint_eq(domain_used(domain, KVD_COST_session_pins), 0);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_sessions), 1);
}
END_TEST

/* The client has exited, and no client calls. */
START_TEST(sessions_end_by_themselves) {
        kvd_ref pinned = chain(100, 4), high = chain(200, 4);

        keep("pinned", KVD_keep_pinned, 10, pinned);
        keep("high", KVD_keep_high, 20, high);
        a = attachment_free(a, true);
        pass(9);
        ck_assert_uint_eq(evict(BLOCKS), 4);
        ck_assert(there(pinned) && !there(high));
        pass(1);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_session_pins), 0);
        ck_assert_uint_eq(evict(BLOCKS), 4);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_sessions), 1);
        ck_assert(store_look_at_pins(store) != STORE_DONE); /* the timer runs on for it */
        pass(10);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_sessions), 0);
        idle();
        ck_assert_int_eq(store_look_at_pins(store), STORE_DONE);
}
END_TEST

START_TEST(high_that_is_over_is_like_others) {
        kvd_ref high = chain(100, 4), other = chain(200, 4);

        keep("high", KVD_keep_high, 10, high);
        pass(10);
        ck_assert_uint_eq(evict(4), 4);
        ck_assert(!there(high) && there(other));
}
END_TEST

START_TEST(users_have_names_of_their_own) {
        uint32_t me = ME, other = ME + 1;
        kvd_ref end = chain(100, 4);
        struct session_info info;

        keep("same", KVD_keep_high, 60, end);
        ck_assert_int_eq(keep_of(other, "same", KVD_keep_high, 60, end), 0);
        ck_assert_int_eq(space_session_end(space, other, "another"), -ENOENT);
        ck_assert_uint_eq(sessions_of(NULL, NULL), 2);
        ck_assert_uint_eq(sessions_of(&other, &info), 1);
        ck_assert_uint_eq(info.keep, KVD_keep_high);
        ck_assert_int_eq(space_session_end(space, other, "same"), 0);
        ck_assert_uint_eq(sessions_of(&other, NULL), 0);
        ck_assert_uint_eq(sessions_of(&me, &info), 1);
        ck_assert_uint_eq(info.keep, KVD_keep_high);
}
END_TEST

/* ---- limits ---------------------------------------------------------------------------------- */

START_TEST(nonsense_is_refused_and_changes_nothing) {
        kvd_ref end = chain(100, 4), gone = chain(200, 1), own;
        char longest[KVD_NAME_MAX + 2];
        struct table t;
        bool more;

        table_open(&t, a, 4, false);
        ck_assert_int_eq(table_append(&t, BT, 1), 0);
        ck_assert_int_eq(space_evict(space, 0, gone, &more), 1);
        ck_assert_int_eq(space_allocate(a, 1, &own), 1);
        memset(longest, 'x', sizeof longest);
        longest[sizeof longest - 1] = 0;
        ck_assert_int_eq(keep_of(ME, longest, KVD_keep_high, 60, end), -EINVAL);
        ck_assert_int_eq(keep_of(ME, "", KVD_keep_high, 60, end), -EINVAL);
        ck_assert_int_eq(keep_of(ME, "a\nb", KVD_keep_high, 60, end), -EINVAL);
        ck_assert_int_eq(keep_of(ME, "a", 0, 60, end), -EINVAL);
        ck_assert_int_eq(keep_of(ME, "a", KVD_keep_end, 60, end), -EINVAL);
        ck_assert_int_eq(keep_of(ME, "a", KVD_keep_high, 0, end), -EINVAL);
        ck_assert_int_eq(keep_of(ME, "a", KVD_keep_high, STORE_SESSION_TTL_S + 1, end), -EINVAL);
        ck_assert_int_eq(keep_of(ME, "a", KVD_keep_high, 60, gone), -ESTALE);
        ck_assert_int_eq(keep_of(ME, "a", KVD_keep_high, 60, own), -ESTALE);
        ck_assert_int_eq(keep_of(ME, "a", KVD_keep_high, 60, t.slots[0].ref), -ESTALE);
        ck_assert_int_eq(keep_of(ME, "a", KVD_keep_high, 60, kvd_ref_make(UINT32_MAX, 1)), -ESTALE);
        ck_assert_uint_eq(sessions_of(NULL, NULL), 0);
        longest[KVD_NAME_MAX] = 0;
        keep(longest, KVD_keep_high, STORE_SESSION_TTL_S, end);
        ck_assert_int_eq(keep_of(ME, longest, KVD_keep_pinned, 60, gone), -ESTALE);
        ck_assert_uint_eq(sessions_of(NULL, NULL), 1);
        space_release(a, &own, 1);
        table_close(&t);
}
END_TEST

/* Half of the pool is what all sessions of all domains may pin; one domain leaves a sixteenth. */
START_TEST(pins_are_bounded_by_the_domain) {
        uint32_t most = BLOCKS / 2 - BLOCKS / 32;
        kvd_ref large = chain(100, most - 1), small = chain(9000, 2);

        ck_assert_uint_eq(domain_most(domain, KVD_COST_session_pins), most * BLOCK_BYTES);
        keep("large", KVD_keep_pinned, 60, large);
        ck_assert_int_eq(keep_of(ME, "small", KVD_keep_pinned, 60, small), -EDQUOT);
        ck_assert_msg(strstr(store_why(store), "kvctl domain"), "%s", store_why(store));
        ck_assert_uint_eq(sessions_of(NULL, NULL), 1);
        keep("small", KVD_keep_high, 60, small);
        ck_assert_int_eq(keep_of(ME, "small", KVD_keep_pinned, 60, small), -EDQUOT);
        keep("large", KVD_keep_pinned, 60, large); /* in place of itself */
        end_session("large");
        keep("small", KVD_keep_pinned, 60, small);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_session_pins), 2 * BLOCK_BYTES);
}
END_TEST

START_TEST(one_user_leaves_some_to_others) {
        uint32_t most = tenant_most(STORE_MAX_SESSIONS), n = 0;
        kvd_ref end = chain(100, 1);
        char name[16];

        for (int r = 0; r == 0; n += r == 0) {
                snprintf(name, sizeof name, "%u", n);
                r = keep_of(ME, name, KVD_keep_high, 60, end);
                ck_assert(r == 0 || r == -ENOBUFS);
        }
        ck_assert_uint_eq(n, most);
        keep("0", KVD_keep_high, 60, end); /* it replaces one */
        ck_assert_int_eq(keep_of(ME + 1, "0", KVD_keep_high, 60, end), 0);
        check_clean(space);
        pass(60);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_sessions), 0);
}
END_TEST

static int keep_many(const char *name, uint32_t how, uint32_t n, const kvd_ref *ends) {
        return space_session(a, &(struct session_request){.name = name,
                                                          .user = ME,
                                                          .keep = how,
                                                          .ttl_s = 60,
                                                          .n_blocks = n,
                                                          .blocks = ends});
}

START_TEST(one_user_leaves_chains_to_others) {
        uint32_t n = 0, most = tenant_most(STORE_SESSION_CHAINS);
        kvd_ref ends[MANY];
        char name[16];

        for (uint32_t i = 0; i < MANY; i++)
                ends[i] = chain(100 * (i + 1), 1);
        for (int r = 0; r == 0; n += r == 0) {
                snprintf(name, sizeof name, "%u", n);
                r = keep_many(name, KVD_keep_high, MANY, ends);
                ck_assert(r == 0 || r == -ENOBUFS);
        }
        ck_assert_uint_eq(n, most / MANY);
        check_clean(space);
        ck_assert_int_eq(keep_of(ME + 1, "0", KVD_keep_high, 60, ends[0]), 0);
        ck_assert_uint_eq(evict(1), 1); /* many lose their only block there */
        check_clean(space);
        end_session("0");
        check_clean(space);
}
END_TEST

START_TEST(a_block_named_many_times_is_one_chain) {
        kvd_ref ends[MANY], trunk = chain(100, 2), one, two;
        struct session_info info;

        for (uint32_t i = 0; i < MANY; i++)
                ends[i] = trunk;
        ck_assert_int_eq(keep_many("same", KVD_keep_pinned, MANY, ends), 0);
        ck_assert_uint_eq(space->leaves.sessions.n_chains, 1);
        ck_assert_uint_eq(domain_used(domain, KVD_COST_session_pins), 2 * BLOCK_BYTES);
        one = extend(trunk, 500, 1);
        two = extend(trunk, 600, 1);
        ck_assert_int_eq(keep_many("same", KVD_keep_high, 3, (kvd_ref[]){one, two, one}), 0);
        ck_assert_uint_eq(space->leaves.sessions.n_chains, 2);
        ck_assert_uint_eq(evict(2), 2); /* both chains end at the trunk then, which is one chain */
        check_clean(space);
        sessions_of(NULL, &info);
        ck_assert_uint_eq(info.blocks, 2);
        ck_assert(there(trunk) && !there(one) && !there(two));
}
END_TEST

/* A user could have pinned all of a small space for a week. */
START_TEST(pins_are_at_most_half_of_a_space) {
        struct space *small = fixture_space("small", 8);
        kvd_ref end, blocks[8];
        int n;

        attachment_free(a, false);
        a = fixture_attach(small);
        end = chain(100, 4);
        ck_assert_int_eq(keep_of(ME, "half", KVD_keep_pinned, 60, end), 0);
        end = chain(9000, 1);
        ck_assert_int_eq(keep_of(ME, "more", KVD_keep_pinned, 60, end), -EDQUOT);
        ck_assert_msg(strstr(store_why(store), "space 'small'"), "%s", store_why(store));
        ck_assert_int_eq(keep_of(ME, "half", KVD_keep_pinned, 60, end), 0); /* in its place */
        end = chain(100, 4);
        ck_assert_int_eq(keep_of(ME, "half", KVD_keep_pinned, 60, end), 0);
        for (uint32_t i = 0; (n = space_allocate(a, 1, blocks)) > 0; i++)
                ck_assert_uint_lt(i, 8);
        ck_assert_int_eq(n, -ENOBUFS);
        ck_assert_msg(strstr(store_why(store), "sessions pin up to 4 (see kvctl sessions)"), "%s",
                      store_why(store));
        a = attachment_free(a, false);
        idle();
        check_clean(small);
}
END_TEST

/* The blocks of a space that nobody uses make room for other spaces, but not what is pinned. */
START_TEST(a_space_with_pinned_blocks_is_not_removed) {
        keep("pinned", KVD_keep_pinned, 60, chain(100, 4));
        a = attachment_free(a, false);
        idle();
        ck_assert_int_eq(domain_make_way(domain), -EDQUOT);
        pass(60);
        ck_assert_int_eq(domain_make_way(domain), 0);
        space = fixture_space("another", BLOCKS);
}
END_TEST

SUITE("sessions", FIXTURE(set_up, tear_down), LOOPS(ARRAY_SIZE(policies), high_goes_after_others),
      TESTS(pinned_is_not_evicted, a_pinned_chain_is_not_offered_to_clients,
            a_chain_that_loses_its_end_stays_kept, high_stays_high_after_it_was_in_use,
            the_strongest_of_several_counts),
      TESTS(a_name_again_replaces_chain_and_time, sessions_end_by_themselves,
            high_that_is_over_is_like_others, users_have_names_of_their_own),
      TESTS(nonsense_is_refused_and_changes_nothing, pins_are_bounded_by_the_domain,
            one_user_leaves_some_to_others, one_user_leaves_chains_to_others,
            a_block_named_many_times_is_one_chain, pins_are_at_most_half_of_a_space,
            a_space_with_pinned_blocks_is_not_removed))
