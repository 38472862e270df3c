/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bidirectional prefixes in a file: a prefix comes back whole or not at all, with its own bytes in
 * each block, however similar other prefixes are.
 */

#include <errno.h>
#include <signal.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "client/kvd.h"
#include "ipc/base/key.h"
#include "ipc/base/util.h"
#include "tests/daemon/children/file_tier.h"
#include "tests/lib/suite.h"

#define TOKENS (BLOCKS * BLOCK_TOKENS)

static void start_whole(void) {
        kind = KVD_BIDIRECTIONAL;
        n_tokens = TOKENS - 5; /* its last block is filled in part */
        start();
}

/* In spaces of opaque blocks, tokens may have any value. */
static void start_opaque(void) {
        opaque = true;
        kind = KVD_BIDIRECTIONAL;
        n_tokens = TOKENS;
        start();
}

static void evict_some(uint32_t n) {
        peer_ok(watcher, MSG(evict, .space = kvd_slice_of("s"), .blocks = n));
}

static void expect_all_of(const uint32_t *of) {
        ck_assert_uint_eq(resident(of), 0);
        WAIT_UNTIL(below(of) == n_tokens);
        ck_assert_int_eq(fetch(of), n_tokens);
        ck_assert_uint_eq(resident(of), BLOCKS);
}

static void expect_nothing_of(const uint32_t *of) {
        ck_assert_uint_eq(below(of), 0);
        ck_assert_int_eq(fetch(of), 0);
        ck_assert_uint_eq(resident(of), 0);
}

START_TEST(a_prefix_comes_back_whole) {
        WAIT_UNTIL(below(tokens) == 0);
        write_chain();
        ck_assert_uint_eq(below(tokens), 0);
        evict_all();
        expect_all_of(tokens);
        ck_assert_uint_eq(tier().hits, BLOCKS);
        ck_assert_uint_eq(tier().misses, 0);
        ck_assert_int_eq(fetch(tokens), n_tokens); /* it is resident */
        ck_assert_uint_eq(tier().hits, BLOCKS);
}
END_TEST

START_TEST(no_room_for_its_blocks_is_no_hint) {
        struct kvd_pin pin = {0};
        uint32_t ids[BLOCKS];

        write_chain();
        evict_all();
        WAIT_UNTIL(below(tokens) == n_tokens);
        ck_assert_int_eq(kvd_lookup(space, 0, tokens, n_tokens, ids, BLOCKS - 1, &pin), 0);
        ck_assert_uint_eq(pin.n_below, 0);
}
END_TEST

/* 0: the daemon is stopped; 1: it is killed. */
START_TEST(warm_after_a_restart) {
        write_chain();
        restart(_i);
        ck_assert_uint_eq(tier().records, BLOCKS);
        expect_all_of(tokens);
}
END_TEST

/* Shorter and longer prefixes, and those with another first or last token, are not found. */
START_TEST(others_are_not_there) {
        uint32_t other[TOKENS], whole = n_tokens;
        int fd;

        write_chain();
        evict_all();
        memcpy(other, tokens, sizeof other);
        other[n_tokens - 1]++;
        expect_nothing_of(other);
        other[n_tokens - 1]--;
        other[0]++;
        expect_nothing_of(other);
        for (uint32_t n = 1; n <= TOKENS; n += n < TOKENS - 2 * BLOCK_TOKENS ? BLOCK_TOKENS : 1) {
                n_tokens = n;
                if (n != whole)
                        expect_nothing_of(tokens);
        }
        n_tokens = whole;
        ck_assert_int_eq(kvd_fetch(space, 0, 1, tokens, n_tokens, &fd), -EINVAL);
        ck_assert_int_eq(kvd_fetch(space, 1, 0, tokens, n_tokens, &fd), -EINVAL);
        expect_all_of(tokens);
}
END_TEST

/* They differ only in their last token, but in all bytes of their blocks. */
START_TEST(prefixes_that_begin_alike_share_nothing) {
        uint32_t other[3][TOKENS];

        write_chain();
        for (uint32_t i = 0; i < 3; i++) {
                memcpy(other[i], tokens, sizeof other[i]);
                other[i][n_tokens - 1] += i + 1;
                make_chain(other[i]);
                WAIT_UNTIL(tier().records == (i + 2) * BLOCKS);
        }
        WAIT_UNTIL(tier().written_bytes >= 4 * BLOCKS * (uint64_t)RECORD_BYTES);
        evict_all();
        for (uint32_t i = 0; i < 3; i++)
                expect_all_of(other[i]);
        expect_all_of(tokens);
}
END_TEST

START_TEST(remains_are_not_found_and_evicted) {
        write_chain();
        evict_some(5);
        expect_all_of(tokens);
        ck_assert_uint_eq(tier().hits, BLOCKS);
        evict_some(BLOCKS - 5); /* the remains of the first one */
        ck_assert_uint_eq(resident(tokens), BLOCKS);
}
END_TEST

/* One corrupt record makes the whole prefix a miss, even if a part of it is still in the pool. */
START_TEST(rot_is_a_miss_of_all) {
        for (uint32_t block = 1; block < BLOCKS; block += 11) {
                uint64_t written = tier().written_bytes;

                make_chain(tokens);
                WAIT_UNTIL(tier().written_bytes >= written + BLOCKS * (uint64_t)RECORD_BYTES);
                if (block < 12)
                        evict_all();
                else
                        evict_some(2);
                rot(tokens, block);
                ck_assert_int_eq(fetch(tokens), n_tokens);
                expect_nothing_of(tokens);
                evict_all();
        }
        ck_assert_uint_ge(tier().misses, 2);
}
END_TEST

/* A client computes it again, although it could fetch it. */
START_TEST(what_is_there_is_not_written_again) {
        uint32_t other[BLOCKS * BLOCK_TOKENS];

        write_chain();
        for (uint32_t i = 0; i < 3; i++) {
                evict_all();
                make_chain(tokens);
                evict_some(1);
                make_chain(tokens);
        }
        WAIT_UNTIL(tier().records == BLOCKS);
        memcpy(other, tokens, sizeof other);
        other[0]++;
        make_chain(other); /* a wrong write would come before this one */
        WAIT_UNTIL(tier().records == 2 * BLOCKS &&
                   tier().written_bytes >= 2 * BLOCKS * (uint64_t)RECORD_BYTES);
        ck_assert_uint_eq(tier().written_bytes, 2 * BLOCKS * (uint64_t)RECORD_BYTES);
        evict_all();
        expect_all_of(tokens);
}
END_TEST

START_TEST(evict_to_file_takes_all) {
        depth = "daemon.file_depth=1000000000";
        restart(false);
        make_chain(tokens);
        ck_assert_uint_eq(peer_ok(watcher, MSG(evict, .space = kvd_slice_of("s"), .to = 1))
                                  .evict_reply.more,
                          1);
        WAIT_UNTIL(!peer_ok(watcher, MSG(evict, .space = kvd_slice_of("s"), .to = 2))
                            .evict_reply.more);
        ck_assert_uint_eq(tier().records, BLOCKS);
        evict_all();
        expect_all_of(tokens);
}
END_TEST

START_TEST(deleted_is_deleted) {
        write_chain();
        peer_ok(watcher, MSG(space_delete, .space = kvd_slice_of("s"), .force = 1));
        WAIT_UNTIL(is_erased());
        restart(true);
        WAIT_UNTIL(below(tokens) == 0);
        ck_assert_int_eq(fetch(tokens), 0);
        ck_assert_uint_eq(tier().records, 0);
}
END_TEST

/* The space was causal before, and its chain's salt was the hash that names the prefix. */
START_TEST(a_space_of_another_kind_is_another_one) {
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};
        uint32_t n = 0;

        n_tokens = TOKENS;
        kind = KVD_CAUSAL;
        restart(false);
        pin.salt = kvd_hint_root(tokens, n_tokens);
        for (int r; n < BLOCKS; n += (uint32_t)r) {
                r = kvd_alloc(space, BLOCKS - n, blocks + n);
                ck_assert_int_gt(r, 0);
        }
        for (uint32_t i = 0; i < BLOCKS; i++)
                memset(blocks[i].data, 1, BLOCK_BYTES);
        ck_assert_int_eq(kvd_seal(space, &pin, n, blocks, tokens, n_tokens), (int)n);
        kvd_unpin(space, &pin);
        WAIT_UNTIL(tier().written_bytes >= BLOCKS * (uint64_t)RECORD_BYTES);
        kind = KVD_BIDIRECTIONAL;
        restart(false);
        WAIT_UNTIL(below(tokens) == 0);
        ck_assert_int_eq(fetch(tokens), 0);
        ck_assert_uint_eq(tier().records, BLOCKS);
}
END_TEST

/* ---- prefixes with equal hashes -------------------------------------------------------------- */

/*
 * A block is one stripe of XXH3. If the low word of a lane equals that of the secret, the lane's
 * product is 0, whatever its high word is. XXH3 also adds up the lanes, so two of them are changed
 * without changing their sum.
 */
static void make_alike(uint32_t *of, uint32_t i) {
        for (uint32_t block = 2; block < 4; block++) {
                uint32_t *lane = of + block * BLOCK_TOKENS, low;

                memcpy(&low, XXH3_kSecret + 8 * block, sizeof low);
                lane[0] = low;
                lane[1] = block == 2 ? 500 + i : 700 - i;
        }
}

START_TEST(prefixes_with_one_hash_are_strangers) {
        uint32_t alike[4][TOKENS], there = 0;

        for (uint32_t i = 0; i < 4; i++) {
                memcpy(alike[i], tokens, sizeof alike[i]);
                make_alike(alike[i], i);
                ck_assert_uint_eq(kvd_hint_root(alike[i], TOKENS), kvd_hint_root(alike[0], TOKENS));
                make_chain(alike[i]);
                WAIT_UNTIL(tier().written_bytes >= (i + 1) * BLOCKS * (uint64_t)RECORD_BYTES);
        }
        for (uint32_t round = 0; round < 2; round++) {
                evict_all();
                for (uint32_t i = 0; i < 4; i++) {
                        fetch(alike[i]);
                        there += resident(alike[i]) == BLOCKS;
                }
                restart(round);
        }
        ck_assert_uint_ge(there, 2); /* the last one each time; never another's bytes */
}
END_TEST

SUITE("whole", FIXTURE(start_whole, stop), LOOPS(2, warm_after_a_restart),
      TESTS(a_prefix_comes_back_whole, no_room_for_its_blocks_is_no_hint, others_are_not_there,
            prefixes_that_begin_alike_share_nothing, remains_are_not_found_and_evicted,
            rot_is_a_miss_of_all, what_is_there_is_not_written_again, evict_to_file_takes_all,
            deleted_is_deleted, a_space_of_another_kind_is_another_one),
      CASE("opaque"), FIXTURE(start_opaque, stop), TESTS(prefixes_with_one_hash_are_strangers))
