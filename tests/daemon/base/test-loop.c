/* SPDX-License-Identifier: Apache-2.0 */

/* The loop with epoll and with io_uring, which must behave alike. */

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "daemon/base/loop.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

static const enum loop_kind kinds[] = {LOOP_EPOLL, LOOP_IO_URING};

static struct loop *loop;
static int ends[2];
static unsigned calls, idles;
static struct loop_source source, other;
static struct loop_timer timer, later;

/* false: this machine forbids io_uring, so the test is skipped. */
static bool open_loop(int kind) {
        int r = loop_new(kinds[kind], 4, &loop);

        if (r < 0 && kinds[kind] == LOOP_IO_URING)
                return false;
        ck_assert_int_eq(r, 0);
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends), 0);
        calls = idles = 0;
        return true;
}

static void close_loop(void) {
        loop_remove(&source);
        loop_remove(&other);
        loop = loop_free(loop);
        close(ends[0]);
        close(ends[1]);
}

static void put(int n) {
        for (int i = 0; i < n; i++)
                ck_assert_int_eq(write(ends[0], "x", 1), 1);
}

static void run(void) {
        ck_assert_int_eq(loop_run(loop), 0);
}

static void quit(struct loop_timer *t) {
        loop_quit(loop);
}

static void add(struct loop_source *s, int fd, short events,
                void (*ready)(struct loop_source *, short)) {
        *s = (struct loop_source){.fd = fd, .events = events, .ready = ready};
        ck_assert_int_eq(loop_add(loop, s), 0);
}

/* ---- sources --------------------------------------------------------------------------------- */

static void take_one(struct loop_source *s, short revents) {
        char c;

        ck_assert(revents & POLLIN);
        ck_assert_int_eq(read(s->fd, &c, 1), 1);
        if (++calls == 5)
                loop_quit(s->loop);
}

START_TEST(what_is_left_is_reported_again) {
        if (!open_loop(_i))
                return;
        put(5);
        add(&source, ends[1], POLLIN, take_one);
        run();
        ck_assert_uint_eq(calls, 5);
        close_loop();
}
END_TEST

static void remove_both(struct loop_source *s, short revents) {
        calls++;
        loop_remove(&source);
        loop_remove(&other);
}

/* Both are ready in the same turn. The first callback removes both, so the second is not called. */
START_TEST(removed_by_another) {
        if (!open_loop(_i))
                return;
        put(1);
        add(&source, ends[1], POLLIN, remove_both);
        add(&other, ends[1] = dup(ends[1]), POLLIN, remove_both);
        timer.fire = quit;
        loop_timer_set(loop, &timer, sys_now_ns() + 20000000);
        run();
        ck_assert_uint_eq(calls, 1);
        close_loop();
}
END_TEST

static void replace(struct loop_source *s, short revents) {
        calls++;
        loop_remove(s);
        if (calls < 3)
                add(s, ends[1], POLLIN, replace);
        else
                loop_quit(loop);
}

START_TEST(replaced_in_its_own_callback) {
        if (!open_loop(_i))
                return;
        put(1);
        add(&source, ends[1], POLLIN, replace);
        run();
        ck_assert_uint_eq(calls, 3);
        close_loop();
}
END_TEST

static void alternate(struct loop_source *s, short revents) {
        ck_assert(revents & s->events);
        if (++calls == 6)
                loop_quit(s->loop);
        ck_assert_int_eq(loop_change(s, s->events == POLLIN ? POLLOUT : POLLIN), 0);
}

START_TEST(changed_in_its_own_callback) {
        if (!open_loop(_i))
                return;
        put(1);
        add(&source, ends[1], POLLIN, alternate);
        run();
        ck_assert_uint_eq(calls, 6);
        close_loop();
}
END_TEST

static void change_other(struct loop_timer *t) {
        ck_assert_int_eq(loop_change(&source, POLLOUT), 0);
}

static void writable(struct loop_source *s, short revents) {
        ck_assert_int_eq(revents, POLLOUT);
        calls++;
        loop_quit(s->loop);
}

START_TEST(changed_while_waiting) {
        if (!open_loop(_i))
                return;
        add(&source, ends[1], POLLIN, writable);
        timer.fire = change_other;
        loop_timer_set(loop, &timer, sys_now_ns() + 5000000);
        run();
        ck_assert_uint_eq(calls, 1);
        close_loop();
}
END_TEST

static void end_seen(struct loop_source *s, short revents) {
        ck_assert(revents & POLLHUP);
        calls++;
        loop_quit(s->loop);
}

START_TEST(the_end_of_a_connection) {
        if (!open_loop(_i))
                return;
        add(&source, ends[1], POLLIN, end_seen);
        close(ends[0]);
        run();
        ck_assert_uint_eq(calls, 1);
        close_loop();
}
END_TEST

static void run_for_a_millisecond(void) {
        timer.fire = quit;
        loop_timer_set(loop, &timer, sys_now_ns() + 1000000);
        run();
}

/* The poll of a removed source must not keep the file open: the peer would never see its end. */
START_TEST(removal_lets_go_of_the_file) {
        struct pollfd p;

        if (!open_loop(_i))
                return;
        add(&source, ends[1], POLLIN, end_seen);
        run_for_a_millisecond();
        loop_remove(&source);
        close(ends[1]);
        run_for_a_millisecond();
        p = (struct pollfd){ends[0], POLLIN, 0};
        ck_assert_int_eq(poll(&p, 1, PATIENCE_MS), 1);
        ck_assert(p.revents & POLLHUP);
        ends[1] = dup(ends[0]);
        close_loop();
}
END_TEST

START_TEST(there_is_a_limit) {
        struct loop_source many[5];

        if (!open_loop(_i))
                return;
        for (int i = 0; i < 4; i++)
                add(&many[i], dup(ends[1]), POLLIN, end_seen);
        many[4] = (struct loop_source){.fd = ends[1], .events = POLLIN, .ready = end_seen};
        ck_assert_int_eq(loop_add(loop, &many[4]), -ENOSPC);
        for (int i = 0; i < 4; i++) {
                loop_remove(&many[i]);
                close(many[i].fd);
        }
        add(&source, ends[1], POLLIN, end_seen);
        close_loop();
}
END_TEST

/* ---- time ------------------------------------------------------------------------------------ */

static uint64_t fired_ns[2];

static void note_first(struct loop_timer *t) {
        fired_ns[0] = sys_now_ns();
}

static void note_second(struct loop_timer *t) {
        fired_ns[1] = sys_now_ns();
        loop_quit(loop);
}

START_TEST(timers_in_order) {
        uint64_t now = sys_now_ns();

        if (!open_loop(_i))
                return;
        timer.fire = note_first;
        later.fire = note_second;
        loop_timer_set(loop, &later, now + 30000000);
        loop_timer_set(loop, &timer, now + 60000000);
        loop_timer_set(loop, &timer, now + 10000000); /* moved to the front */
        run();
        ck_assert_uint_ge(fired_ns[0], now + 10000000);
        ck_assert_uint_lt(fired_ns[0], fired_ns[1]);
        ck_assert_uint_ge(fired_ns[1], now + 30000000);
        close_loop();
}
END_TEST

static unsigned fired;

static void set_again(struct loop_timer *t) {
        if (++fired == 1)
                put(5);
        if (fired == 1000)
                loop_quit(loop);
        else
                loop_timer_set(loop, t, 0);
}

/* A timer fires once a turn, even if it is set to a time that has passed. */
START_TEST(a_timer_that_sets_itself_lets_others_come) {
        if (!open_loop(_i))
                return;
        fired = 0;
        calls = 0;
        add(&source, ends[1], POLLIN, take_one);
        timer.fire = set_again;
        loop_timer_set(loop, &timer, 0);
        run();
        ck_assert_uint_eq(calls, 5);
        ck_assert_uint_lt(fired, 1000);
        loop_timer_stop(&timer);
        close_loop();
}
END_TEST

START_TEST(a_stopped_timer_is_silent) {
        if (!open_loop(_i))
                return;
        timer.fire = note_first;
        later.fire = note_second;
        fired_ns[0] = 0;
        loop_timer_set(loop, &timer, sys_now_ns() + 1000000);
        loop_timer_set(loop, &later, sys_now_ns() + 5000000);
        loop_timer_stop(&timer);
        run();
        ck_assert_uint_eq(fired_ns[0], 0);
        close_loop();
}
END_TEST

/* ---- idle ------------------------------------------------------------------------------------ */

#define IDLES 3u

/*
 * Replaces the clock, so that a busy machine changes nothing. While there is idle work, a reading
 * adds 1 us: the timer does not fire, and idle work is not overdue. Later readings add 20 ms, so
 * that the timer fires and ends the test.
 */
static int tell_time(uint64_t *ret) {
        static uint64_t ns;

        ns += idles < IDLES ? 1000 : 20000000;
        *ret = ns;
        return 0;
}

static bool idle(void *data) {
        ck_assert_uint_eq(calls, 5); /* never while a source is ready */
        return ++idles < IDLES;
}

static void take_quietly(struct loop_source *s, short revents) {
        char c;

        ck_assert_int_eq(read(s->fd, &c, 1), 1);
        calls++;
}

START_TEST(idle_work_waits_for_silence) {
        struct kvd_sys replaced = *sys;

        if (!open_loop(_i))
                return;
        replaced.clock_ns = tell_time;
        sys = &replaced;
        put(5);
        add(&source, ends[1], POLLIN, take_quietly);
        loop_set_idle(loop, idle, NULL);
        loop_want_idle(loop);
        timer.fire = quit;
        loop_timer_set(loop, &timer, sys_now_ns() + 20000000);
        run();
        ck_assert_uint_eq(idles, IDLES);
        close_loop();
        sys = &kvd_sys_real;
}
END_TEST

static bool more_to_do(void *data) {
        usleep(1000);
        return ++idles < 20;
}

static void never_quiet(struct loop_source *s, short revents) {
        if (++calls % 100 == 0)
                usleep(200);
}

/* A source that is always ready does not starve idle work. */
START_TEST(idle_work_has_its_share_of_a_flood) {
        if (!open_loop(_i))
                return;
        put(1);
        add(&source, ends[1], POLLIN, never_quiet);
        loop_set_idle(loop, more_to_do, NULL);
        loop_want_idle(loop);
        timer.fire = quit;
        while (idles < 20) {
                loop_timer_set(loop, &timer, sys_now_ns() + 20000000);
                run();
        }
        ck_assert_uint_gt(calls,
                          20 * 10); /* idle work is done between the calls, not before them */
        close_loop();
}
END_TEST

static bool work(void *data) {
        loop_release(&source);
        return false;
}

static void wait_for_work(struct loop_source *s, short revents) {
        take_quietly(s, revents);
        loop_hold(s);
}

/* A held source is not called; unread data is reported once it is released. */
START_TEST(a_held_source_waits_for_work) {
        if (!open_loop(_i))
                return;
        put(2);
        add(&source, ends[1], POLLIN, wait_for_work);
        run_for_a_millisecond();
        run_for_a_millisecond();
        ck_assert_uint_eq(calls, 1);
        loop_set_work(loop, work, NULL);
        run_for_a_millisecond();
        run_for_a_millisecond();
        ck_assert_uint_eq(calls, 2);
        close_loop();
}
END_TEST

static void be_slow(struct loop_source *s, short revents) {
        take_quietly(s, revents);
        usleep(20000);
}

START_TEST(a_long_turn_is_measured) {
        if (!open_loop(_i))
                return;
        put(1);
        add(&source, ends[1], POLLIN, be_slow);
        run_for_a_millisecond();
        run_for_a_millisecond();
        ck_assert_uint_ge(loop_turn_max_ns(loop), 20000000);
        ck_assert_uint_eq(loop_turn_recent_ns(loop), loop_turn_max_ns(loop));
        close_loop();
}
END_TEST

SUITE("loop",
      LOOPS(2, what_is_left_is_reported_again, removed_by_another, replaced_in_its_own_callback,
            changed_in_its_own_callback, changed_while_waiting, the_end_of_a_connection,
            removal_lets_go_of_the_file, there_is_a_limit, timers_in_order,
            a_timer_that_sets_itself_lets_others_come, a_stopped_timer_is_silent,
            idle_work_waits_for_silence, idle_work_has_its_share_of_a_flood,
            a_held_source_waits_for_work, a_long_turn_is_measured))
