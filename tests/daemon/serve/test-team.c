/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A scheduler that allocates blocks, and a worker that fills them, as one team (kvd_join):
 *
 *      Process S joins, opens the space, and allocates blocks on request
 *      Process W joins, and opens the space
 *      The daemon is killed and restarted: S and W form the same team there
 *      S is killed: its unsealed blocks stay reserved while W lives, and are freed afterwards
 */

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

enum { TAKEN = 3 };

static const uint8_t team[16] = "a team of two";

static struct instance server;

struct process {
        pid_t pid;
        int tell, hear; /* pipes: a byte to the process requests blocks, a byte back confirms */
};

/* ---- the processes --------------------------------------------------------------------------- */

static kvd_space *open_space(kvd *handle) {
        const struct kvd_geometry geometry = {.layers = 1,
                                              .kv_heads = 1,
                                              .head_dim = 8,
                                              .dtype = KVD_F32,
                                              .vocab = 9};
        kvd_space *space;

        if (kvd_space_open(handle, "team", &geometry, NULL, &space) < 0)
                _exit(2);
        return space;
}

/* The first allocation after a restart may fail because the old connection has ended. */
static void take_blocks(kvd_space *space) {
        struct kvd_block blocks[TAKEN];

        for (int tries = 0, got = 0; got < TAKEN; tries++) {
                int r = kvd_alloc(space, (uint32_t)(TAKEN - got), blocks + got);

                if (r < 0 && tries > 100)
                        _exit(3);
                got += MAX(r, 0);
        }
}

static _Noreturn void act(int hear, int tell) {
        kvd_space *space;
        kvd *handle;
        char byte = 0;

        if (kvd_open(server.socket, &handle) < 0 || kvd_join(handle, team) < 0)
                _exit(1);
        space = open_space(handle);
        while (write(tell, &byte, 1) == 1 && read(hear, &byte, 1) == 1)
                take_blocks(space);
        _exit(0);
}

static void start(struct process *p) {
        int to[2], from[2];
        char byte;

        ck_assert(pipe(to) == 0 && pipe(from) == 0);
        p->pid = fork();
        if (p->pid == 0)
                act(to[0], from[1]);
        close(to[0]);
        close(from[1]);
        p->tell = to[1];
        p->hear = from[0];
        ck_assert_int_eq(read(p->hear, &byte, 1), 1);
}

static void tell(const struct process *p) {
        char byte = 0;

        ck_assert(write(p->tell, &byte, 1) == 1 && read(p->hear, &byte, 1) == 1);
}

static void end(struct process *p) {
        kill(p->pid, SIGKILL);
        waitpid(p->pid, NULL, 0);
        close(p->tell);
        close(p->hear);
}

/* ---- the daemon's state ---------------------------------------------------------------------- */

static struct kvd_msg_space_info_reply space_state(struct conn *conn) {
        struct kvd_msg_space_info_reply reply;

        space_facts(conn, 0, &reply);
        return reply;
}

static void wait_for_limbo(struct conn *conn, uint64_t filling, uint64_t limbo) {
        struct kvd_msg_space_info_reply now;

        for (int tries = 0; tries < PATIENCE_MS; tries++) {
                now = space_state(conn);
                if (now.filling == filling && now.limbo == limbo)
                        return;
                usleep(1000);
        }
        ck_abort_msg("%llu filling, %llu in limbo", (unsigned long long)now.filling,
                     (unsigned long long)now.limbo);
}

START_TEST(a_scheduler_dies_while_its_worker_writes) {
        struct process scheduler, worker;
        struct conn *conn;
        uint64_t taken;

        instance_start(&server, NULL);
        start(&scheduler);
        start(&worker);
        if (_i) {
                instance_kill(&server);
                instance_again(&server, NULL);
                tell(&worker);
        }
        tell(&scheduler);
        conn = instance_connect(&server);
        taken = space_state(conn).filling;
        ck_assert_uint_ge(taken, TAKEN);
        end(&scheduler);
        if (_i)
                taken /= 2; /* the other half is the worker's */
        wait_for_limbo(conn, _i ? taken : 0, taken);
        end(&worker);
        wait_for_limbo(conn, 0, 0);
        expect_clean(conn);
        conn_close(conn);
        instance_stop(&server);
        instance_sweep(&server);
}
END_TEST

START_TEST(a_team_has_a_name) {
        static const uint8_t none[16], other[16] = {1};
        kvd *handle;

        instance_start(&server, NULL);
        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_int_eq(kvd_join(handle, none), -EINVAL);
        ck_assert_int_eq(kvd_join(handle, team), 0);
        ck_assert_int_eq(kvd_join(handle, team), 0);
        ck_assert_int_eq(kvd_join(handle, other), -EBUSY);
        kvd_close(handle);
        instance_stop(&server);
        instance_sweep(&server);
}
END_TEST

SUITE("team", LOOPS(2, a_scheduler_dies_while_its_worker_writes), TESTS(a_team_has_a_name))
