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
static const char *scene_kvctl;
static struct instance server;

void scene_daemon_of(const char *pool, const char *segment) {
        instance_again(&server, SETTINGS(pool, segment, "daemon.backend=cuda"));
}

void scene_daemon(void) {
        scene_daemon_of("daemon.pool=32M", "daemon.segment=4M");
}

const char *scene_socket(void) {
        return server.socket;
}

void scene_end_daemon(int signal) {
        if (signal == SIGKILL)
                instance_kill(&server);
        else
                instance_stop(&server);
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

void scene_assert_clean(void) {
        const char *argv[] = {scene_kvctl, "--socket", server.socket, "check", NULL};
        size_t size;
        int status = wait_status(scene_spawn(argv, folder_path("check")));

        ck_assert_msg(status == 0, "kvctl check: status %d: %s", status,
                      (char *)folder_read("check", &size));
}

void scene_set_up(void) {
        char ids[SCENE_TOKENS * 8], *at = ids;

        folder_make();
        instance_make_dir(&server);
        folder_model("model", &small, 5);
        for (int i = 0; i < SCENE_TOKENS; i++)
                at = print_to(at, "%d ", i == 0 ? 1 : (i * 7919 + i / 40) % 270);
        folder_write_text("ids", ids);
}

void scene_tear_down(void) {
        if (server.pid > 0)
                instance_stop(&server);
        instance_sweep(&server);
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

/* Writes a text of about 100 tokens and questions about it. */
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

/* Without --device, kvlm computes where the pool is. */
struct output scene_ask(const char *first, const char *second) {
        return kvlm("--model", folder_path("model"), "--socket", server.socket, "--document",
                    folder_path("document"), "--prompts", folder_path("prompts"), "--stop", "",
                    "--max-tokens", "4", "--json", first, second, NULL);
}

/* Only the texts: each line is cut after its first member. */
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

/* ---- errors ---- */

void scene_assert_refused(struct output o, const char *line) {
        ck_assert_int_eq(o.status, 1);
        ck_assert_msg(strstr(o.err, line) && strchr(o.err, '\n') + 1 == o.err + strlen(o.err), "%s",
                      o.err);
}

/* In a separate process, since this one forks. */
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
        scene_kvctl = argc > 2 ? argv[2] : "kvctl";
        if (has_device())
                return;
        puts("skipped: no GPU, no kernels in this build, or no cuBLAS");
        exit(77);
}
