/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvlm on a GPU while other processes die, the pool is full, or the driver fails: answers are
 * right, or there is one line of error.
 */

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/kvlm/gpu.h"
#include "tests/lib/suite.h"

enum { WAIT_MS = 60000 };

/* The victim is killed while it processes its prompts, later in each round. */
START_TEST(a_killed_process_harms_nobody) {
        const char *argv[] = {kvlm_program,
                              "--model",
                              folder_path("model"),
                              "--socket",
                              scene_socket(),
                              "--document",
                              folder_path("document"),
                              "--prompts",
                              folder_path("prompts"),
                              "--stop",
                              "",
                              "--max-tokens",
                              "40",
                              NULL};
        const char *expected;
        size_t size;

        scene_prompts();
        expected = scene_texts(scene_ask("--no-share", "--device=cuda"));
        scene_daemon();
        for (int round = 0; round < 3; round++) {
                const struct timespec pause = {0, 50000000 + round * 150000000};
                pid_t victim = scene_spawn(argv, "/dev/null"), other;

                nanosleep(&pause, NULL);
                other = scene_ask_in_background("other");
                ck_assert_int_eq(kill(victim, SIGKILL), 0);
                wait_status(victim);
                ck_assert_int_eq(wait_status(other), 0);
                scene_assert_answers((struct output){0, folder_read("other", &size), ""}, expected);
        }
        scene_assert_clean();
}
END_TEST

/* The table begins in the pool and has to leave it, which has only four blocks of 1 MiB. */
START_TEST(a_full_pool_is_not_an_error) {
        static const struct shape wide = {1, 32, 32, 32, 256, 40, 270, true, "F32"};
        const char *names[] = {"shared", "private"};
        const float *logits[2];
        size_t n[2];

        folder_model("wide", &wide, 3);
        scene_daemon_of("daemon.pool=4M", "daemon.segment=2M");
        for (int i = 0; i < 2; i++) {
                struct output o = kvlm("--model", folder_path("wide"), "--socket", scene_socket(),
                                       "--tokens", folder_path("ids"), "--json", "--logits",
                                       folder_path(names[i]), "--device", "cuda", "--chunk", "32",
                                       i == 1 ? "--no-share" : NULL, NULL);

                logits[i] = scene_logits(o, names[i], n + i);
                ck_assert_uint_eq(scene_sum(o.out, "\"refused"), i == 0);
                ck_assert_uint_eq(scene_sum(o.out, "shared_blocks"), 0);
        }
        ck_assert_mem_eq(logits[0], logits[1], n[0] * sizeof(float));
        scene_assert_clean();
}
END_TEST

/* The daemon dies at different times, and is sometimes restarted. */
START_TEST(the_daemons_death_is_not_an_error) {
        const char *expected;

        scene_prompts();
        expected = scene_texts(scene_ask("--no-share", "--device=cuda"));
        for (int round = 0; round < 3; round++) {
                const struct timespec pause = {0, 20000000 + round * 200000000};
                struct output o = {0};
                pid_t pid;
                size_t size;

                scene_daemon();
                pid = scene_ask_in_background("out");
                nanosleep(&pause, NULL);
                scene_end_daemon(SIGKILL);
                if (round % 2)
                        scene_daemon();
                ck_assert_int_eq(wait_status(pid), 0);
                o.out = folder_read("out", &size);
                ck_assert_str_eq(scene_texts(o), expected);
                ck_assert_uint_eq(scene_sum(o.out, "wrong_bytes"), 0);
                if (round % 2)
                        scene_end_daemon(SIGTERM);
        }
}
END_TEST

/* ---- the stand-in driver's faults ---- */

static int calls_in(const char *name, const char *call) {
        size_t size;
        int n = 0;

        if (access(folder_path(name), R_OK) < 0)
                return 0;
        for (const char *at = folder_read(name, &size); (at = strstr(at, call)); at++)
                n++;
        return n;
}

/* The first call is libkvd's probe of what the driver can do. */
static void wait_for_second_call(const char *log, const char *call) {
        const struct timespec pause = {0, 5000000};

        for (int i = 0; calls_in(log, call) < 2; i++) {
                ck_assert_msg(i < WAIT_MS / 5, "nobody called %s", call);
                nanosleep(&pause, NULL);
        }
}

/*
 * Process A seals blocks that its slow stream has not written yet. Process B finds them, and its
 * stream waits. A is killed. B's stream continues when the daemon has dropped the blocks, and B
 * computes everything again, on its own.
 */
START_TEST(who_waits_for_a_dead_producer_begins_anew) {
        const char *argv[] = {kvlm_program,
                              "--model",
                              folder_path("model"),
                              "--socket",
                              scene_socket(),
                              "--tokens",
                              folder_path("ids"),
                              "--chunk",
                              "16",
                              "--max-tokens",
                              "3",
                              NULL};
        const char *expected, *model = folder_path("model"), *ids = folder_path("ids");
        struct output o;
        pid_t victim;
        size_t size;
        pid_t b;

        if (!scene_stand_in())
                return;
        expected = scene_texts(kvlm("--model", model, "--no-share", "--tokens", ids, "--max-tokens",
                                    "3", "--stop", "", "--json", "--device", "cuda", NULL));
        scene_daemon();
        setenv("FAKECUDA_SLOW", "kernel:60000", 1);
        setenv("FAKECUDA_LOG", folder_path("victim"), 1);
        victim = scene_spawn(argv, "/dev/null");
        unsetenv("FAKECUDA_SLOW");
        wait_for_second_call("victim", "cuStreamWriteValue64");
        setenv("FAKECUDA_LOG", folder_path("reader"), 1);
        b = fork();
        ck_assert_int_ge(b, 0);
        if (b == 0) {
                o = kvlm("--model", model, "--socket", scene_socket(), "--tokens", ids,
                         "--max-tokens", "3", "--stop", "", "--json", NULL);
                folder_write_text("answer", o.out);
                _exit(o.status);
        }
        wait_for_second_call("reader", "cuStreamWaitValue64");
        ck_assert_int_eq(kill(victim, SIGKILL), 0);
        wait_status(victim);
        ck_assert_int_eq(wait_status(b), 0);
        o = (struct output){0, folder_read("answer", &size), ""};
        ck_assert_str_eq(scene_texts(o), expected);
        ck_assert_uint_eq(scene_sum(o.out, "\"refused"), 1);
        ck_assert_uint_eq(scene_sum(o.out, "reused_tokens"), 0);
        unsetenv("FAKECUDA_LOG");
        scene_assert_clean();
}
END_TEST

/* Each call in turn fails once: kvlm exits with one line, or did not need the call. */
START_TEST(calls_that_fail_are_one_line) {
        static const char *const calls[] = {
                "cuInit:1",
                "cuDevicePrimaryCtxRetain:1",
                "cuStreamCreateWithPriority:1",
                "cuLibraryLoadData:2",
                "cuMemAlloc:1",
                "cuMemAlloc:2",
                "cuMemAlloc:4",
                "cuMemHostAlloc:1",
                "cuEventCreate:1",
                "cuMemcpyHtoDAsync:3",
                "cuMemcpyHtoDAsync:15",
                "cuLaunchKernel:1",
                "cuLaunchKernel:7",
                "cuEventRecord:1",
                "cuMemcpyDtoHAsync:1",
                "cuStreamSynchronize:1",
                "execute:30",
        };

        for (size_t i = 0; scene_stand_in() && i < ARRAY_SIZE(calls); i++) {
                char fail[64];

                snprintf(fail, sizeof fail, "%s=%d", calls[i], i % 2 ? 2 : 700);
                setenv("FAKECUDA_FAIL", fail, 1);
                scene_assert_refused(kvlm("--model", folder_path("model"), "--no-share", "--tokens",
                                          folder_path("ids"), "--max-tokens", "2", "--device",
                                          "cuda", NULL),
                                     "kvlm: ");
        }
        unsetenv("FAKECUDA_FAIL");
}
END_TEST

START_TEST(a_model_that_does_not_fit_says_so) {
        const char *model = getenv("KVLM_MODEL");

        if (!scene_stand_in() || !model)
                return;
        setenv("FAKECUDA_MEMORY", "34M", 1);
        setenv("FAKECUDA_GROUP", "small", 1);
        scene_assert_refused(kvlm("--model", model, "--no-share", "--tokens", folder_path("ids"),
                                  "--device", "cuda", NULL),
                             "the model is too large");
}
END_TEST

SUITE("kvlm: faults on a GPU", scene_begin(argc, argv), FIXTURE(scene_set_up, scene_tear_down),
      TESTS(a_killed_process_harms_nobody, a_full_pool_is_not_an_error,
            the_daemons_death_is_not_an_error, who_waits_for_a_dead_producer_begins_anew,
            calls_that_fail_are_one_line, a_model_that_does_not_fit_says_so))
