/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Much background work at once: how long does the daemon's loop not look at its sockets? A client
 * with 100 sequences of 1,000 blocks ends. Another shares overlapping steps of reasoning in long
 * sequences. A third closes its sequences while all their blocks leave. Others' requests must not
 * wait. The test measures the daemon's own processor time before each answer, which a busy machine
 * does not change.
 */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd_methods.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"

#define BT 4u

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 8,
                                             .block_tokens = BT,
                                             .dtype = KVD_F32,
                                             .vocab = 100000};

static struct instance d;

/* ---- a client -------------------------------------------------------------------------------- */

static void must(int64_t r, const char *what) {
        if (r < 0)
                die("%s: %s", what, kvd_error());
}

#define MUST(call) must(call, #call)

static kvd_space *open_space(uint32_t blocks, const char *const *settings) {
        const struct kvd_space_options options = {.max_blocks = blocks};
        kvd_space *space;
        kvd *handle;

        MUST(kvd_open(d.socket, &handle));
        MUST(kvd_space_open(handle, "load", &geometry, &options, &space));
        for (; settings && *settings; settings += 2)
                MUST(kvd_space_set(space, settings[0], atof(settings[1])));
        return space;
}

static void grow(kvd_space *space, kvd_sequence *sequence, uint32_t n) {
        static struct kvd_block blocks[1024];
        static uint32_t tokens[1024 * BT];

        for (uint32_t done = 0, got; done < n; done += got) {
                int r = kvd_alloc(space, MIN(n - done, 1024), blocks);

                must(r, "kvd_alloc");
                got = (uint32_t)r;
                for (uint32_t i = 0; i < got; i++)
                        memset(blocks[i].data, (int)i, kvd_block_bytes(&geometry));
                for (uint32_t i = 0; i < got * BT; i++)
                        tokens[i] = (done * BT + i) % 1000;
                must(kvd_sequence_append(sequence, got, blocks, tokens, got * BT),
                     "kvd_sequence_append");
        }
}

static kvd_sequence *new_sequence(kvd_space *space, uint32_t n) {
        kvd_sequence *sequence;

        MUST(kvd_sequence_open(space, n, &sequence));
        grow(space, sequence, n);
        return sequence;
}

/* ---- measuring ------------------------------------------------------------------------------- */

static struct seen {
        struct work_seen work;
        _Atomic uint32_t answers;
} * seen; /* in memory that all processes share */

/*
 * Measures the daemon's work until it answers, before which it does not look at its sockets. Work
 * that it did after the answer, while this process had no processor, is left out.
 */
static struct kvd_msg_daemon_info_reply ask(struct conn *conn) {
        struct kvd_msg_daemon_info_reply reply = {0};
        struct work_begun began = work_begin(&d);

        if (conn_call(conn, KVD_MSG_daemon_info, NULL, &reply) < 0)
                die("%s", kvd_error());
        work_see(&seen->work, work_since(&d, &began));
        seen->answers++;
        return reply;
}

/* Discards the cost of making the space and its memory. */
static void begin(void) {
        seen->work = (struct work_seen){0};
}

/* Lets the daemon work on until it has given n more answers. */
static void wait_for_answers(uint32_t n) {
        uint32_t end = seen->answers + n;

        WAIT_UNTIL((int32_t)(seen->answers - end) >= 0);
}

static bool everything_is_back(struct conn *conn) {
        struct kvd_msg_space_info_reply space = {0};

        ask(conn);
        space_facts(conn, 0, &space);
        return !space.sequences && !space.private && !space.spilled && !space.vague;
}

/* Runs a client in its own process, with a new daemon; afterwards everything must be freed. */
static void measure(const char *name, void (*run)(void)) {
        struct conn *conn;
        uint64_t turn_us;
        int status;
        pid_t pid;

        instance_start(&d, SETTINGS("daemon.segment=4M", "daemon.pages=small", "daemon.log=error"));
        conn = instance_connect(&d);
        pid = fork();
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                run();
                _exit(0);
        }
        while (waitpid(pid, &status, WNOHANG) == 0)
                ask(conn);
        if (status)
                die("%s: the client ended with %#x", name, status);
        WAIT_UNTIL(everything_is_back(conn));
        turn_us = ask(conn).turn_max_us;
        conn_close(conn);
        printf("%-44s longest turn %6llu us, at most %6llu us of work before an answer\n", name,
               (unsigned long long)turn_us, (unsigned long long)seen->work.most_ns / 1000);
        fflush(stdout);
        instance_end_clean(&d);
        if (!work_is_bounded(&seen->work))
                die("%s: the loop did not look at its sockets for too long", name);
}

/* ---- what clients do ------------------------------------------------------------------------- */

static void ends_with_100_sequences(void) {
        kvd_space *space = open_space(110000, NULL);

        for (uint32_t i = 0; i < 100; i++)
                new_sequence(space, 1000);
        begin();
}

static const char *const sharing[] =
        {"memshare", "1", "memshare.min_step_tokens", "1", "memshare.cross_seq", "1", NULL};

/* Each step has all entries, and so has each step that it is compared with. */
static void steps_over_one_another(void) {
        kvd_space *space = open_space(40000, sharing);
        kvd_sequence *sequences[4];

        for (uint32_t i = 0; i < ARRAY_SIZE(sequences); i++)
                sequences[i] = new_sequence(space, 8000);
        begin();
        for (uint32_t k = 0; k < 500; k++)
                for (uint32_t i = 0; i < ARRAY_SIZE(sequences); i++)
                        MUST(kvd_sequence_step(sequences[i], k % 10, 8000 * BT - 20 + k % 10));
        wait_for_answers(1000);
        for (uint32_t i = 0; i < ARRAY_SIZE(sequences); i++)
                MUST(kvd_sequence_sync(sequences[i]));
        MUST(kvd_space_set(space, "memshare", 0));
}

/* Steps in which nothing can be replaced: the daemon looks at one after another. */
static void steps_without_blocks(void) {
        kvd_space *space = open_space(10000, sharing);
        kvd_sequence *sequence = new_sequence(space, 8000);

        MUST(kvd_space_set(space, "memshare.recent_guard", 65536));
        begin();
        for (uint32_t k = 0; k < 4000; k++)
                MUST(kvd_sequence_step(sequence, k * 7, 3000));
        wait_for_answers(500);
        MUST(kvd_space_set(space, "memshare.recent_guard", 2));
        MUST(kvd_space_set(space, "memshare", 0));
}

static const char *const cooling[] = {"kvreviver", "1", "kvreviver.budget", "0.1", NULL};

/* Exact copies and sketches of 20 sequences, all of which end at once. */
static void ends_while_blocks_leave(void) {
        kvd_space *space = open_space(25000, cooling);
        uint32_t slots[1000];
        kvd_sequence *sequences[20];

        for (uint32_t i = 0; i < 1000; i++)
                slots[i] = i;
        for (uint32_t i = 0; i < ARRAY_SIZE(sequences); i++)
                sequences[i] = new_sequence(space, 1000);
        begin();
        for (uint32_t i = 0; i < ARRAY_SIZE(sequences); i++)
                MUST(kvd_sequence_cool(sequences[i], 1000, slots, KVD_COOL_VAGUE));
        for (uint32_t k = 0; k < 100; k++) {
                for (uint32_t i = 0; i < ARRAY_SIZE(sequences); i++)
                        MUST(kvd_sequence_sync(sequences[i]));
                usleep(10000);
        }
        for (uint32_t i = 0; i < ARRAY_SIZE(sequences) / 2; i++)
                MUST(kvd_sequence_revive(sequences[i], 1000, slots, KVD_REVIVE_BOTH));
}

int main(void) {
        seen = mmap(NULL, sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        signal(SIGPIPE, SIG_IGN);
        measure("100 sequences of 1,000 blocks end", ends_with_100_sequences);
        measure("steps over one another", steps_over_one_another);
        measure("steps without blocks", steps_without_blocks);
        measure("20 sequences end while they leave", ends_while_blocks_leave);
        return 0;
}
