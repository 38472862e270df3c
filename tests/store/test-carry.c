/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks are carried between a pool on a GPU and a tier below it through places of copies. Such
 * places are reserved, whatever copies and sketches of the methods need, and given back in pieces.
 */

#include <errno.h>
#include <stdio.h>

#include "store/below/carry.h"
#include "store/below/place.h"
#include "store/file_tier.h"
#include "store/sequence/sequence.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define PIECE (UINT64_C(2) << 20)

static struct carry carry = {.most = STORE_CARRY_BYTES};

/* A space with blocks of 64 KiB. */
static struct space *large_space(const char *name) {
        struct space_spec spec = {.geometry = {.layers = 32,
                                               .kv_heads = 1,
                                               .head_dim = 64,
                                               .block_tokens = BT,
                                               .dtype = KVD_F32,
                                               .vocab = 100000},
                                  .options = {.max_blocks = 64}};
        struct space *space;
        bool created;

        snprintf(spec.name, sizeof spec.name, "%s", name);
        ck_assert_msg(space_open(domain, &spec, true, &space, &created) == 0, "%s",
                      store_why(store));
        return space;
}

/* Takes up to n places. Returns how many. */
static uint32_t take(struct space *space, uint32_t n) {
        uint32_t got = 0;

        carry_begin(&carry, space);
        for (; got < n && carry_has_room(&carry, space); got++) {
                carry_add(&carry, KVD_ROOT);
                ck_assert_int_eq(carry.items[got].error, 0);
        }
        return got;
}

static uint32_t copies_as_many_as_there_can_be(struct space *space) {
        uint32_t n = 0;

        while (copy_take(space) != KVD_NOWHERE)
                n++;
        return n;
}

/* Once, all were given back in one turn of the loop if the next question was another space's. */
START_TEST(what_is_spare_goes_a_piece_at_a_time) {
        struct space *a, *b;
        uint32_t pieces = 0;

        fixture_open(1 << 17, 1 << 17);
        a = large_space("a");
        b = large_space("b");
        carry_open(&carry, store);
        ck_assert_uint_eq(take(a, CARRY_MOST), CARRY_MOST);
        carry_end(&carry);
        ck_assert_uint_eq(carry.n_spare, STORE_CARRY_BYTES >> 16);
        ck_assert(carry_may_begin(&carry, a));
        for (; !carry_may_begin(&carry, b); pieces++) {
                uint32_t before = carry.n_spare;

                carry_shrink(&carry);
                ck_assert_uint_le((uint64_t)(before - carry.n_spare) << 16, PIECE);
        }
        ck_assert_uint_eq(pieces, STORE_CARRY_BYTES / PIECE);
        ck_assert_uint_eq(usage_of(a).copy_bytes, 0);
        ck_assert_uint_eq(take(b, 1), 1);
        carry_end(&carry);
        carry_close(&carry, store);
        fixture_close();
}
END_TEST

/* Once, copies took all places, and no block could be carried to the file or back. */
START_TEST(copies_leave_what_is_needed_on_the_way) {
        uint32_t all, n, m, places = (uint32_t)(_i ? 64 : 1024); /* few places, or little memory */
        struct space *space;

        fixture_open(64, places);
        space = fixture_space("s", _i ? 64 : 8);
        all = kvd_places(space_index(space));
        ck_assert_uint_eq(all, 64);
        carry_open(&carry, store);
        n = copies_as_many_as_there_can_be(space);
        ck_assert_uint_ge(n, all / 4);
        ck_assert(_i == 0 || !carry_spares(space, BLOCK_BYTES));
        m = take(space, CARRY_MOST);
        ck_assert_uint_ge(m, all / 8);
        ck_assert_uint_eq(copies_as_many_as_there_can_be(space), 0);
        carry_end(&carry);
        ck_assert_uint_eq(carry.n_spare, m);
        ck_assert_uint_eq(copies_as_many_as_there_can_be(space), 0);
        ck_assert_uint_eq(take(space, CARRY_MOST), m);
        carry_end(&carry);
        while (carry_shrink(&carry))
                ;
        ck_assert_uint_eq(copies_as_many_as_there_can_be(space), 0);
        carry_close(&carry, store);
        ck_assert_uint_eq(copies_as_many_as_there_can_be(space), m); /* no tier is left */
        fixture_close();
}
END_TEST

/* A file and servers together reserve half. */
START_TEST(half_is_left_for_copies) {
        struct carry second = {.most = STORE_CARRY_BYTES};
        struct space *space;
        uint32_t one, all;

        fixture_open(64, 256);
        space = fixture_space("s", 64);
        carry_open(&carry, store);
        one = copies_as_many_as_there_can_be(space);
        ck_assert_uint_ge(one, 64);
        for (uint32_t i = 0; i < one; i++)
                place_erase(space, i); /* places are numbered from 0 */
        carry_open(&second, store);
        ck_assert_uint_eq(copies_as_many_as_there_can_be(space), one);
        carry_close(&second, store);
        carry_close(&carry, store);
        all = one + copies_as_many_as_there_can_be(space);
        ck_assert_uint_ge(all, one * 3 / 2);
        fixture_close();
}
END_TEST

/*
 * Copies of space a were evicted for blocks of space b, and their places were reserved for a, whose
 * turn was over. So b's question could not begin.
 */
START_TEST(what_was_anothers_is_not_kept) {
        struct space *a, *b;

        fixture_open(1 << 17, 1 << 17);
        a = large_space("a");
        b = large_space("b");
        carry_open(&carry, store);
        ck_assert(carry_may_begin(&carry, a));
        ck_assert_uint_eq(take(a, 1), 1);
        carry_take_back(&carry, a, carry_give(&carry, 0));
        ck_assert_uint_eq(carry.n_spare, 1);
        carry_end(&carry);
        ck_assert_uint_eq(take(a, 1), 1);
        carry.items[0].place = carry_give(&carry, 0); /* it remains as a copy */
        ck_assert_uint_eq(carry.n_spare, 0);
        carry.n = 0;
        ck_assert(carry_may_begin(&carry, b));
        carry_take_back(&carry, a, carry.items[0].place);
        ck_assert_uint_eq(carry.n_spare, 0);
        ck_assert_uint_eq(usage_of(a).copy_bytes, 0);
        ck_assert_uint_eq(take(b, 1), 1);
        carry_end(&carry);
        carry_close(&carry, store);
        fixture_close();
}
END_TEST

/* A block that got no place is not carried, so no request may be sent for all of them. */
START_TEST(a_carry_that_lacks_a_block_is_not_whole) {
        struct space *space;
        uint32_t n;

        fixture_open(64, 64);
        space = fixture_space("s", 64);
        carry_open(&carry, store);
        n = take(space, CARRY_MOST - 1);
        ck_assert_uint_gt(n, 0);
        ck_assert(carry_is_whole(&carry));
        carry_add(&carry, KVD_ROOT);
        ck_assert_int_eq(carry.items[n].error, -ENOSPC);
        ck_assert(!carry_is_whole(&carry));
        carry_end(&carry);
        carry_close(&carry, store);
        fixture_close();
}
END_TEST

SUITE("carry",
      TESTS(what_is_spare_goes_a_piece_at_a_time, half_is_left_for_copies,
            what_was_anothers_is_not_kept, a_carry_that_lacks_a_block_is_not_whole),
      LOOPS(2, copies_leave_what_is_needed_on_the_way))
