/* SPDX-License-Identifier: Apache-2.0 */

/* Lifelines: when each reading end reports that the writing end is closed. */

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/lifeline.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/suite.h"

static int reading, writing, again;

static void set_up(void) {
        ck_assert_int_eq(lifeline_new(&reading, &writing), 0);
        again = lifeline_reopen(reading);
        ck_assert_int_ge(again, 0);
}

static void tear_down(void) {
        close(reading);
        close(again);
}

static void expect_cut(bool cut) {
        ck_assert(sys_is_readable(reading) == cut);
        ck_assert(sys_is_readable(again) == cut);
}

/* The two reading ends are separate open files: a flag of one does not affect the other. */
START_TEST(both_reading_ends_tell_and_are_two_files) {
        ck_assert_int_eq(fcntl(again, F_SETFL, 0), 0);
        ck_assert_int_ne(fcntl(reading, F_GETFL) & O_NONBLOCK, 0);
        expect_cut(false);
        close(writing);
        expect_cut(true);
}
END_TEST

START_TEST(a_child_has_it_too) {
        int go[2];
        pid_t pid;
        char byte;

        ck_assert_int_eq(pipe(go), 0);
        pid = fork();
        if (pid == 0) {
                close(go[1]);
                _exit(read(go[0], &byte, 1) != 0);
        }
        close(writing);
        expect_cut(false);
        close(go[1]);
        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
        expect_cut(true);
}
END_TEST

START_TEST(it_does_not_outlive_another_program) {
        ck_assert_int_ne(fcntl(writing, F_GETFD) & FD_CLOEXEC, 0);
        close(writing);
}
END_TEST

START_TEST(it_may_be_cut_before_a_gpu_has_stopped) {
        _cleanup_(closep) int pidfd = sys->pidfd_open(getpid());

        ck_assert_uint_eq(lifeline_delay_ns(pidfd), 0);
        ck_assert_uint_gt(lifeline_delay_ns(reading), 0);
        ck_assert_uint_eq(lifeline_delay_ns(again), lifeline_delay_ns(reading));
        close(writing);
}
END_TEST

SUITE("lifeline", FIXTURE(set_up, tear_down),
      TESTS(both_reading_ends_tell_and_are_two_files, a_child_has_it_too,
            it_does_not_outlive_another_program, it_may_be_cut_before_a_gpu_has_stopped))
