/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Clients that are killed, and a daemon that is stopped.
 *
 *      reclaim     kill -9 a client that pins and fills: how long until its blocks are free? (Promised: 100 ms. Judged
 *                  by the number of requests that the daemon answers before.)
 *      stopped     SIGSTOP the daemon: lookups still hit, and calls that need the daemon end at their deadline.
 *                  Afterwards all works, late answers were undone, and blocks whose seal was not answered were not
 *                  written again.
 *      full        SIGSTOP the daemon with its backlog full: kvd_open ends at its deadline, too
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/conn/deadline.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/raw.h"
#include "tests/daemon/hostile/victim.h"
#include "tests/lib/waits.h"
#include "tests/lib/instance.h"

#define SLACK_MS 4500u /* less than a second deadline */
#define LIMIT_SECONDS 120u

static uint64_t now_us(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ---- clients --------------------------------------------------------------------------------- */

struct user {
        struct kvd *handle;
        struct kvd_space *space;
};

static struct user user_open(const struct instance *d, uint32_t kind) {
        struct kvd_space_options options = {.kind = kind};
        struct user u;

        if (kvd_open(d->socket, &u.handle) < 0 ||
            kvd_space_open(u.handle, kind == KVD_CAUSAL ? "s" : "whole", &victim_geometry, &options,
                           &u.space) < 0)
                die("%s", kvd_error());
        return u;
}

static void user_close(struct user *u) {
        kvd_space_close(u->space);
        kvd_close(u->handle);
}

static uint32_t take(struct user *u, uint32_t n, struct kvd_block *blocks) {
        uint32_t got = 0;
        int r = 0;

        while (got < n && (r = kvd_alloc(u->space, n - got, blocks + got)) > 0)
                got += (uint32_t)r;
        if (r < 0)
                die("kvd_alloc: %s", kvd_error());
        return got;
}

static void publish(struct user *u, uint32_t chain, uint32_t n) {
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT];
        struct kvd_block blocks[VICTIM_BLOCKS];
        struct kvd_pin pin = {0};

        victim_tokens(chain, tokens);
        take(u, n, blocks);
        for (uint32_t i = 0; i < n; i++)
                victim_block_fill(blocks[i].data, chain, i);
        if (kvd_seal(u->space, &pin, n, blocks, tokens, n * VICTIM_BT) != (int)n)
                die("kvd_seal: %s", kvd_error());
        kvd_unpin(u->space, &pin);
}

/* Number of blocks found of a chain; all must be right. */
static uint32_t find(struct user *u, uint32_t chain) {
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT], ids[VICTIM_BLOCKS], n;
        struct kvd_pin pin = {0};

        victim_tokens(chain, tokens);
        if (kvd_lookup(u->space, 0, tokens, VICTIM_BLOCKS * VICTIM_BT, ids, VICTIM_BLOCKS, &pin) <
            0)
                die("kvd_lookup: %s", kvd_error());
        n = pin.n_blocks;
        for (uint32_t i = 0; i < n; i++)
                if (!victim_block_is_right(kvd_pin_block(&pin, ids[i]), chain, i))
                        die("wrong bytes in chain %u", chain);
        kvd_unpin(u->space, &pin);
        return n;
}

/* ---- reclaim --------------------------------------------------------------------------------- */

#define KILLS 20u
#define MOST_ASKED 5000u /* a tenth of a second, if nothing else runs */

static _Noreturn void fill_and_wait(const struct instance *d, int ready) {
        struct kvd_block blocks[40];
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT], ids[VICTIM_BLOCKS];
        struct kvd_pin pin = {0};
        struct user u = user_open(d, KVD_CAUSAL);

        victim_tokens(1, tokens);
        kvd_lookup(u.space, 0, tokens, VICTIM_BLOCKS * VICTIM_BT, ids, VICTIM_BLOCKS, &pin);
        take(&u, ARRAY_SIZE(blocks), blocks);
        if (write(ready, "r", 1) != 1)
                die("pipe");
        for (;;)
                pause();
}

static uint64_t filling_of(struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};

        space_facts(conn, 0, &info);
        return info.filling + info.limbo;
}

/* Returns how often the daemon was asked until all blocks were free, and how long that took. */
static uint32_t reclaim_once(const struct instance *d, struct conn *conn, const int *ready,
                             uint64_t *us) {
        pid_t pid = fork();
        uint32_t asked = 1;
        uint64_t began;
        char byte;

        if (pid == 0)
                fill_and_wait(d, ready[1]);
        if (read(ready[0], &byte, 1) != 1)
                die("pipe");
        if (filling_of(conn) < 40)
                die("the client does not fill blocks");
        began = now_us();
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        while (filling_of(conn) && asked <= MOST_ASKED)
                asked++;
        *us = now_us() - began;
        return asked;
}

static int compare(const void *a, const void *b) {
        const uint64_t *x = a, *y = b;

        return *x < *y ? -1 : *x > *y;
}

static void reclaim(const struct instance *d, struct conn *conn) {
        uint32_t most = 0;
        uint64_t us[KILLS];
        int ready[2];

        if (pipe(ready) < 0)
                die("pipe");
        for (uint32_t i = 0; i < KILLS; i++)
                most = MAX(most, reclaim_once(d, conn, ready, &us[i]));
        qsort(us, KILLS, sizeof *us, compare);
        printf("reclaim: median %llu us, longest %llu us of %u kills, asked %u times at most\n",
               (unsigned long long)us[KILLS / 2], (unsigned long long)us[KILLS - 1], KILLS, most);
        if (most > MOST_ASKED)
                die("a killed client's blocks come back too late");
        close(ready[0]);
        close(ready[1]);
}

/* ---- stopped --------------------------------------------------------------------------------- */

static void expect_timeout(int64_t r, uint64_t began, const char *what) {
        uint64_t ms = waits_ms(began);

        if (r != -ETIMEDOUT)
                die("%s of a stopped daemon: %lld (%s)", what, (long long)r, kvd_error());
        if (ms + 100 < DEADLINE_MS || ms > DEADLINE_MS + SLACK_MS)
                die("%s waited for %llu ms", what, (unsigned long long)ms);
}

enum { SEAL, ALLOCATE, LEASE, OPEN_SPACE, N_CALLS };

struct caller { /* one process per call, since each waits for its deadline */
        const struct instance *daemon;
        int go, done; /* pipes */
};

static void wait_byte(int fd) {
        char byte;

        if (read(fd, &byte, 1) != 1)
                die("pipe");
}

/* Waits until the daemon is stopped. From then on, timeouts pass at once (waits.h). */
static void wait_for_the_stop(const struct caller *c) {
        if (write(c->done, "r", 1) != 1)
                die("pipe");
        wait_byte(c->go);
        waits_pass = true;
}

/* Waits until the daemon runs again. */
static void wait_for_its_end(const struct caller *c) {
        waits_pass = false;
        if (write(c->done, "d", 1) != 1)
                die("pipe");
        wait_byte(c->go);
}

/*
 * Seals blocks without an answer. From then on the blocks may be freed, but neither written nor
 * handed out again.
 */
static void seal_unanswered(const struct caller *c) {
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT];
        struct user u = user_open(c->daemon, KVD_CAUSAL);
        struct kvd_block blocks[4], again[4];
        struct kvd_pin pin = {0};
        uint64_t began;

        victim_tokens(50, tokens);
        take(&u, 4, blocks);
        for (uint32_t i = 0; i < 4; i++)
                victim_block_fill(blocks[i].data, 50, i);
        wait_for_the_stop(c);
        began = waits_begin();
        expect_timeout(kvd_seal(u.space, &pin, 4, blocks, tokens, 4 * VICTIM_BT), began,
                       "kvd_seal");
        for (uint32_t i = 0; i < 4; i++)
                if (blocks[i].data || pin.view)
                        die("blocks that may be sealed can still be written");
        kvd_free(u.space, 4, blocks); /* this is not answered either */
        wait_for_its_end(c);
        take(&u, 4, again);
        for (uint32_t i = 0; i < 4; i++)
                memset(again[i].data, 0xee, kvd_block_bytes(&victim_geometry));
        find(&u, 50);
        kvd_free(u.space, 4, again);
        user_close(&u);
}

static void other_unanswered(const struct caller *c, int which) {
        struct user u = user_open(c->daemon, which == LEASE ? KVD_BIDIRECTIONAL : KVD_CAUSAL);
        uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        struct kvd_block blocks[100];
        struct kvd_space *space;
        uint64_t began;
        int64_t r;

        wait_for_the_stop(c);
        began = waits_begin();
        r = which == ALLOCATE ? kvd_alloc(u.space, 100, blocks) :
            which == LEASE    ? kvd_lease(u.space, tokens, 8, 0) :
                                kvd_space_open(u.handle, "s", &victim_geometry, NULL, &space);
        expect_timeout(r, began, "a call");
        wait_for_its_end(c);
        /* another request: the late answer arrives before its own */
        if (which == LEASE && kvd_lease(u.space, tokens, 2, 0) != 1)
                die("kvd_lease: %s", kvd_error());
        if (which == LEASE)
                kvd_lease_end(u.space, tokens, 2);
        else
                publish(&u, 60 + (uint32_t)which, 3);
        if (write(c->done, "u", 1) != 1)
                die("pipe");
        wait_byte(c->go);
        user_close(&u);
}

static void start_caller(struct caller *c, const struct instance *d, int which, pid_t *pid) {
        int go[2], done[2];

        if (pipe(go) < 0 || pipe(done) < 0)
                die("pipe");
        *c = (struct caller){d, go[0], done[1]};
        *pid = fork();
        if (*pid == 0) {
                alarm(LIMIT_SECONDS);
                if (which == SEAL)
                        seal_unanswered(c);
                else
                        other_unanswered(c, which);
                _exit(0);
        }
        *c = (struct caller){d, go[1], done[0]};
        wait_byte(c->done);
}

static void go_on(const struct caller *c) {
        if (write(c->go, "g", 1) != 1)
                die("pipe");
}

#define LOOKUPS 2000u

/* Looks up while the clock advances by more than any call's deadline. */
static void look_up(struct user *u) {
        for (uint32_t n = 0; n < LOOKUPS; n++) {
                if (find(u, 1) != VICTIM_BLOCKS)
                        die("a lookup missed while the daemon was stopped");
                waits_passed_ns += 2 * DEADLINE_MS * UINT64_C(1000000) / LOOKUPS;
        }
}

static uint64_t held_late(struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};
        uint64_t left = 0;

        for (uint32_t n = 0; n < 2; n++) {
                space_facts(conn, n, &info);
                /* magazines of three clients */
                left += info.leases + (info.filling > 3 * 32 ? info.filling : 0);
        }
        return left;
}

/*
 * Late answers were undone: only the checker's own client holds anything, though all clients still
 * live.
 */
static void expect_undone(struct conn *conn) {
        WAIT_UNTIL(held_late(conn) == 0);
}

static void stopped(const struct instance *d, struct conn *conn, struct user *u) {
        struct caller callers[N_CALLS];
        pid_t pids[N_CALLS];
        int status;

        for (int i = 0; i < N_CALLS; i++)
                start_caller(&callers[i], d, i, &pids[i]);
        kill(d->pid, SIGSTOP);
        for (int i = 0; i < N_CALLS; i++)
                go_on(&callers[i]);
        look_up(u);
        for (int i = 1; i < N_CALLS; i++)
                wait_byte(callers[i].done);
        wait_byte(callers[SEAL].done); /* its kvd_free has waited, too */
        kill(d->pid, SIGCONT);
        for (int i = 0; i < N_CALLS; i++)
                go_on(&callers[i]);
        for (int i = 1; i < N_CALLS; i++)
                wait_byte(callers[i].done);
        expect_undone(conn);
        for (int i = 0; i < N_CALLS; i++) {
                if (i != SEAL)
                        go_on(&callers[i]);
                waitpid(pids[i], &status, 0);
                if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                        die("caller %d ended with status %#x", i, status);
                close(callers[i].go);
                close(callers[i].done);
        }
        find(u, 50);
        printf("stopped: %u lookups hit while the daemon was stopped; late answers undone\n",
               LOOKUPS);
}

/* ---- a full backlog -------------------------------------------------------------------------- */

#define BACKLOG_MOST 600u

static void full_backlog(const struct instance *d) {
        int flood[BACKLOG_MOST], status;
        uint32_t n;
        pid_t pid;

        kill(d->pid, SIGSTOP);
        n = raw_fill_backlog(d->socket, BACKLOG_MOST, flood);
        pid = fork();
        if (pid == 0) {
                uint64_t began = waits_begin();
                struct kvd *handle;

                alarm(LIMIT_SECONDS);
                waits_pass = true;
                expect_timeout(kvd_open(d->socket, &handle), began, "kvd_open");
                _exit(0);
        }
        waitpid(pid, &status, 0);
        for (uint32_t i = 0; i < n; i++)
                close(flood[i]);
        kill(d->pid, SIGCONT);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                die("kvd_open does not return from a daemon that is stopped and has a full "
                    "backlog: %#x",
                    status);
}

int main(void) {
        struct instance d;
        struct conn *conn;
        struct user u;
        uint32_t fds;

        deadline_ms = DEADLINE_MS;
        instance_start(&d, SETTINGS("daemon.pool=8M", "daemon.segment=256K", "daemon.pages=small",
                                    "daemon.log=error"));
        fds = instance_fds(&d);
        waits_watch();
        conn = instance_connect(&d);
        u = user_open(&d, KVD_CAUSAL);
        publish(&u, 1, VICTIM_BLOCKS);
        user_close(&u);
        reclaim(&d, conn);
        u = user_open(&d, KVD_CAUSAL);
        find(&u, 1); /* maps the segments, which needs the daemon */
        stopped(&d, conn, &u);
        user_close(&u);
        full_backlog(&d);
        expect_quiet(conn);
        expect_clean(conn);
        conn_call(conn, KVD_MSG_space_delete,
                  &(struct kvd_msg_space_delete){.space = kvd_slice_of("s")}, NULL);
        conn_call(conn, KVD_MSG_space_delete,
                  &(struct kvd_msg_space_delete){.space = kvd_slice_of("whole")}, NULL);
        conn_close(conn);
        WAIT_UNTIL(instance_fds(&d) == fds);
        instance_stop(&d);
        instance_sweep(&d);
        return 0;
}
