/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvlm on a GPU: logits are those of the processor within what fp32 allows, and the same to the last bit with and
 * without sharing, however they are computed. Arguments: kvlm, kvd and kvctl. In the everyday suite the GPU is the
 * stand-in driver (tests/fakecuda), found by LD_LIBRARY_PATH; on a machine with a GPU the same program runs on it:
 *
 *      test-kvlm-device BUILD/tools/kvlm/kvlm BUILD/daemon/kvd BUILD/tools/kvctl/kvctl
 */

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "ipc/base/util.h"
#include "kernels/cuda/cublas.h"
#include "tests/kvlm/folder.h"

static const struct shape small = {2, 32, 4, 2, 16, 40, 270, true, "F32"};
static const char *daemon_program, *kvctl_program;
static pid_t daemon_pid;

enum { WAIT_MS = 20000, N = 70, SKIP = 77 };

/* ---- processes ---- */

static void start_daemon(void) {
        char number[16], byte;
        int ready[2];

        ck_assert_int_eq(pipe2(ready, O_CLOEXEC), 0);
        snprintf(number, sizeof number, "%d", ready[1]);
        daemon_pid = fork();
        ck_assert_int_ge(daemon_pid, 0);
        if (daemon_pid == 0) {
                fcntl(ready[1], F_SETFD, 0);
                execl(daemon_program, daemon_program, "--private", folder_path("daemon"), "--pool", "32M", "--set",
                      "daemon.backend=cuda", "--set", "daemon.segment=4M", "--ready-fd", number, NULL);
                _exit(127);
        }
        close(ready[1]);
        ck_assert_int_eq(poll(&(struct pollfd){.fd = ready[0], .events = POLLIN}, 1, WAIT_MS), 1);
        ck_assert_msg(read(ready[0], &byte, 1) == 1, "the daemon ended before it was ready");
        close(ready[0]);
}

static void end_daemon(void) {
        int status;

        ck_assert_int_eq(kill(daemon_pid, SIGTERM), 0);
        ck_assert_int_eq(waitpid(daemon_pid, &status, 0), daemon_pid);
        daemon_pid = 0;
}

static pid_t spawn(const char *const *argv, const char *out) {
        pid_t pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                int fd = open(out, O_CREAT | O_WRONLY | O_TRUNC, 0600);

                dup2(fd, STDOUT_FILENO);
                execv(argv[0], (char **)argv);
                _exit(127);
        }
        return pid;
}

static int wait_for(pid_t pid) {
        int status;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void assert_clean(void) {
        const char *argv[] = {kvctl_program, "--socket", folder_path("daemon/kvd.sock"), "check", NULL};
        size_t size;
        int status = wait_for(spawn(argv, folder_path("check")));

        ck_assert_msg(status == 0, "kvctl check: status %d: %s", status, (char *)folder_read("check", &size));
}

static void prepare(void) {
        char ids[N * 8], *at = ids;

        folder_make();
        folder_model("model", &small, 5);
        for (int i = 0; i < N; i++)
                at = print_to(at, "%d ", i == 0 ? 1 : (i * 7919 + i / 40) % 270);
        folder_write_text("ids", ids);
}

static void clean_up(void) {
        if (daemon_pid > 0)
                end_daemon();
        folder_remove();
}

/* ---- logits ---- */

static const float *logits_of(struct output o, const char *name, size_t *n) {
        const float *logits;
        size_t size;

        ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
        logits = folder_read(name, &size);
        *n = size / sizeof *logits;
        ck_assert_uint_gt(*n, 0);
        return logits;
}

static const float *private_logits(const char *device, const char *kv_type, const char *matmul, const char *chunk,
                                   size_t *n) {
        return logits_of(kvlm("--model", folder_path("model"), "--no-share", "--tokens", folder_path("ids"), "--logits",
                              folder_path("logits"), "--device", device, "--kv-type", kv_type, "--matmul", matmul,
                              "--chunk", chunk, NULL), "logits", n);
}

static void assert_close(const float *a, const float *b, size_t n, double most, const char *what) {
        double worst = 0;

        for (size_t i = 0; i < n; i++)
                worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
        ck_assert_msg(worst < most, "%s: logits differ by %g", what, worst);
}

/* Keys that a last bit sends to another 16-bit number differ by that number's unit. */
START_TEST(logits_are_those_of_the_processor) {
        static const struct {
                const char *kv_type, *matmul;
                double most;
        } cases[] = {{"f32", "f32", 2e-5}, {"f16", "f32", 4e-3}, {"bf16", "f32", 3e-2}, {"f32", "tf32", 2e-2},
                     {"bf16", "bf16", 0.2}};

        for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
                size_t n, m;
                const float *cpu = private_logits("cpu", cases[i].kv_type, "f32", "64", &n);
                const float *gpu = private_logits("cuda", cases[i].kv_type, cases[i].matmul, "64", &m);

                ck_assert_uint_eq(n, m);
                assert_close(cpu, gpu, n, cases[i].most, cases[i].kv_type);
        }
}
END_TEST

START_TEST(logits_of_the_real_model_are_those_of_the_processor) {
        const char *model = getenv("KVLM_MODEL"), *devices[] = {"cpu", "cuda"};
        const float *logits[2];
        size_t n = 0, m = 0;

        if (!model)
                return;
        folder_write_text("short", "1 300 301 302 40 41 42 300 301 700 5 6 7 8 9 300 301 302 40");
        for (int i = 0; i < 2; i++)
                logits[i] = logits_of(kvlm("--model", model, "--no-share", "--tokens", folder_path("short"), "--logits",
                                           folder_path(devices[i]), "--device", devices[i], NULL),
                                      devices[i], i == 0 ? &n : &m);
        ck_assert_uint_eq(n, m);
        assert_close(logits[0], logits[1], n, 1e-3, "the committed model"); /* logits of up to some 20 */
}
END_TEST

START_TEST(bits_do_not_depend_on_chunks) {
        static const char *const chunks[] = {"1", "7", "48"}, *const types[] = {"f32", "bf16"};

        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                size_t n, m;
                const float *whole = private_logits("cuda", types[t], "f32", "256", &n);

                for (size_t i = 0; i < ARRAY_SIZE(chunks); i++) {
                        const float *cut = private_logits("cuda", types[t], "f32", chunks[i], &m);

                        ck_assert_uint_eq(n, m);
                        ck_assert_msg(memcmp(whole, cut, n * sizeof *cut) == 0, "other bits with chunk %s, %s",
                                      chunks[i], types[t]);
                }
        }
}
END_TEST

/* ---- sharing ---- */

static uint64_t sum(const char *lines, const char *member) {
        size_t length = strlen(member);
        uint64_t total = 0;

        for (const char *at = lines; (at = strstr(at, member)); at += length)
                total += strtoull(at + length + 3, NULL, 10);
        return total;
}

START_TEST(logits_are_the_same_from_the_pool) {
        static const char *const types[] = {"f32", "bf16"}, *const names[] = {"private", "computed", "reused"};
        const char *model = folder_path("model"), *socket = folder_path("daemon/kvd.sock");

        start_daemon();
        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                const float *logits[3];
                size_t n[3];

                for (int i = 0; i < 3; i++) {
                        struct output o = kvlm("--model", model, "--socket", socket, "--tokens", folder_path("ids"),
                                               "--json", "--kv-type", types[t], "--space", types[t], "--logits",
                                               folder_path(names[i]), i == 0 ? "--no-share" : "--device=cuda",
                                               i == 0 ? "--device=cuda" : NULL, NULL);

                        logits[i] = logits_of(o, names[i], n + i);
                        ck_assert_uint_eq(sum(o.out, "reused_tokens"), i == 2 ? N / 16 * 16 : 0);
                        ck_assert_uint_eq(sum(o.out, "\"refused"), 0);
                }
                ck_assert_mem_eq(logits[0], logits[1], n[0] * sizeof(float));
                ck_assert_mem_eq(logits[0], logits[2], n[0] * sizeof(float));
        }
        assert_clean();
}
END_TEST

/* A text of some 100 tokens and questions about it. */
static void write_prompts(void) {
        char text[2048], *at = text;

        for (int i = 0; i < 6; i++)
                at = print_to(at, "the theory of %d abcd\n", i * i % 97);
        folder_write_text("document", text);
        at = text;
        for (int i = 0; i < 2; i++)
                at = print_to(at, "{\"prompt\": \"question %d?\"}\n", i);
        folder_write_text("prompts", text);
}

/* No --device: the pool's place decides. */
static struct output ask(const char *first, const char *second) {
        return kvlm("--model", folder_path("model"), "--socket", folder_path("daemon/kvd.sock"), "--document",
                    folder_path("document"), "--prompts", folder_path("prompts"), "--stop", "", "--max-tokens", "4",
                    "--json", first, second, NULL);
}

/* The texts alone: each line cut behind its first member. */
static const char *texts(struct output o) {
        char *copy = folder_memory(strlen(o.out) + 1), *to = copy;

        ck_assert_msg(o.status == 0, "status %d: %s%s", o.status, o.err, o.out);
        for (const char *line = o.out; *line; line = strchr(line, '\n') + 1)
                to = mempcpy(to, line, (size_t)(strstr(line, "\", \"prompt_tokens\"") - line));
        return copy;
}

static void assert_answers(struct output o, const char *expected) {
        ck_assert_str_eq(texts(o), expected);
        ck_assert_str_eq(o.err, "");
        ck_assert_uint_eq(sum(o.out, "wrong_bytes"), 0);
}

static pid_t ask_in_background(const char *name) {
        pid_t pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                struct output o = ask("--verify", NULL);

                if (o.status == 0)
                        folder_write_text(name, o.out);
                else
                        fprintf(stderr, "status %d: %s%s", o.status, o.err, o.out);
                _exit(o.status == 0 ? 0 : 1);
        }
        return pid;
}

/* Bytes and answers are compared with those that each computes by itself. */
START_TEST(many_at_once_agree) {
        static const char *const names[] = {"a", "b", "c"};
        pid_t all[ARRAY_SIZE(names)];
        const char *expected;
        struct output last;
        size_t size;

        write_prompts();
        expected = texts(ask("--no-share", "--device=cuda"));
        start_daemon();
        for (size_t i = 0; i < ARRAY_SIZE(names); i++)
                all[i] = ask_in_background(names[i]);
        for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
                ck_assert_int_eq(wait_for(all[i]), 0);
                assert_answers((struct output){0, folder_read(names[i], &size), ""}, expected);
        }
        last = ask("--verify", NULL);
        assert_answers(last, expected);
        ck_assert_uint_gt(sum(last.out, "reused_tokens"), 100);
        ck_assert_uint_gt(sum(last.out, "verified_bytes"), 0);
        ck_assert_uint_eq(sum(last.out, "\"refused"), 0);
        assert_clean();
}
END_TEST

/* The victim is somewhere in its prompts, later in each round. */
START_TEST(a_killed_process_harms_nobody) {
        const char *argv[] = {kvlm_program, "--model", folder_path("model"), "--socket", folder_path("daemon/kvd.sock"),
                              "--document", folder_path("document"), "--prompts", folder_path("prompts"), "--stop", "",
                              "--max-tokens", "40", NULL};
        const char *expected;
        size_t size;

        write_prompts();
        expected = texts(ask("--no-share", "--device=cuda"));
        start_daemon();
        for (int round = 0; round < 3; round++) {
                const struct timespec pause = {0, 50000000 + round * 150000000};
                pid_t victim = spawn(argv, "/dev/null"), other;

                nanosleep(&pause, NULL);
                other = ask_in_background("other");
                ck_assert_int_eq(kill(victim, SIGKILL), 0);
                wait_for(victim);
                ck_assert_int_eq(wait_for(other), 0);
                assert_answers((struct output){0, folder_read("other", &size), ""}, expected);
        }
        assert_clean();
}
END_TEST

/* What is decoded otherwise than a prompt is not published; with --decode exact it is the same, and is. */
START_TEST(what_is_generated_is_published_if_it_is_exact) {
        const char *model = folder_path("model"), *socket;
        uint64_t shared[2];

        start_daemon();
        socket = folder_path("daemon/kvd.sock");
        for (int i = 0; i < 2; i++) {
                struct output o = kvlm("--model", model, "--socket", socket, "--tokens", folder_path("ids"), "--stop",
                                       "", "--max-tokens", "12", "--json", "--decode", i == 0 ? "fast" : "exact", NULL);

                ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
                shared[i] = sum(o.out, "shared_blocks");
        }
        ck_assert_uint_eq(shared[0], N / 16);
        ck_assert_uint_eq(shared[1], (N + 11) / 16);
        assert_clean();
}
END_TEST

/* ---- what does not work says so ---- */

static void assert_refused(struct output o, const char *line) {
        ck_assert_int_eq(o.status, 1);
        ck_assert_msg(strstr(o.err, line) && strchr(o.err, '\n') + 1 == o.err + strlen(o.err), "%s", o.err);
}

START_TEST(errors_are_one_line) {
        const char *model = folder_path("model"), *ids = folder_path("ids");

        assert_refused(kvlm("--model", model, "--no-share", "--tokens", ids, "--device", "cuda:63", NULL), "");
        assert_refused(kvlm("--model", model, "--no-share", "--tokens", ids, "--device", "cuda", "--evict", "keydiff",
                            "--budget", "50%", NULL), "methods run on the processor");
        ck_assert_int_eq(kvlm("--model", model, "--tokens", ids, "--device", "tpu", NULL).status, 2);
        if (!strstr(getenv("LD_LIBRARY_PATH") ?: "", "fakecuda"))
                return;
        setenv("LD_LIBRARY_PATH", "/nonexistent", 1);
        assert_refused(kvlm("--model", model, "--no-share", "--tokens", ids, "--device", "cuda", NULL),
                       "no CUDA driver");
}
END_TEST

START_TEST(the_processor_does_not_share_a_gpus_pool) {
        struct output o;

        write_prompts();
        start_daemon();
        o = ask("--device=cpu", NULL);
        ck_assert_ptr_nonnull(strstr(o.err, "pool is in GPU memory"));
        ck_assert_str_eq(texts(o), texts(ask("--device=cpu", "--no-share")));
}
END_TEST

/* In a process of its own: this one forks. */
static bool has_device(void) {
        struct gpu gpu;
        int status;
        pid_t pid = fork();

        if (pid == 0)
                _exit(gpu_open(&gpu, 0) < 0 || gpu_has_kernels(&gpu) < 0 || !cublas_load(NULL));
        return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

int main(int argc, char **argv) {
        const TTest *all[] = {
                logits_are_those_of_the_processor, logits_of_the_real_model_are_those_of_the_processor,
                bits_do_not_depend_on_chunks, logits_are_the_same_from_the_pool, many_at_once_agree,
                a_killed_process_harms_nobody, what_is_generated_is_published_if_it_is_exact, errors_are_one_line,
                the_processor_does_not_share_a_gpus_pool,
        };
        Suite *suite = suite_create("kvlm: device");
        TCase *tests = tcase_create("device");
        SRunner *runner = srunner_create(suite);
        int failed;

        kvlm_program = argc > 1 ? argv[1] : "kvlm";
        daemon_program = argc > 2 ? argv[2] : "kvd";
        kvctl_program = argc > 3 ? argv[3] : "kvctl";
        if (!has_device()) {
                puts("skipped: no GPU, no kernels in this build, or no cuBLAS");
                return SKIP;
        }
        tcase_set_timeout(tests, 120);
        tcase_add_checked_fixture(tests, prepare, clean_up);
        for (size_t i = 0; i < ARRAY_SIZE(all); i++)
                tcase_add_test(tests, all[i]);
        suite_add_tcase(suite, tests);
        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed > 0;
}
