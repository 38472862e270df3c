/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calls end, whatever happens to them. The test stops a daemon once, while several processes make
 * calls that need it. Each process is under a different attack:
 *
 *      signals    a timer interrupts the call 1,000 times a second, with and without SA_RESTART: the call ends
 *      connect    the same, while the daemon's backlog is full: the call ends, and never with EINTR
 *      threads    eight threads over one handle: each call ends by its own deadline, not after the others'
 *      stopped    a process that is stopped for longer than its call may take gets its answer when it continues
 *      later      blocks and spaces that could not be given back in time are given back with a later call
 *      grown      lookups in a pool that has grown: they miss at once, and hit after a call that asks the daemon
 *
 * No call is timed. The test checks the timeouts that calls pass to the system (waits.h). The bound
 * is three deadlines: a broken call would wait for eight, or hang.
 */

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/conn/deadline.h"
#include "client/kvd_methods.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/raw.h"
#include "tests/daemon/hostile/victim.h"
#include "tests/lib/waits.h"

struct user {
        struct kvd *handle;
        struct kvd_space *space;
};

struct part { /* one process */
        const char *name;
        void (*run)(struct part *);
        const struct instance *daemon;
        pid_t pid;
        int go, done; /* pipes; the parent has the other ends */
};

static struct user user_open(const struct part *p, const char *space) {
        struct user u;

        if (kvd_open(p->daemon->socket, &u.handle) < 0 ||
            kvd_space_open(u.handle, space, &victim_geometry, NULL, &u.space) < 0)
                die("%s: %s", p->name, kvd_error());
        return u;
}

static void user_close(struct user *u) {
        kvd_space_close(u->space);
        kvd_close(u->handle);
}

static void say(int fd) {
        if (write(fd, "r", 1) != 1)
                die("pipe");
}

static void hear(int fd) {
        char byte;

        if (read(fd, &byte, 1) != 1)
                die("pipe");
}

/* Reports that it is ready, and waits until the daemon is stopped. */
static void wait_for_the_stop(const struct part *p) {
        say(p->done);
        hear(p->go);
}

/* Reports that it is done with the stopped daemon, and waits until the daemon runs again. */
#define wait_for_its_end(p) wait_for_the_stop(p)

static void expect_timeout(const struct part *p, uint64_t began, int64_t r) {
        uint64_t ms = waits_ms(began);

        if (r != -ETIMEDOUT)
                die("%s: %lld (%s)", p->name, (long long)r, kvd_error());
        if (ms > 3 * DEADLINE_MS)
                die("%s waited for %llu ms", p->name, (unsigned long long)ms);
}

static void ask_in_vain(const struct part *p, struct user *u) {
        uint64_t began = waits_begin();
        struct kvd_block blocks[200];

        expect_timeout(p, began, kvd_alloc(u->space, 200, blocks));
}

/* ---- signals --------------------------------------------------------------------------------- */

static void on_alarm(int number) {
}

static void interrupt(int flags) {
        const struct itimerval every = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
        const struct sigaction action = {.sa_handler = on_alarm, .sa_flags = flags};

        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, flags < 0 ? &never : &every, NULL);
}

static void signals(struct part *p, int flags) {
        struct user u = user_open(p, "s");

        wait_for_the_stop(p);
        interrupt(flags);
        ask_in_vain(p, &u);
        interrupt(-1);
        wait_for_its_end(p);
        user_close(&u);
}

static void signals_plain(struct part *p) {
        signals(p, 0);
}

static void signals_restart(struct part *p) {
        signals(p, SA_RESTART);
}

static void connect_in_vain(struct part *p) {
        struct kvd *handle;
        uint64_t began;

        wait_for_the_stop(p);
        interrupt(0);
        began = waits_begin();
        expect_timeout(p, began, kvd_open(p->daemon->socket, &handle));
        interrupt(-1);
        wait_for_its_end(p);
}

/* ---- threads --------------------------------------------------------------------------------- */

#define THREADS 8u

struct asker {
        struct part *part;
        struct user *user;
};

static void *ask_main(void *arg) {
        struct asker *a = arg;

        ask_in_vain(a->part, a->user);
        return NULL;
}

static void ask_by_threads(struct part *p) {
        struct user u = user_open(p, "s");
        struct asker asker = {p, &u};
        pthread_t threads[THREADS];

        wait_for_the_stop(p);
        for (uint32_t i = 0; i < THREADS; i++)
                pthread_create(&threads[i], NULL, ask_main, &asker);
        for (uint32_t i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        wait_for_its_end(p);
        user_close(&u);
}

/* ---- a client that is stopped ---------------------------------------------------------------- */

static void stopped_in_a_call(struct part *p) {
        struct user u = user_open(p, "s");

        wait_for_the_stop(p);
        say(p->done); /* the parent stops it inside the call, until the daemon has answered */
        if (kvd_space_set(u.space, "memshare.on", 0) < 0)
                die("%s: %s", p->name, kvd_error());
        user_close(&u);
}

/* ---- calls that cannot fail ------------------------------------------------------------------ */

static void *set_main(void *arg) {
        struct asker *a = arg;
        uint64_t began = waits_begin();

        expect_timeout(a->part, began, kvd_space_set(a->user->space, "memshare.on", 0));
        return NULL;
}

/* Two threads, one after the other, use the connection for as long as this one may wait. */
static void give_back_later(struct part *p) {
        struct user u = user_open(p, "later");
        struct asker asker = {p, &u};
        struct kvd_block blocks[300];
        struct kvd_space *other;
        pthread_t threads[2];

        if (kvd_space_open(u.handle, "other", &victim_geometry, NULL, &other) < 0 ||
            kvd_alloc(u.space, 300, blocks) != 300)
                die("%s: %s", p->name, kvd_error());
        wait_for_the_stop(p);
        for (uint32_t i = 0; i < 2; i++)
                pthread_create(&threads[i], NULL, set_main, &asker);
        usleep(200000);
        kvd_free(u.space, 300, blocks);
        kvd_space_close(other);
        for (uint32_t i = 0; i < 2; i++)
                pthread_join(threads[i], NULL);
        wait_for_its_end(p);
        kvd_catch_up(u.space);
        wait_for_its_end(p); /* the parent checks */
        user_close(&u);
}

/* ---- a pool that has grown ------------------------------------------------------------------- */

static uint32_t find(struct user *u, uint32_t chain) {
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT], ids[VICTIM_BLOCKS], n;
        struct kvd_pin pin = {0};

        victim_tokens(chain, tokens);
        kvd_lookup(u->space, 0, tokens, VICTIM_BLOCKS * VICTIM_BT, ids, VICTIM_BLOCKS, &pin);
        n = pin.n_blocks;
        for (uint32_t i = 0; i < n; i++)
                if (!victim_block_is_right(kvd_pin_block(&pin, ids[i]), chain, i))
                        die("wrong bytes");
        kvd_unpin(u->space, &pin);
        return n;
}

/* Chain 3 was published after this process attached, so its blocks' segment is not mapped here. */
static void look_up_in_a_grown_pool(struct part *p) {
        struct user u = user_open(p, "grown");

        wait_for_the_stop(p);
        for (uint32_t i = 0; i < 1000; i++)
                if (find(&u, 3) != 0)
                        die("%s: found a chain that is not mapped", p->name);
        wait_for_its_end(p);
        if (kvd_catch_up(u.space) < 0 || find(&u, 3) != VICTIM_BLOCKS)
                die("%s: not found afterwards (%s)", p->name, kvd_error());
        user_close(&u);
}

/* ---- the parent ------------------------------------------------------------------------------ */

enum { SIGNALS, SIGNALS_RESTART, CONNECT, THREADS_, STOPPED, LATER, GROWN, N_PARTS };

static struct part parts[N_PARTS] = {
        [SIGNALS] = {.name = "signals", .run = signals_plain},
        [SIGNALS_RESTART] = {.name = "signals, SA_RESTART", .run = signals_restart},
        [CONNECT] = {.name = "connect", .run = connect_in_vain},
        [THREADS_] = {.name = "threads", .run = ask_by_threads},
        [STOPPED] = {.name = "stopped", .run = stopped_in_a_call},
        [LATER] = {.name = "later", .run = give_back_later},
        [GROWN] = {.name = "grown", .run = look_up_in_a_grown_pool},
};

static void start(struct part *p, const struct instance *daemon) {
        int go[2], done[2];

        if (pipe(go) < 0 || pipe(done) < 0)
                die("pipe");
        p->daemon = daemon;
        p->pid = fork();
        if (p->pid == 0) {
                p->go = go[0];
                p->done = done[1];
                close(done[0]);
                p->run(p);
                _exit(0);
        }
        p->go = go[1];
        p->done = done[0];
        close(go[0]);
        close(done[1]);
        hear(p->done);
}

static void publish(const struct instance *daemon, uint32_t chain) {
        struct part self = {.name = "publish", .daemon = daemon};
        struct user u = user_open(&self, "grown");
        uint32_t tokens[VICTIM_BLOCKS * VICTIM_BT];
        struct kvd_block blocks[VICTIM_BLOCKS];
        struct kvd_pin pin = {0};

        victim_tokens(chain, tokens);
        for (uint32_t n = 0; n < VICTIM_BLOCKS;) {
                int r = kvd_alloc(u.space, VICTIM_BLOCKS - n, blocks + n);

                if (r < 0)
                        die("kvd_alloc: %s", kvd_error());
                n += (uint32_t)r;
        }
        for (uint32_t i = 0; i < VICTIM_BLOCKS; i++)
                victim_block_fill(blocks[i].data, chain, i);
        if (kvd_seal(u.space, &pin, VICTIM_BLOCKS, blocks, tokens, VICTIM_BLOCKS * VICTIM_BT) < 0)
                die("kvd_seal: %s", kvd_error());
        kvd_unpin(u.space, &pin);
        user_close(&u);
}

static void end(struct part *p) {
        int status;

        if (waitpid(p->pid, &status, 0) != p->pid || status)
                die("%s ended with status %#x", p->name, status);
        printf("%s: ended\n", p->name);
}

#define SPACES 4u /* s, grown, later, other */

/* Whether everything of "later" was given back, except for the magazine of one client. */
static bool was_given_back(struct conn *conn) {
        struct kvd_msg_space_info_reply info = {0};
        uint64_t filling = 0, attached = 0;

        for (uint32_t n = 0; n < SPACES; n++) {
                space_facts(conn, n, &info);
                if (strncmp(info.name.data, "later", 5) == 0)
                        filling = info.filling;
                if (strncmp(info.name.data, "other", 5) == 0)
                        attached = info.clients;
        }
        return filling <= 128 && attached == 0;
}

#define BACKLOG_MOST 600u

static void while_stopped(const struct instance *d) {
        int flood[BACKLOG_MOST];
        uint32_t n;

        kill(d->pid, SIGSTOP);
        n = raw_fill_backlog(d->socket, BACKLOG_MOST, flood);
        for (uint32_t i = 0; i < N_PARTS; i++)
                say(parts[i].go);
        hear(parts[STOPPED].done);
        usleep(200000);
        kill(parts[STOPPED].pid, SIGSTOP);
        for (uint32_t i = 0; i < N_PARTS; i++)
                if (i != STOPPED)
                        hear(parts[i].done);
        for (uint32_t i = 0; i < n; i++)
                close(flood[i]);
        kill(d->pid, SIGCONT);
}

int main(void) {
        struct instance d;
        struct conn *conn;

        deadline_ms = DEADLINE_MS;
        instance_start(&d, SETTINGS("daemon.pool=8M", "daemon.segment=256K", "daemon.pages=small",
                                    "daemon.log=error"));
        waits_watch();
        for (uint32_t i = 0; i < N_PARTS; i++)
                start(&parts[i], &d);
        publish(&d, 3);
        conn = instance_connect(&d);
        while_stopped(&d);
        for (uint32_t i = 0; i < N_PARTS; i++)
                if (i != STOPPED)
                        say(parts[i].go);
        hear(parts[LATER].done);
        WAIT_UNTIL(was_given_back(conn)); /* by now the daemon has answered all calls */
        say(parts[LATER].go);
        kill(parts[STOPPED].pid, SIGCONT);
        for (uint32_t i = 0; i < N_PARTS; i++)
                end(&parts[i]);
        expect_quiet(conn);
        expect_clean(conn);
        conn_close(conn);
        instance_end(&d);
        return 0;
}
