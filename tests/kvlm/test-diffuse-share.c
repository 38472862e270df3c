/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's entries in the pool: their bits equal those in private memory, whichever process
 * computed them; a prefix is computed once, however many processes need it; and no failure of the
 * daemon or of another process affects the user. $KVD is the daemon.
 */

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/kvlm/test-diffuse.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

enum { N = 300, PREFIX = 250, AT_ONCE = 8 };

static const struct shape small = {4, 24, 6, 2, 10, 37, 283, true, "F32"};
static const struct shape deep = {8, 16, 4, 4, 16, 16, 270, true, "F32"};
static const char *const small_pool[] = {"daemon.pool=16M", "daemon.segment=4M", NULL};
static struct instance server;

static void write_tokens(const char *name, uint32_t n, uint32_t salt) {
        char *text = folder_memory(n * 8), *at = text;

        for (uint32_t i = 0; i < n; i++)
                at = print_to(at, "%u ", i == 0 ? 1 : 4 + (i * 7919u + i / 40 + salt) % 260);
        folder_write_text(name, text);
}

static void prepare(void) {
        folder_make();
        diffusion_model("model", &small, 21);
        write_tokens("ids", N, 0);
        instance_start(&server, small_pool);
}

static void clean_up(void) {
        if (server.pid > 0)
                instance_kill(&server);
        instance_sweep(&server);
        folder_remove();
}

/* ---- runs ---- */

struct answer {
        const char *line;
        const void *logits; /* logits of every step */
        size_t size;
};

static uint64_t member(struct answer a, const char *name) {
        char key[64];
        const char *at;

        snprintf(key, sizeof key, "\"%s\": ", name);
        at = strstr(a.line, key);
        ck_assert_msg(at, "no %s in %s", name, a.line);
        return strtoull(at + strlen(key), NULL, 10);
}

struct way {
        const char *depth, *type, *option; /* option: an additional option */
        const char *ids, *prefix;
        const char *logits; /* name of the file */
};

static struct output run(const struct way *w) {
        return kvlm("--model", folder_path("model"), "--socket", server.socket, "--json",
                    "--verify", "--tokens", folder_path(w->ids ? w->ids : "ids"), "--prefix-tokens",
                    w->prefix ? w->prefix : "250", "--gen-length", "10", "--steps", "5",
                    "--refresh", "2", "--bicache", "on", "--bicache-depth", w->depth, "--kv-type",
                    w->type ? w->type : "f32", "--logits",
                    folder_path(w->logits ? w->logits : "logits"), w->option, NULL);
}

static struct answer take(struct output o, const struct way *w) {
        struct answer a = {.line = o.out};

        ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
        a.logits = folder_read(w->logits ? w->logits : "logits", &a.size);
        ck_assert_uint_gt(a.size, 0);
        ck_assert_uint_eq(member(a, "wrong_bytes"), 0);
        return a;
}

static struct answer ask(struct way w) {
        return take(run(&w), &w);
}

static struct answer ask_alone(struct way w) {
        w.option = "--no-share";
        return ask(w);
}

static void check_same(struct answer a, struct answer b) {
        ck_assert_uint_eq(a.size, b.size);
        ck_assert_int_eq(memcmp(a.logits, b.logits, a.size), 0);
}

/* The facts of the space that kvlm created. */
static struct kvd_msg_space_info_reply facts(struct conn *conn) {
        struct kvd_msg_space_info_reply info;

        space_facts(conn, 0, &info);
        return info;
}

static uint64_t counter(struct conn *conn, uint32_t which) {
        struct kvd_msg_space_info_reply info = facts(conn);
        uint64_t value;

        memcpy(&value, (const uint8_t *)info.counters.data + which * sizeof value, sizeof value);
        return value;
}

static void check_invariants(void) {
        struct conn *conn = instance_connect(&server);

        expect_quiet(conn);
        expect_clean(conn);
        conn_close(conn);
}

/* ---- tests ---- */

START_TEST(bits_are_those_of_private_memory) {
        static const char *const types[] = {"f32", "f16", "bf16"};

        for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
                char space[32];
                struct way w = {.depth = "3", .type = types[i], .option = space};
                struct answer alone = ask_alone(w), first, second;

                snprintf(space, sizeof space, "--space=%s", types[i]);
                first = ask(w);
                second = ask(w);
                check_same(first, alone);
                check_same(second, alone);
                ck_assert_uint_eq(member(first, "made_layers"), 3);
                ck_assert_uint_eq(member(first, "reused_tokens"), 0);
                ck_assert_uint_eq(member(second, "found_layers"), 3);
                ck_assert_uint_eq(member(second, "made_layers"), 0);
                ck_assert_uint_eq(member(second, "reused_tokens"), PREFIX);
                ck_assert_uint_eq(member(second, "private_bytes"), 0);
                ck_assert_uint_eq(member(second, "shared_bytes"), member(alone, "private_bytes"));
                ck_assert_uint_eq(member(second, "verified_bytes"), member(second, "shared_bytes"));
        }
        check_invariants();
}
END_TEST

/*
 * A process that needs more layers than are stored continues from the last stored state. A third
 * process compares the result with the prefix computed from its tokens: keys and values after the
 * boundary are equal, byte by byte.
 */
START_TEST(deeper_requests_continue_from_the_last_stored_state) {
        static const char *const types[] = {"f32", "f16", "bf16"};

        for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
                char space[32];
                struct way shallow = {.depth = "1", .type = types[i], .option = space},
                           deeper = shallow;
                struct answer second, third;

                deeper.depth = "4";
                snprintf(space, sizeof space, "--space=%s", types[i]);
                ck_assert_uint_eq(member(ask(shallow), "made_layers"), 1);
                second = ask(deeper);
                ck_assert_uint_eq(member(second, "found_layers"), 1);
                ck_assert_uint_eq(member(second, "made_layers"), 3);
                third = ask(deeper);
                ck_assert_uint_eq(member(third, "found_layers"), 4);
                ck_assert_uint_eq(member(third, "made_layers"), 0);
                ck_assert_uint_gt(member(third, "verified_bytes"),
                                  3 * member(ask(shallow), "verified_bytes"));
                check_same(second, third);
                check_same(third, ask_alone(deeper));
        }
}
END_TEST

/* One token more, one less, or a different one makes a different prefix. */
START_TEST(a_prefix_is_found_whole_or_not_at_all) {
        struct way w = {.depth = "2"}, other = w;

        ask(w);
        other.prefix = "249";
        ck_assert_uint_eq(member(ask(other), "found_layers"), 0);
        other.prefix = "240"; /* the end of a block */
        ck_assert_uint_eq(member(ask(other), "found_layers"), 0);
        write_tokens("others", N, 1);
        other = (struct way){.depth = "2", .ids = "others"};
        ck_assert_uint_eq(member(ask(other), "found_layers"), 0);
        check_same(ask(other), ask_alone(other));
        ck_assert_uint_eq(member(ask(w), "found_layers"), 2);
}
END_TEST

/*
 * Blocks of some layers are evicted: the remaining layers are used up to the first missing one, and
 * the rest is computed again.
 */
START_TEST(what_was_evicted_is_made_again) {
        struct way w = {.depth = "4"};
        struct answer alone = ask_alone(w);
        struct kvd_msg_evict request = {.space = kvd_slice_of("model"), .blocks = 5};
        struct kvd_msg_evict_reply reply;
        struct conn *conn = instance_connect(&server);
        uint64_t evicted = 0, made = 0;

        for (int i = 0; i < 6; i++) {
                struct answer a = ask(w);

                check_same(a, alone);
                made += i > 0 ? member(a, "made_layers") : 0;
                ck_assert_int_eq(conn_call(conn, KVD_MSG_evict, &request, &reply), 0);
                evicted += reply.evicted;
                request.blocks = i == 2 ? 30 : 3;
        }
        ck_assert_uint_gt(evicted, 0);
        ck_assert_uint_gt(made, 0);
        conn_close(conn);
        check_invariants();
}
END_TEST

/* ---- below the pool ---- */

static void start_with_file(void) {
        static char file[160];
        const char *const settings[] = {"daemon.pool=16M",      "daemon.segment=4M",   file,
                                        "daemon.file_size=64M", "daemon.file_depth=0", NULL};

        instance_kill(&server);
        snprintf(file, sizeof file, "daemon.file=%s", folder_path("file"));
        instance_start(&server, settings);
}

static bool file_is_on(struct conn *conn) {
        struct kvd_msg_tier_info request = {0};
        struct kvd_msg_tier_info_reply reply;

        ck_assert_int_eq(conn_call(conn, KVD_MSG_tier_info, &request, &reply), 0);
        return reply.state.size == 2 && memcmp(reply.state.data, "on", 2) == 0;
}

static void evict(struct conn *conn, uint32_t to) {
        struct kvd_msg_evict request = {.space = kvd_slice_of("model"), .to = to};
        struct kvd_msg_evict_reply reply = {.more = 1};

        while (reply.more) {
                ck_assert_int_eq(conn_call(conn, KVD_MSG_evict, &request, &reply), 0);
                request.to = to ? 2 : 0;
                usleep(1000);
        }
}

/* Each layer is a separate chain. Sometimes one is not fetched in time, and is computed again. */
START_TEST(what_left_the_pool_comes_from_the_file) {
        struct way w = {.depth = "4"};
        struct answer alone = ask_alone(w), a;
        uint64_t found = 0;
        struct conn *conn;

        start_with_file();
        conn = instance_connect(&server);
        while (!file_is_on(conn))
                usleep(1000);
        ck_assert_uint_eq(member(ask(w), "made_layers"), 4);
        for (time_t end = time(NULL) + PATIENCE_MS / 1000; found < 4 && time(NULL) < end;) {
                evict(conn, 1);
                evict(conn, 0);
                a = ask(w);
                check_same(a, alone);
                ck_assert_uint_eq(member(a, "found_layers") + member(a, "made_layers"), 4);
                found = member(a, "found_layers");
        }
        ck_assert_uint_eq(found, 4);
        conn_close(conn);
        check_invariants();
}
END_TEST

/* ---- single flight ---- */

/* A process that holds the lease of the prefix and does nothing until it is killed. */
static pid_t hold_lease(const struct kvd_geometry *geometry) {
        struct kvd_space_options options = {.kind = KVD_BIDIRECTIONAL};
        uint32_t tokens[PREFIX];
        int ready[2];
        char byte;
        pid_t pid;

        ck_assert_int_eq(pipe(ready), 0);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                kvd *connection;
                kvd_space *space;

                for (uint32_t i = 0; i < PREFIX; i++)
                        tokens[i] = i == 0 ? 1 : 4 + (i * 7919u + i / 40) % 260;
                if (kvd_open(server.socket, &connection) < 0 ||
                    kvd_space_open(connection, "model", geometry, &options, &space) < 0 ||
                    kvd_lease(space, tokens, PREFIX, 0) != 1 || write(ready[1], "", 1) != 1)
                        _exit(1);
                pause();
                _exit(0);
        }
        close(ready[1]);
        ck_assert_int_eq(read(ready[0], &byte, 1), 1);
        close(ready[0]);
        return pid;
}

/* Starts processes that all miss, and wait for each other or for a holder. */
static void start_many(pid_t pids[AT_ONCE], char names[AT_ONCE][16]) {
        for (int i = 0; i < AT_ONCE; i++) {
                snprintf(names[i], 16, "logits%d", i);
                pids[i] = fork();
                ck_assert_int_ge(pids[i], 0);
                if (pids[i] == 0) {
                        struct way w = {.depth = "4", .logits = names[i]};
                        char line[16];
                        struct output o = run(&w);

                        snprintf(line, sizeof line, "line%d", i);
                        folder_write_text(line, o.out);
                        if (o.status != 0)
                                fputs(o.err, stderr);
                        _exit(o.status);
                }
        }
}

static uint64_t finish_many(const pid_t pids[AT_ONCE], char names[AT_ONCE][16],
                            struct answer expected) {
        uint64_t made = 0;

        for (int i = 0; i < AT_ONCE; i++) {
                struct way w = {.logits = names[i]};
                char line[16];
                struct answer a;
                size_t size;
                int status;

                ck_assert_int_eq(waitpid(pids[i], &status, 0), pids[i]);
                ck_assert_int_eq(status, 0);
                snprintf(line, sizeof line, "line%d", i);
                a = take((struct output){0, folder_read(line, &size), ""}, &w);
                check_same(a, expected);
                ck_assert_uint_eq(member(a, "found_layers") + member(a, "made_layers"), 4);
                made += member(a, "made_layers");
        }
        return made;
}

static void wait_for_clients(struct conn *conn, uint32_t n) {
        WAIT_UNTIL(facts(conn).clients >= n);
        ck_assert_uint_eq(facts(conn).clients, n);
        usleep(100000); /* time to get from attaching to waiting */
}

START_TEST(another_client_computes_when_the_holder_is_killed) {
        struct answer alone = ask_alone((struct way){.depth = "4"});
        struct conn *conn = instance_connect(&server);
        struct kvd_geometry geometry;
        char names[AT_ONCE][16];
        pid_t pids[AT_ONCE], holder;

        ask((struct way){.depth = "4", .prefix = "16"}); /* makes the space */
        memcpy(&geometry, facts(conn).geometry.data, sizeof geometry);
        holder = hold_lease(&geometry);
        start_many(pids, names);
        wait_for_clients(conn, AT_ONCE + 1);
        kill(holder, SIGKILL);
        waitpid(holder, NULL, 0);
        ck_assert_uint_eq(finish_many(pids, names, alone), 4); /* layers of one entry */
        ck_assert_uint_eq(counter(conn, KVD_SPACE_LEASES), 3);
        ck_assert_uint_eq(counter(conn, KVD_SPACE_LEASES_LOST), 1);
        conn_close(conn);
        check_invariants();
}
END_TEST

START_TEST(one_client_computes_while_the_others_wait) {
        struct answer alone = ask_alone((struct way){.depth = "4"});
        struct conn *conn = instance_connect(&server);
        char names[AT_ONCE][16];
        pid_t pids[AT_ONCE];

        start_many(pids, names);
        ck_assert_uint_eq(finish_many(pids, names, alone), 4);
        ck_assert_uint_ge(counter(conn, KVD_SPACE_LEASES), 1);
        ck_assert_uint_eq(counter(conn, KVD_SPACE_LEASES_LOST), 0);
        ck_assert_uint_eq(counter(conn, KVD_SPACE_SEALED), 4 * DIV_UP(PREFIX, 16));
        conn_close(conn);
        check_invariants();
}
END_TEST

/* ---- trouble ---- */

/* An entry of this model has 63 blocks of 9 KiB per layer: 4 MiB hold seven layers of one entry. */
START_TEST(a_full_pool_is_not_an_error) {
        static const char *const tiny_pool[] = {"daemon.pool=4M", "daemon.segment=4M", NULL};
        struct way w = {.depth = "8", .prefix = "1000"};
        struct answer a;

        instance_stop(&server);
        instance_again(&server, tiny_pool);
        diffusion_model("deep", &deep, 1);
        ck_assert_int_eq(rename(folder_path("model"), folder_path("small")), 0);
        ck_assert_int_eq(rename(folder_path("deep"), folder_path("model")), 0);
        write_tokens("ids", 1010, 0);
        a = ask(w);
        check_same(a, ask_alone(w));
        ck_assert_uint_eq(member(a, "refused"), 1);
        ck_assert_uint_gt(member(a, "shared_bytes"), 0);
        ck_assert_uint_gt(member(a, "private_bytes"), 0);
        a = ask(w);
        check_same(a, ask_alone(w));
        ck_assert_uint_gt(member(a, "found_layers"), 0);
        for (uint32_t salt = 1; salt < 6; salt++) { /* prefixes that evict each other */
                write_tokens("ids", 1010, salt);
                w.depth = "4";
                a = ask(w);
                check_same(a, ask_alone(w));
                ck_assert_uint_eq(member(a, "refused"), 0);
                ck_assert_uint_eq(member(ask(w), "found_layers"), 4);
        }
        check_invariants();
}
END_TEST

/* The daemon dies at a different time in each round, and is sometimes restarted. */
START_TEST(the_daemons_death_is_not_an_error) {
        struct way w = {.depth = "4"};
        struct answer alone = ask_alone(w);

        for (int round = 0; round < 14; round++) {
                struct answer a;
                int status;
                size_t size;
                pid_t pid = fork();

                ck_assert_int_ge(pid, 0);
                if (pid == 0) {
                        struct output o = run(&w);

                        folder_write_text("line", o.out);
                        if (o.status != 0)
                                fputs(o.err, stderr);
                        _exit(o.status);
                }
                usleep((useconds_t)round * 2000);
                instance_kill(&server);
                if (round % 2)
                        instance_again(&server, small_pool);
                ck_assert_int_eq(waitpid(pid, &status, 0), pid);
                ck_assert_int_eq(status, 0);
                a = take((struct output){0, folder_read("line", &size), ""}, &w);
                check_same(a, alone);
                if (round % 2 == 0)
                        instance_again(&server, small_pool);
        }
}
END_TEST

START_TEST(without_a_daemon_it_works_and_says_so) {
        struct way w = {.depth = "2"};
        struct answer alone = ask_alone(w);
        struct output o;

        instance_stop(&server);
        o = run(&w);
        check_same(take(o, &w), alone);
        ck_assert_ptr_nonnull(strstr(o.err, "not sharing"));
        instance_again(&server, small_pool);
}
END_TEST

/* A causal space of the same name and geometry is not used. */
START_TEST(a_causal_space_is_not_reused) {
        struct way w = {.depth = "2"};
        struct answer alone = ask_alone(w);
        struct kvd_geometry geometry;
        struct conn *conn = instance_connect(&server);
        struct output o;
        kvd *connection;
        kvd_space *space;

        ask(w);
        memcpy(&geometry, facts(conn).geometry.data, sizeof geometry);
        conn_close(conn);
        instance_stop(&server);
        instance_again(&server, small_pool);
        ck_assert_int_eq(kvd_open(server.socket, &connection), 0);
        ck_assert_int_eq(kvd_space_open(connection, "model", &geometry, NULL, &space), 0);
        o = run(&w);
        check_same(take(o, &w), alone);
        ck_assert_ptr_nonnull(strstr(o.err, "kind"));
        kvd_space_close(space);
        kvd_close(connection);
}
END_TEST

/* ---- the space decides ---- */

static void set(const char *key, const char *value) {
        struct kvd_msg_space_set request = {kvd_slice_of("model"),
                                            {0},
                                            kvd_slice_of(key),
                                            kvd_slice_of(value),
                                            0};
        struct conn *conn = instance_connect(&server);

        ck_assert_msg(conn_call(conn, KVD_MSG_space_set, &request, NULL) == 0, "%s: %s", key,
                      kvd_error());
        conn_close(conn);
}

START_TEST(the_space_says_whether_and_how_often) {
        const char *model = folder_path("model"), *ids = folder_path("ids");
        struct output off, on;

        off = kvlm("--model", model, "--socket", server.socket, "--json", "--tokens", ids,
                   "--prefix-tokens", "250", "--gen-length", "8", NULL);
        ck_assert_msg(off.status == 0, "%s", off.err);
        ck_assert_ptr_nonnull(strstr(off.out, "\"bicache\": \"off\""));
        set("bicache", "on");
        set("bicache.delta", "3");
        on = kvlm("--model", model, "--socket", server.socket, "--json", "--tokens", ids,
                  "--prefix-tokens", "250", "--gen-length", "8", NULL);
        ck_assert_msg(on.status == 0, "%s", on.err);
        ck_assert_ptr_nonnull(strstr(on.out, "\"bicache\": \"on\""));
        ck_assert_uint_eq(member((struct answer){.line = on.out}, "b"), 1);
        ck_assert_uint_eq(member((struct answer){.line = on.out}, "refreshes"), 3);
}
END_TEST

/* The number of layers for a mean of similarities, by the rule of the official code. */
static uint32_t layers_alike(const float *mean, uint32_t n) {
        uint32_t alike = 0;

        while (alike < n && mean[alike] > 0.97f)
                alike++;
        return MAX(alike, 1);
}

/* The i-th number of a list. */
static double listed(const char *line, const char *name, uint32_t i) {
        char key[32], *at;

        snprintf(key, sizeof key, "\"%s\": [", name);
        at = strstr(line, key);
        ck_assert_ptr_nonnull(at);
        for (at += strlen(key); i > 0; i--)
                at = strchr(at, ',') + 1;
        return strtod(at, NULL);
}

/*
 * Samples are sent to the space, whose worker computes the same similarities as kvlm. The next
 * request uses the table that the daemon makes of them.
 */
START_TEST(the_space_makes_the_table) {
        struct kvd_msg_profile request = {.space = kvd_slice_of("model"), .op = 3};
        struct conn *conn = instance_connect(&server);
        struct kvd_msg_profile_reply reply;
        float mean[4];
        struct output o;
        const char *line;
        size_t size;

        o = kvlm("--model", folder_path("model"), "--socket", server.socket, "--tokens",
                 folder_path("ids"), "--prefix-tokens", "290", "--gen-length", "10",
                 "--profile-out", folder_path("profile"), NULL);
        ck_assert_msg(o.status == 0 && !*o.err, "status %d: %s", o.status, o.err);
        ck_assert_int_eq(conn_call(conn, KVD_MSG_profile, &request, &reply), 0);
        ck_assert_uint_eq(reply.layers, small.layers);
        ck_assert_uint_eq(reply.def, 1);
        ck_assert_uint_eq(reply.similarity.size, sizeof mean); /* for one ratio */
        memcpy(mean, reply.similarity.data, sizeof mean);
        line = folder_read("profile", &size);
        for (uint32_t i = 0; i < small.layers; i++)
                ck_assert_double_eq_tol((double)mean[i], listed(line, "sim", i), 1e-5);
        set("bicache", "on");
        o = kvlm("--model", folder_path("model"), "--socket", server.socket, "--tokens",
                 folder_path("ids"), "--json", "--prefix-tokens", "290", "--gen-length", "10",
                 NULL);
        ck_assert_msg(o.status == 0 && !*o.err, "status %d: %s", o.status, o.err);
        ck_assert_uint_eq(member((struct answer){.line = o.out}, "r"), 94); /* 290 of 310: 93.5 */
        ck_assert_uint_eq(member((struct answer){.line = o.out}, "b"),
                          layers_alike(mean, small.layers));
        ck_assert_uint_eq(member((struct answer){.line = o.out}, "made_layers"),
                          layers_alike(mean, small.layers));
        conn_close(conn);
        check_invariants();
}
END_TEST

/* A table that was made elsewhere, with ratios of the prompt only. */
START_TEST(the_space_takes_a_table) {
        uint8_t depths[101];
        struct kvd_msg_profile request = {.space = kvd_slice_of("model"),
                                          .op = 4,
                                          .depth = {depths, sizeof depths},
                                          .def = 2};
        struct conn *conn = instance_connect(&server);
        struct kvd_msg_profile_reply reply;
        struct output o;

        ask((struct way){.depth = "1", .prefix = "16"}); /* makes the space */
        for (int r = 0; r <= 100; r++)
                depths[r] = r < 83 ? 1 : r == 83 ? 2 : 3;
        set("bicache", "on");
        set("bicache.r_def", "prompt_only");
        ck_assert_msg(conn_call(conn, KVD_MSG_profile, &request, &reply) == 0, "%s", kvd_error());
        o = kvlm("--model", folder_path("model"), "--socket", server.socket, "--tokens",
                 folder_path("ids"), "--json", "--prefix-tokens", "250", "--gen-length", "50",
                 NULL);
        ck_assert_msg(o.status == 0 && !*o.err, "status %d: %s", o.status, o.err);
        /* 250 of 300, not of 350 */
        ck_assert_uint_eq(member((struct answer){.line = o.out}, "r"), 83);
        ck_assert_uint_eq(member((struct answer){.line = o.out}, "b"), 2);
        /* the largest number of the table */
        ck_assert_uint_eq(member((struct answer){.line = o.out}, "made_layers"), 3);
        conn_close(conn);
}
END_TEST

SUITE("kvlm: BiCache in the pool", kvlm_program = argc > 1 ? argv[1] : "kvlm",
      FIXTURE(prepare, clean_up),
      TESTS(bits_are_those_of_private_memory, deeper_requests_continue_from_the_last_stored_state,
            a_prefix_is_found_whole_or_not_at_all, what_was_evicted_is_made_again,
            what_left_the_pool_comes_from_the_file, one_client_computes_while_the_others_wait,
            another_client_computes_when_the_holder_is_killed, a_full_pool_is_not_an_error,
            the_daemons_death_is_not_an_error, without_a_daemon_it_works_and_says_so,
            a_causal_space_is_not_reused, the_space_says_whether_and_how_often,
            the_space_makes_the_table, the_space_takes_a_table))
