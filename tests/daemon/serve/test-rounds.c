/* SPDX-License-Identifier: Apache-2.0 */

/* When the daemon polls rings, and whose. The test sets the clock and fills the rings. */

#include <string.h>

#include "daemon/serve/client.h"
#include "daemon/serve/rounds.h"
#include "ipc/base/sys.h"
#include "store/cache/cache.h"
#include "tests/lib/suite.h"

enum { CLIENTS = 8, FIRST = 3, USED = 1 << FIRST | 1 };

static struct kvd_sys replaced;
static uint64_t clock_now;
static struct loop *loop;
static struct turns turns;
static struct rounds rounds;
static struct user user;
static struct server server;

static struct one {
        struct client client;
        struct attachment attachment;
        struct kvd_pinpage page;
        uint32_t served;
} all[CLIENTS];

/* Rings have a size for its blocks. */
static struct kvd_index ix = {.geometry.block_tokens = 16};
static struct space space = {.ix = &ix};

static int tell_time(uint64_t *ret) {
        *ret = clock_now;
        return 0;
}

/* Takes posts as client_take_ring does. */
static bool serve(struct turns_place *place) {
        struct client *c = container_of(place, struct client, place);
        struct attachment *a = c->spaces[FIRST].attachment;

        a->posts_taken = atomic_load(&a->page->posted);
        container_of(c, struct one, client)->served++;
        c->rings = 0;
        return false;
}

static void set_up(void) {
        replaced = *sys;
        replaced.clock_ns = tell_time;
        sys = &replaced;
        clock_now = 1000 * ROUND_NS;
        ck_assert_int_eq(loop_new(LOOP_EPOLL, 1, &loop), 0);
        turns = (struct turns){.serve = serve};
        user = (struct user){0};
        rounds_init(&rounds, loop, &turns);
        for (uint32_t i = 0; i < CLIENTS; i++) {
                memset(&all[i], 0, sizeof all[i]);
                all[i].attachment.page = &all[i].page;
                all[i].attachment.space = &space;
                all[i].attachment.filling.n = KVD_POSTS;
                all[i].client.server = &server;
                all[i].client.used = USED;
                all[i].client.place.user = &user.turns;
                all[i].client.spaces[FIRST].attachment = &all[i].attachment;
        }
}

static void tear_down(void) {
        rounds_stop(&rounds);
        loop = loop_free(loop);
        sys = &kvd_sys_real;
}

static void post(uint32_t i, uint32_t n) {
        atomic_fetch_add(&all[i].page.posted, n);
}

/* A wake-up message, after which the daemon takes the posts. */
static void kick(uint32_t i) {
        rounds_kicked(&rounds, &all[i].client);
        if (all[i].client.round.in)
                all[i].client.told |= UINT64_C(1) << FIRST;
        all[i].attachment.posts_taken = atomic_load(&all[i].page.posted);
}

static void begin(uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                kick(i);
        ck_assert(loop_timer_is_set(&rounds.timer));
}

static void next_round(void) {
        ck_assert(loop_timer_is_set(&rounds.timer));
        clock_now += ROUND_NS;
        loop_timer_stop(&rounds.timer);
        rounds.timer.fire(&rounds.timer);
        while (turns_run(&turns))
                ;
}

START_TEST(four_messages_begin_rounds_three_do_not) {
        for (uint32_t i = 0; i < 100; i++) {
                kick(i % CLIENTS);
                if (i % 3 == 2)
                        clock_now += ROUND_NS + 1;
        }
        ck_assert(!loop_timer_is_set(&rounds.timer));
        clock_now += ROUND_NS + 1;
        begin(4);
        ck_assert_ptr_eq(rounds.clients.first, &all[3].client.round); /* the others join later */
        ck_assert_ptr_eq(rounds.clients.last, &all[3].client.round);
        kick(0);
        kick(3);
        ck_assert_ptr_eq(rounds.clients.last, &all[0].client.round);
}
END_TEST

START_TEST(only_posters_get_a_turn) {
        begin(4);
        kick(5);
        post(3, 1);
        next_round();
        ck_assert_uint_eq(all[3].served, 1);
        ck_assert_uint_eq(all[5].served, 0);
        ck_assert_uint_eq(attachment_posts(&all[3].attachment), 0);
        next_round();
        ck_assert_uint_eq(all[3].served, 1);
        post(5, 1); /* a ring whose bit in told is clear is not polled */
        all[5].client.told = 0;
        next_round();
        ck_assert_uint_eq(all[5].served, 0);
}
END_TEST

/*
 * Each round finds four posts, so rounds go on. A client that posts nothing leaves them, and all
 * its rings are polled a last time.
 */
START_TEST(idle_clients_leave) {
        begin(4);
        kick(5);
        kick(6);
        for (uint32_t i = 0; i < 32; i++) {
                post(3, 2);
                post(5, 2);
                next_round();
        }
        ck_assert(all[3].client.round.in && all[5].client.round.in);
        ck_assert(!all[6].client.round.in);
        ck_assert_uint_eq(all[6].client.told, 0);
        ck_assert_uint_eq(all[6].served, 1);
        ck_assert_uint_eq(all[5].served, 32);
}
END_TEST

START_TEST(rounds_end_if_little_is_posted) {
        begin(4);
        kick(5);
        for (uint32_t i = 0; i < 32 && rounds.clients.first; i++) {
                if (i % 2)
                        post(5, 8);
                next_round();
        }
        ck_assert_ptr_null(rounds.clients.first);
        ck_assert(!loop_timer_is_set(&rounds.timer));
        ck_assert_uint_eq(attachment_posts(&all[5].attachment), 0);
        kick(5);
        ck_assert_ptr_null(rounds.clients.first);
}
END_TEST

static void play_rounds(uint32_t posts) {
        begin(4);
        for (uint32_t i = 0; i < 16; i++) {
                post(3, posts);
                next_round();
        }
}

/* A client that waits after each post is not worth rounds: the daemon backs off from polling it. */
START_TEST(waiting_posters_are_not_polled) {
        for (uint64_t rest = 16; rest <= 512; rest *= 2) {
                play_rounds(1);
                ck_assert_ptr_null(rounds.clients.first);
                clock_now += (rest - 1) * ROUND_NS;
                for (uint32_t i = 0; i < CLIENTS; i++)
                        kick(i);
                ck_assert_ptr_null(rounds.clients.first);
                clock_now += 2 * ROUND_NS;
        }
        play_rounds(4);
        ck_assert_ptr_eq(rounds.clients.first, &all[3].client.round);
        rounds_leave(&all[3].client);
        loop_timer_stop(&rounds.timer);
        clock_now += 2 * ROUND_NS;
        play_rounds(1); /* the back-off starts over */
        clock_now += 18 * ROUND_NS;
        begin(4);
}
END_TEST

/* A client that leaves the rounds gets a last turn, for all rings that it uses. */
START_TEST(leaving_polls_all_rings) {
        begin(4);
        for (uint32_t i = 0; i < 15; i++)
                next_round();
        turns.serve = NULL; /* no client is served before the checks below */
        clock_now += ROUND_NS;
        loop_timer_stop(&rounds.timer);
        rounds.timer.fire(&rounds.timer);
        ck_assert(!all[3].client.round.in);
        ck_assert_uint_eq(all[3].client.rings, USED);
        ck_assert(all[3].client.place.node.in);
        turns_remove(&turns, &all[3].client.place);
}
END_TEST

SUITE("rounds", FIXTURE(set_up, tear_down),
      TESTS(four_messages_begin_rounds_three_do_not, only_posters_get_a_turn, idle_clients_leave,
            rounds_end_if_little_is_posted, waiting_posters_are_not_polled,
            leaving_polls_all_rings))
