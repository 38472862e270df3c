/* SPDX-License-Identifier: Apache-2.0 */

/* The order in which connections are served. The test sets both clocks: users pay for CPU time. */

#include <stdlib.h>

#include "daemon/serve/turns.h"
#include "ipc/base/sys.h"
#include "tests/lib/suite.h"

struct connection {
        struct turns_place place;
        uint64_t cost_ns;      /* CPU time, of one request */
        uint64_t lost_ns;      /* time in which it is preempted, of one request */
        uint32_t left, served; /* requests */
};

static struct kvd_sys replaced;
static struct turns turns;
static uint64_t clock_now, cpu_now;

static int tell_time(uint64_t *ret) {
        *ret = clock_now;
        return 0;
}

static int tell_cpu(uint64_t *ret) {
        *ret = cpu_now;
        return 0;
}

static bool serve(struct turns_place *place) {
        struct connection *c = container_of(place, struct connection, place);

        clock_now += c->cost_ns + c->lost_ns;
        cpu_now += c->cost_ns;
        c->served++;
        return --c->left > 0;
}

static void set_up(void) {
        replaced = *sys;
        replaced.clock_ns = tell_time;
        replaced.cpu_ns = tell_cpu;
        sys = &replaced;
        turns = (struct turns){.serve = serve};
        clock_now = cpu_now = 1;
}

static void tear_down(void) {
        sys = &kvd_sys_real;
}

static void begin(struct connection *c, struct turns_user *user, uint64_t cost_ns, uint32_t n) {
        *c = (struct connection){.place.user = user, .cost_ns = cost_ns, .left = n};
        turns_add(&turns, &c->place);
}

static void run_until(const struct connection *c, uint32_t served) {
        while (c->served < served)
                turns_run(&turns);
}

/* 200 connections of one user and one of another: each user gets every second request. */
START_TEST(a_user_with_many_connections_has_one_share) {
        static struct connection flood[200], victim;
        struct turns_user bad = {0}, good = {0};
        uint32_t served = 0;

        for (uint32_t i = 0; i < 200; i++)
                begin(&flood[i], &bad, 10000, 1000);
        begin(&victim, &good, 10000, 1000);
        run_until(&victim, 1000);
        for (uint32_t i = 0; i < 200; i++) {
                served += flood[i].served;
                ck_assert_uint_le(flood[i].served, 1000 / 200 + 2); /* they take turns as well */
        }
        ck_assert_uint_le(served, 1000 + 20);
}
END_TEST

/* Users get equal shares of time, not equal numbers of requests. */
START_TEST(costly_requests_are_served_less) {
        struct turns_user bad = {0}, good = {0};
        struct connection dear, cheap;

        begin(&dear, &bad, 1000000, 100000);
        begin(&cheap, &good, 10000, 100000);
        run_until(&dear, 50);
        ck_assert_uint_ge(cheap.served, 49 * 100);
        ck_assert_uint_le(cheap.served, 51 * 100 + 20);
}
END_TEST

/* Each request of one user is preempted, as when its reply wakes the client. */
START_TEST(a_preempted_user_does_not_pay_for_it) {
        struct turns_user first = {0}, second = {0};
        struct connection loses, keeps;

        begin(&loses, &first, 10000, 1000);
        begin(&keeps, &second, 10000, 100000);
        loses.lost_ns = 4000000;
        run_until(&loses, 1000);
        ck_assert_uint_ge(keeps.served, 980);
        ck_assert_uint_le(keeps.served, 1020);
}
END_TEST

/*
 * The CPU clock is not read while one user is alone. Its last request is charged TURNS_MOST_NS at
 * most.
 */
START_TEST(a_user_preempted_alone_pays_for_one_request) {
        struct turns_user first = {0}, second = {0};
        struct connection loses, keeps;

        begin(&loses, &first, 10000, 1000);
        loses.lost_ns = UINT64_C(1000000000);
        run_until(&loses, 3);
        loses.lost_ns = 0;
        begin(&keeps, &second, 10000, 100000);
        run_until(&loses, 4);
        ck_assert_uint_le(keeps.served, TURNS_MOST_NS / 10000 + 20);
}
END_TEST

/* Between two polls of the sockets, requests are served for one slice, plus one request at most. */
START_TEST(a_slice_ends) {
        struct turns_user user = {0};
        struct connection c;

        begin(&c, &user, TURNS_SLICE_NS / 10, 1000);
        ck_assert(turns_run(&turns));
        ck_assert_uint_eq(c.served, 10);
        c.cost_ns = 10 * TURNS_SLICE_NS;
        ck_assert(turns_run(&turns));
        ck_assert_uint_eq(c.served, 11);
}
END_TEST

/* A user that was away is served next, but gets no credit for the time away. */
START_TEST(no_user_saves_up) {
        struct turns_user first = {0}, second = {0};
        struct connection a, b;

        begin(&a, &first, 10000, 100000);
        run_until(&a, 5000);
        begin(&b, &second, 10000, 1000);
        run_until(&b, 1);
        ck_assert_uint_le(a.served, 5000 + 20);
        run_until(&b, 500);
        ck_assert_uint_ge(a.served, 5000 + 490);
}
END_TEST

/* The cost of accepting or closing a connection is charged as a request's is. */
START_TEST(work_is_charged) {
        struct turns_user first = {0}, second = {0};
        struct connection a, b;

        begin(&a, &first, 10000, 100000);
        begin(&b, &second, 10000, 100000);
        turns_charge(&turns, &first, 10000 * 100);
        run_until(&a, 1);
        ck_assert_uint_ge(b.served, 100);
}
END_TEST

START_TEST(a_removed_one_is_not_served) {
        struct turns_user first = {0}, second = {0};
        struct connection a, b;

        begin(&a, &first, 10000, 10);
        begin(&b, &second, 10000, 10);
        turns_add(&turns, &a.place); /* it is queued already */
        turns_remove(&turns, &a.place);
        turns_remove(&turns, &a.place);
        while (turns_run(&turns))
                ;
        ck_assert_uint_eq(a.served, 0);
        ck_assert_uint_eq(b.served, 10);
        ck_assert(!turns_wanted(&turns));
}
END_TEST

SUITE("turns", FIXTURE(set_up, tear_down),
      TESTS(a_user_with_many_connections_has_one_share, costly_requests_are_served_less,
            a_preempted_user_does_not_pay_for_it, a_user_preempted_alone_pays_for_one_request,
            a_slice_ends, no_user_saves_up, work_is_charged, a_removed_one_is_not_served))
