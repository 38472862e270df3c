/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How many blocks a client can expect from an allocation while pins hold some: a pin on the end of
 * a chain holds all of it, and blocks that several clients hold count once.
 */

#include "store/cache/cache.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define BLOCKS 64u
#define N 7u /* blocks of a chain */

static struct space *space;
static struct attachment *a, *b;
static kvd_ref chain[N];

static void seal_chain(void) {
        uint32_t tokens[N * BT];
        struct seal_request q = {.n_blocks = N,
                                 .blocks = chain,
                                 .n_tokens = N * BT,
                                 .tokens = tokens};

        for (uint32_t i = 0; i < N * BT; i++)
                tokens[i] = 100 + i;
        ck_assert_int_eq(space_allocate(a, N, chain), N);
        ck_assert_int_eq(space_seal(a, &q, chain), 0);
}

static void set_up(void) {
        fixture_open(BLOCKS, 0);
        space = fixture_space("s", BLOCKS);
        a = fixture_attach(space);
        b = fixture_attach(space);
        seal_chain();
}

static void tear_down(void) {
        check_clean(space);
        fixture_close();
}

/* Pins as kvd_lookup does when it found n blocks. sign -1: as kvd_unpin. */
static void pin(struct attachment *by, uint32_t n, int sign) {
        by->words[kvd_ref_id(chain[n - 1])].pins += (uint32_t)sign;
        by->page->held += (uint64_t)(int64_t)(sign * (int)n);
}

/* Checks the figures after the daemon has looked at all pins. */
static void expect(uint32_t held, uint32_t alone_a, uint32_t alone_b) {
        store_look_at_pins(store);
        idle();
        ck_assert_uint_eq(a->page->available, BLOCKS - held);
        ck_assert_uint_eq(b->page->available, BLOCKS - held);
        ck_assert_uint_eq(a->page->held_alone, alone_a);
        ck_assert_uint_eq(b->page->held_alone, alone_b);
        ck_assert_uint_eq(a->page->held_seen, a->page->held);
}

START_TEST(one_pin_holds_the_chain) {
        expect(0, 0, 0);
        pin(a, N, 1);
        expect(N, N, 0);
        pin(a, N - 2, 1); /* in the same chain: holds no more blocks */
        expect(N, N, 0);
        pin(a, N, -1);
        expect(N - 2, N - 2, 0);
        pin(a, N - 2, -1);
        expect(0, 0, 0);
}
END_TEST

START_TEST(what_two_hold_nobody_holds_alone) {
        pin(a, N, 1);
        pin(b, N - 3, 1);
        expect(N, 3, 0);
        pin(b, N, 1);
        expect(N, 0, 0);
        pin(a, N, -1);
        expect(N, 0, N);
        pin(b, N, -1);
        expect(N - 3, 0, N - 3);
        pin(b, N - 3, -1);
        expect(0, 0, 0);
}
END_TEST

/* Otherwise others are promised memory that the space does not have. */
START_TEST(a_segment_that_leaves_during_a_round_is_not_held) {
        struct attachment *other = fixture_attach(fixture_space("other", BLOCKS));
        kvd_ref taken[BLOCKS];

        pin(a, N, 1);
        store_look_at_pins(store);
        ck_assert(available_look(space)); /* has found the chain; b's pins are still to be seen */
        pin(a, N, -1);
        for (uint32_t n = 0; n < BLOCKS;
             n += (uint32_t)space_allocate(other, BLOCKS - n, taken + n))
                ;
        ck_assert_uint_eq(usage_of(space).segments, 0);
        idle();
        check_clean(space);
}
END_TEST

SUITE("available", FIXTURE(set_up, tear_down),
      TESTS(one_pin_holds_the_chain, what_two_hold_nobody_holds_alone,
            a_segment_that_leaves_during_a_round_is_not_held))
