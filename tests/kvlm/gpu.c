/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kvlm/gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "ipc/base/util.h"
#include "kernels/cuda/cublas.h"

static const struct shape small = {2, 32, 4, 2, 16, 40, 270, true, "F32"};
static const char *daemon_program, *scene_kvctl;
static pid_t daemon_pid;

enum { WAIT_MS = 20000, SKIP = 77 };

void scene_daemon_of(const char *pool, const char *segment) {
        char number[16], byte, set[64];
        int ready[2];

        ck_assert_int_eq(pipe2(ready, O_CLOEXEC), 0);
        snprintf(number, sizeof number, "%d", ready[1]);
        daemon_pid = fork();
        ck_assert_int_ge(daemon_pid, 0);
        if (daemon_pid == 0) {
                fcntl(ready[1], F_SETFD, 0);
                snprintf(set, sizeof set, "daemon.segment=%s", segment);
                execl(daemon_program, daemon_program, "--private", folder_path("daemon"), "--pool", pool, "--set",
                      "daemon.backend=cuda", "--set", set, "--ready-fd", number, NULL);
                _exit(127);
        }
        close(ready[1]);
        ck_assert_int_eq(poll(&(struct pollfd){.fd = ready[0], .events = POLLIN}, 1, WAIT_MS), 1);
        ck_assert_msg(read(ready[0], &byte, 1) == 1, "the daemon ended before it was ready");
        close(ready[0]);
}

void scene_daemon(void) {
        scene_daemon_of("32M", "4M");
}

void scene_end_daemon(int signal) {
        int status;

        ck_assert_int_eq(kill(daemon_pid, signal), 0);
        ck_assert_int_eq(waitpid(daemon_pid, &status, 0), daemon_pid);
        daemon_pid = 0;
}

pid_t scene_spawn(const char *const *argv, const char *out) {
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

int scene_wait(pid_t pid) {
        int status;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void scene_assert_clean(void) {
        const char *argv[] = {scene_kvctl, "--socket", folder_path("daemon/kvd.sock"), "check", NULL};
        size_t size;
        int status = scene_wait(scene_spawn(argv, folder_path("check")));

        ck_assert_msg(status == 0, "kvctl check: status %d: %s", status, (char *)folder_read("check", &size));
}

void scene_set_up(void) {
        char ids[SCENE_TOKENS * 8], *at = ids;

        folder_make();
        folder_model("model", &small, 5);
        for (int i = 0; i < SCENE_TOKENS; i++)
                at = print_to(at, "%d ", i == 0 ? 1 : (i * 7919 + i / 40) % 270);
        folder_write_text("ids", ids);
}

void scene_tear_down(void) {
        if (daemon_pid > 0)
                scene_end_daemon(SIGTERM);
        folder_remove();
}

const float *scene_logits(struct output o, const char *name, size_t *n) {
        const float *logits;
        size_t size;

        ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
        logits = folder_read(name, &size);
        *n = size / sizeof *logits;
        ck_assert_uint_gt(*n, 0);
        return logits;
}

uint64_t scene_sum(const char *lines, const char *member) {
        size_t length = strlen(member);
        uint64_t total = 0;

        for (const char *at = lines; (at = strstr(at, member)); at += length)
                total += strtoull(at + length + 3, NULL, 10);
        return total;
}

/* A text of some 100 tokens and questions about it. */
void scene_prompts(void) {
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
struct output scene_ask(const char *first, const char *second) {
        return kvlm("--model", folder_path("model"), "--socket", folder_path("daemon/kvd.sock"), "--document",
                    folder_path("document"), "--prompts", folder_path("prompts"), "--stop", "", "--max-tokens", "4",
                    "--json", first, second, NULL);
}

/* The texts alone: each line cut behind its first member. */
const char *scene_texts(struct output o) {
        char *copy = folder_memory(strlen(o.out) + 1), *to = copy;

        ck_assert_msg(o.status == 0, "status %d: %s%s", o.status, o.err, o.out);
        for (const char *line = o.out; *line; line = strchr(line, '\n') + 1)
                to = mempcpy(to, line, (size_t)(strstr(line, "\", \"prompt_tokens\"") - line));
        return copy;
}

void scene_assert_answers(struct output o, const char *expected) {
        ck_assert_str_eq(scene_texts(o), expected);
        ck_assert_str_eq(o.err, "");
        ck_assert_uint_eq(scene_sum(o.out, "wrong_bytes"), 0);
}

pid_t scene_ask_in_background(const char *name) {
        pid_t pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                struct output o = scene_ask("--verify", "--device=cuda");

                if (o.status == 0)
                        folder_write_text(name, o.out);
                else
                        fprintf(stderr, "status %d: %s%s", o.status, o.err, o.out);
                _exit(o.status == 0 ? 0 : 1);
        }
        return pid;
}

bool scene_stand_in(void) {
        const char *path = getenv("LD_LIBRARY_PATH");

        return path && strstr(path, "fakecuda");
}

/* ---- what does not work says so ---- */

void scene_assert_refused(struct output o, const char *line) {
        ck_assert_int_eq(o.status, 1);
        ck_assert_msg(strstr(o.err, line) && strchr(o.err, '\n') + 1 == o.err + strlen(o.err), "%s", o.err);
}

/* In a process of its own: this one forks. */
static bool has_device(void) {
        struct gpu gpu;
        int status;
        pid_t pid = fork();

        if (pid == 0)
                _exit(gpu_open(&gpu, 0) < 0 || gpu_has_kernels(&gpu) < 0 || !cublas_load(NULL));
        return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

void scene_begin(int argc, char **argv) {
        kvlm_program = argc > 1 ? argv[1] : "kvlm";
        daemon_program = argc > 2 ? argv[2] : "kvd";
        scene_kvctl = argc > 3 ? argv[3] : "kvctl";
        if (has_device())
                return;
        puts("skipped: no GPU, no kernels in this build, or no cuBLAS");
        exit(SKIP);
}
