/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvlm with a kvd: reused data is right to the last byte, answers never depend on the cache, and no
 * failure of the daemon, $KVD, or of another kvlm affects the user.
 */

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "ipc/base/util.h"
#include "tests/kvlm/folder.h"
#include "tests/lib/amount.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

static const struct shape small = {3, 24, 6, 2, 10, 37, 283, true, "F32"};
static struct instance server;

enum { PROMPTS = 6 };

static void start_daemon(const char *pool) {
        instance_again(&server, SETTINGS(pool, "daemon.segment=4M"));
}

static void end_daemon(int signal) {
        if (signal == SIGKILL)
                instance_kill(&server);
        else
                instance_stop(&server);
}

/* Makes a model, and prompts that share a document of about 600 tokens. */
static void prepare(void) {
        char *text = folder_memory(8192), *at = text;

        folder_make();
        instance_make_dir(&server);
        folder_model("model", &small, 11);
        for (int i = 0; i < 200; i++)
                at = print_to(at, "the theory of %d abcd\n", i * i % 97);
        folder_write_text("document", text);
        at = text;
        for (int i = 0; i < PROMPTS; i++)
                at = print_to(at, "{\"prompt\": \"question %d?\"}\n", i);
        folder_write_text("prompts", text);
}

static void clean_up(void) {
        if (server.pid > 0)
                instance_kill(&server);
        instance_sweep(&server);
        folder_remove();
}

static struct output ask(const char *option) {
        return kvlm("--model", folder_path("model"), "--socket", server.socket, "--document",
                    folder_path("document"), "--prompts", folder_path("prompts"), "--stop", "",
                    "--max-tokens", "40", "--json", "--verify", option, NULL);
}

static uint64_t sum(const char *lines, const char *member) {
        size_t length = strlen(member);
        uint64_t total = 0;

        for (const char *at = lines; (at = strstr(at, member)); at += length)
                total += strtoull(at + length + 3, NULL, 10);
        return total;
}

/* Only the texts: each line is cut after its first member. */
static const char *texts(const char *lines) {
        char *copy = folder_memory(strlen(lines) + 1), *to = copy;

        for (const char *line = lines; *line; line = strchr(line, '\n') + 1)
                to = mempcpy(to, line, (size_t)(strstr(line, "\", \"prompt_tokens\"") - line));
        return copy;
}

static void check_answers(struct output o, const char *expected) {
        ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
        ck_assert_str_eq(texts(o.out), expected);
        ck_assert_uint_eq(sum(o.out, "wrong_bytes"), 0);
}

START_TEST(a_second_process_reuses_what_the_first_computed) {
        const char *expected = texts(ask("--no-share").out);
        struct output first, second;
        uint64_t tokens;

        start_daemon("daemon.pool=16M");
        first = ask("--chunk=64");
        check_answers(first, expected);
        second = ask("--chunk=7");
        check_answers(second, expected);
        tokens = sum(second.out, "\"prompt_tokens");
        ck_assert_uint_gt(sum(first.out, "reused_tokens"), 0); /* from its own first prompt */
        ck_assert_uint_ge(sum(second.out, "reused_tokens"), tokens - PROMPTS * 16);
        ck_assert_uint_gt(sum(second.out, "verified_bytes"), 0);
        ck_assert_uint_eq(sum(second.out, "refused"), 0);
}
END_TEST

/* Generated tokens and the prompt of the next turn: everything is found except the last block. */
START_TEST(a_conversation_goes_on_where_it_ended) {
        const char *model = folder_path("model"), *socket;
        char ids[4096], *at = ids;
        struct output o;

        start_daemon("daemon.pool=16M");
        socket = server.socket;
        for (int i = 0; i < 100; i++)
                at = print_to(at, "%d ", i == 0 ? 1 : 100 + i);
        o = kvlm("--model", model, "--socket", socket, "--tokens", folder_write_text("ids", ids),
                 "--stop", "", "--max-tokens", "61", "--json", NULL);
        ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
        /* all blocks that the 160 computed tokens fill */
        ck_assert_uint_eq(sum(o.out, "shared_blocks"), 160 / 16);
        ck_assert_uint_eq(sum(o.out, "private_blocks"), 0);
}
END_TEST

START_TEST(logits_are_the_same_from_the_pool) {
        const char *model = folder_path("model"), *socket = server.socket, *tokens;
        char ids[4096], *at = ids;
        const char *names[] = {"private", "computed", "reused"};
        void *logits[3];
        size_t size;

        start_daemon("daemon.pool=16M");
        for (int i = 0; i < 300; i++)
                at = print_to(at, "%d ", i * i % 283);
        tokens = folder_write_text("ids", ids);
        for (int i = 0; i < 3; i++) {
                struct output o = kvlm("--model", model, "--socket", socket, "--tokens", tokens,
                                       "--json", "--logits", folder_path(names[i]),
                                       i == 0 ? "--no-share" : NULL, NULL);

                ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
                ck_assert_uint_eq(sum(o.out, "reused_tokens"), i == 2 ? 288 : 0);
                logits[i] = folder_read(names[i], &size);
        }
        ck_assert_int_eq(memcmp(logits[0], logits[1], size), 0);
        ck_assert_int_eq(memcmp(logits[0], logits[2], size), 0);
}
END_TEST

/* Sets settings of the space. */
static void set_space(const char *settings) {
        char command[512];

        snprintf(command, sizeof command, "\"$KVCTL\" --socket %s space set model %s > /dev/null",
                 server.socket, settings);
        ck_assert_int_eq(system(command), 0);
}

static void expect_sound_pool(void) {
        char command[512];

        snprintf(command, sizeof command, "\"$KVCTL\" --socket %s check > /dev/null",
                 server.socket);
        ck_assert_int_eq(system(command), 0);
}

/*
 * If anything inexact, or computed from it, had been published, the exact run afterwards would
 * detect it.
 */
START_TEST(what_is_lossy_stays_private) {
        static const char *const methods[] = {
                "keydiff=on keydiff.budget=100",
                "keydiff=off kvreviver=on kvreviver.budget=0.1",
                "hshare=on hshare.dense_layers=0 hshare.sinks=4 hshare.recent=16 hshare.top=60",
                "keydiff=on memshare=on",
        };
        const char *expected = texts(ask("--no-share").out);
        struct output o;

        start_daemon("daemon.pool=16M");
        check_answers(ask("--chunk=64"), expected);
        for (size_t i = 0; i < 2 * ARRAY_SIZE(methods); i += AMOUNT(1, 3)) {
                set_space(methods[i / 2]);
                o = ask(i % 2 ? "--own-prompt=yes" : "--decode-tail=20");
                ck_assert_msg(o.status == 0, "%s: status %d: %s", methods[i / 2], o.status, o.err);
                ck_assert_uint_eq(sum(o.out, "wrong_bytes"), 0);
                ck_assert_uint_gt(sum(o.out, "\"blocks"), PROMPTS * 30);
                expect_sound_pool();
        }
        set_space("keydiff=off kvreviver=off hshare=off memshare=off");
        o = ask("--chunk=64");
        check_answers(o, expected);
        ck_assert_uint_gt(sum(o.out, "verified_bytes"), 0);
        expect_sound_pool();
}
END_TEST

/* With HShare, a prompt is exact, but generated tokens are not. */
START_TEST(sparse_answers_stay_private) {
        const char *model = folder_path("model"), *socket = server.socket, *tokens;
        char ids[4096], *at = ids;
        struct output o;

        start_daemon("daemon.pool=16M");
        for (int i = 0; i < 100; i++)
                at = print_to(at, "%d ", i == 0 ? 1 : 100 + i);
        tokens = folder_write_text("ids", ids);
        ask("--sequence=off"); /* makes the space */
        set_space("hshare=on hshare.sinks=2 hshare.recent=8 hshare.top=8 hshare.query_ratio=0.5");
        for (int i = 0; i < 2; i++) {
                o = kvlm("--model", model, "--socket", socket, "--tokens", tokens, "--stop", "",
                         "--max-tokens", "61", "--json", NULL);
                ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
                ck_assert_uint_eq(sum(o.out, "shared_blocks"), 100 / 16);
                ck_assert_uint_eq(sum(o.out, "private_blocks"), 4);
                /* the last 32 queries determine the sharing configuration */
                ck_assert_uint_eq(sum(o.out, "reused_tokens"), i * 64);
                ck_assert_uint_gt(sum(o.out, "selections"), 0);
        }
}
END_TEST

START_TEST(a_full_pool_is_not_an_error) {
        static const struct shape deep = {8, 16, 4, 4, 16, 16, 270, true, "F32"};
        const char *socket = server.socket;
        uint64_t shared = 0, private = 0;
        char ids[8192];

        folder_model("deep", &deep, 1);
        start_daemon("daemon.pool=4M");
        for (int i = 0; i < 4; i++) {
                char *at = ids;
                struct output o;

                for (int n = 0; n < (i == 3 ? 1200 : 1000); n++)
                        at = print_to(at, "%d ", (n * n + i) % 270);
                o = kvlm("--model", folder_path("deep"), "--socket", socket, "--tokens",
                         folder_write_text("long", ids), "--max-tokens", "3", "--json", "--verify",
                         NULL);
                ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
                ck_assert_uint_eq(sum(o.out, "wrong_bytes"), 0);
                /* the last one is longer than the pool */
                ck_assert_uint_eq(sum(o.out, "refused"), i == 3 ? 1 : 0);
                shared = sum(o.out, "shared_blocks");
                private = sum(o.out, "private_blocks");
        }
        ck_assert_uint_gt(shared, 50);
        ck_assert_uint_eq(shared + private, 76); /* 1,202 tokens */
}
END_TEST

/* The background process writes kvlm's output to a file or, on failure, to standard error. */
static pid_t ask_in_background(const char *name) {
        pid_t pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                struct output o = ask("--json");

                if (o.status == 0)
                        folder_write_text(name, o.out);
                else
                        fprintf(stderr, "status %d: %s%s", o.status, o.err, o.out);
                _exit(o.status == 0 ? 0 : 1);
        }
        return pid;
}

static void check_background(pid_t pid, const char *name, const char *expected) {
        size_t size;
        int status;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        check_answers((struct output){0, folder_read(name, &size), ""}, expected);
}

START_TEST(many_at_once_agree) {
        const char *expected = texts(ask("--no-share").out), *names[] = {"a", "b", "c", "d"};
        pid_t all[ARRAY_SIZE(names)];

        start_daemon("daemon.pool=16M");
        for (size_t i = 0; i < ARRAY_SIZE(names); i++)
                all[i] = ask_in_background(names[i]);
        for (size_t i = 0; i < ARRAY_SIZE(names); i++)
                check_background(all[i], names[i], expected);
}
END_TEST

/* The daemon dies at a different time in each round, and is sometimes restarted. */
START_TEST(the_daemons_death_is_not_an_error) {
        const char *expected = texts(ask("--no-share").out);

        for (int round = 0; round < 12; round += AMOUNT(1, 5)) {
                pid_t pid;

                start_daemon("daemon.pool=16M");
                pid = ask_in_background("out");
                usleep((useconds_t)round * 4000);
                end_daemon(SIGKILL);
                if (round % 2)
                        start_daemon("daemon.pool=16M");
                check_background(pid, "out", expected);
                if (round % 2)
                        end_daemon(SIGTERM);
        }
}
END_TEST

START_TEST(without_a_daemon_it_works_and_says_so) {
        struct output o = ask("--json");

        check_answers(o, texts(ask("--no-share").out));
        ck_assert_ptr_nonnull(strstr(o.err, "not sharing"));
        ck_assert_ptr_eq(strchr(o.err, '\n') + 1, o.err + strlen(o.err));
        ck_assert_uint_eq(sum(o.out, "refused"), PROMPTS);
}
END_TEST

/* A different model of the same name gets neither blocks of the first one nor an error. */
START_TEST(another_model_shares_nothing) {
        struct output o;

        start_daemon("daemon.pool=16M");
        ck_assert_int_eq(ask("--json").status, 0);
        remove(folder_path("model/model.safetensors"));
        remove(folder_path("model/config.json"));
        remove(folder_path("model/vocab.txt"));
        remove(folder_path("model"));
        folder_model("model", &small, 12);
        o = ask("--json");
        check_answers(o, texts(ask("--no-share").out));
        ck_assert_ptr_nonnull(strstr(o.err, "fingerprint"));
        ck_assert_uint_eq(sum(o.out, "reused_tokens"), 0);
        o = ask("--space=another");
        ck_assert_uint_gt(sum(o.out, "reused_tokens"), 0);
}
END_TEST

/* Checks that the process is kvlm: between fork and exec it is not yet. */
static bool kvlm_catches(pid_t pid, int signal) {
        char path[64], line[256];
        uint64_t caught = 0;
        bool is_kvlm = false;
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f)) {
                is_kvlm |= strcmp(line, "Name:\tkvlm\n") == 0;
                if (strncmp(line, "SigCgt:", 7) == 0)
                        caught = strtoull(line + 7, NULL, 16);
        }
        fclose(f);
        return is_kvlm && caught >> (signal - 1) & 1;
}

START_TEST(ctrl_c_ends_cleanly) {
        int status;
        pid_t pid;

        start_daemon("daemon.pool=16M");
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                execl(kvlm_program, kvlm_program, "--model", folder_path("model"), "--socket",
                      server.socket, "--text", folder_path("document"), "--max-tokens", "100000",
                      "--stop", "", NULL);
                _exit(127);
        }
        while (!kvlm_catches(pid, SIGINT))
                usleep(1000);
        ck_assert_int_eq(kill(pid, SIGINT), 0);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 130, "status %#x",
                      (unsigned)status);
}
END_TEST

SUITE("kvlm: sharing", SKIP_IF(argc != 2), kvlm_program = argv[1], FIXTURE(prepare, clean_up),
      TESTS(a_second_process_reuses_what_the_first_computed, a_conversation_goes_on_where_it_ended,
            logits_are_the_same_from_the_pool, what_is_lossy_stays_private,
            sparse_answers_stay_private, a_full_pool_is_not_an_error, many_at_once_agree,
            the_daemons_death_is_not_an_error, without_a_daemon_it_works_and_says_so,
            another_model_shares_nothing, ctrl_c_ends_cleanly))
