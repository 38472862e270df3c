/* SPDX-License-Identifier: Apache-2.0 */

/*
 * CONTRIBUTING.md says how another method is added. This adds one by its rows in the table of
 * methods (ipc/base/methods.def in this folder) and the files that they name (sixth.c, job_sixth.c),
 * and changes no other file.
 */

#include <errno.h>

#include "ipc/base/settings.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"
#include "tests/store/sixth/sixth.h"

START_TEST(its_rows_are_all_that_a_method_needs) {
        struct sequence_report report;
        struct attachment *a;
        struct space *space;
        static struct table t;

        fixture_open(64, 64);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        table_open(&t, a, 32, true);
        ck_assert_int_eq(table_append(&t, 12 * BT, 10), 0);
        ck_assert_uint_eq(work(), 0); /* all methods are off */

        /* settings, with profiles */
        ck_assert_int_eq(space_set(space, "sixth.most", "101"), -EINVAL);
        ck_assert_double_eq(setting(space, KVD_sixth_most), 8);
        set(space, "sixth.profile", "paper");
        ck_assert_double_eq(setting(space, KVD_sixth_most), 1);
        set(space, "sixth.profile", "serve");

        /* its kind of jobs, behind those of the others */
        for (uint32_t kind = KVD_JOB_SUMMARISE; kind <= KVD_JOB_SIXTH; kind++)
                ck_assert(sixth_is_known(kind));
        ck_assert(!sixth_is_known(KVD_JOB_SIXTH + 1));

        /* its part is told, and its job is done; summaries are made because it reads them */
        set(space, "sixth", "on");
        sequence_report(a, t.number, &report);
        ck_assert(report.pending);
        while (sixth_seen == 0) {
                static const uint32_t results[KVD_JOB_ITEMS];

                ck_assert(worker_take());
                if (worker_job->kind == KVD_JOB_SIXTH)
                        worker_answer(results, worker_job->n_items * sizeof *results);
                else
                        worker_do();
        }
        ck_assert_uint_eq(sixth_seen, 8);
        while (idle(), work())
                ;
        ck_assert_uint_eq(counter(space, KVD_SPACE_SUMMARISED), 12);
        sequence_report(a, t.number, &report);
        ck_assert(!report.pending);
        check_clean(space);
        table_close(&t);
        idle();
        fixture_close();
}
END_TEST

SUITE("sixth", TESTS(its_rows_are_all_that_a_method_needs))
