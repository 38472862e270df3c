/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_SUITE_H
#define KVD_TESTS_LIB_SUITE_H

/*
 * Makes main() of a test program from a list of its tests:
 *
 *      SUITE("serve",
 *            FIXTURE(set_up, tear_down),
 *            LOOPS(2, attach, leases),
 *            TESTS(tenants, private_is_private))
 *
 * SUITE's arguments are expressions, evaluated in their order before the first test runs; argc and
 * argv can be used in them. Each test runs in a process of its own; with CK_FORK=no all of them run
 * in this one (for debuggers), and CK_RUN_CASE=NAME runs one case. A test that hangs is ended after
 * LIMIT_S seconds, or by the runner before that.
 */

#include <signal.h>
#include <stdlib.h>

#include "tests/lib/mark.h"

#define LIMIT_S 1200
#define EXIT_SKIPPED 77

struct suite {
        Suite *all;
        TCase *now; /* the case that tests are added to */
};

static inline void suite_case(struct suite *s, const char *name) {
        s->now = tcase_create(name);
        tcase_set_timeout(s->now, LIMIT_S);
        suite_add_tcase(s->all, s->now);
}

static inline struct suite suite_begin(const char *name) {
        struct suite s = {.all = suite_create(name)};

        suite_case(&s, name);
        return s;
}

static inline void suite_add(struct suite *s, int signal, int end, const TTest *const *tests) {
        for (; *tests; tests++)
                tcase_add_loop_test_raise_signal(s->now, *tests, signal, 0, end);
}

static inline int suite_run(struct suite *s) {
        SRunner *runner = srunner_create(s->all);
        int failed;

        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed > 0;
}

#define SUITE(name, ...) \
        int main(int argc, char **argv) { \
                struct suite suite_ = suite_begin(name); \
                (void)argc, (void)argv; \
                __VA_ARGS__; \
                return suite_run(&suite_); \
        }

#define TESTS(...) RAISES(0, 1, __VA_ARGS__)    /* each once */
#define LOOPS(n, ...) RAISES(0, n, __VA_ARGS__) /* each n times, with _i from 0 to n - 1 */
#define RAISES(signal, n, ...) \
        suite_add(&suite_, signal, (int)(n), (const TTest *const[]){__VA_ARGS__, NULL})
#define CASE(name) suite_case(&suite_, name) /* for other fixtures from here on */
#define FIXTURE(before, after) tcase_add_checked_fixture(suite_.now, before, after)
#define WHEN(condition, ...) ((condition) ? (__VA_ARGS__) : (void)0)
#define SKIP_IF(condition) ((condition) ? exit(EXIT_SKIPPED) : (void)0)

#endif
