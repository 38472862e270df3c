/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A GPU's cache outlives its daemon, which kvd --keep restarts. Other clients find sealed blocks,
 * word by word, and pinned blocks stay unchanged. Blocks whose data never came are not found, and
 * clients that waited for them are told. Daemons, workers and producers are killed at any point.
 */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "client/conn/conn.h"
#include "ipc/base/util.h"
#include "tests/daemon/killpoints/armed.h"
#include "tests/gpu/device/peer.h"
#include "tests/lib/plays.h"

#define CHAINS 15u /* times BLOCKS: fits a segment of legacy handles, which has 128 blocks */
#define BLOCKS 8u

static struct instance d;

/* Starts kvd with 16 segments of 2 MiB, which have 64 blocks each. */
static void start_kept(const char *backend, const char *quarantine) {
        instance_make_dir(&d);
        setenv("TMPDIR", d.dir, 1);
        instance_run(&d,
                     (const char *const[]){"--keep", "--private", d.dir, "--backend", backend,
                                           "--pool", "32M", "--set", "daemon.segment=2M", "--set",
                                           quarantine, "--set", "daemon.spill=1M", "--set",
                                           "daemon.reserve=1M", NULL},
                     true);
}

static void end_kept(void) {
        instance_expect_clean(&d);
        instance_stop(&d);
        instance_sweep(&d);
}

static pid_t kvd_of_now(void) {
        pid_t pid = 0;

        WAIT_UNTIL((pid = child_of(d.pid, NULL)) > 0);
        return pid;
}

/* Kills kvd (0), or ends it as for an upgrade (1). Waits for the next one. */
static void end_kvd(int how) {
        pid_t pid = kvd_of_now();

        kill(how ? d.pid : pid, how ? SIGUSR2 : SIGKILL);
        WAIT_UNTIL(kill(pid, 0) < 0 && child_of(d.pid, NULL) > 0);
}

static void kill_worker(void) {
        pid_t pid = 0;

        WAIT_UNTIL((pid = child_of(kvd_of_now(), "kvd-worker")) > 0);
        kill(pid, SIGKILL);
}

static uint64_t adopted(void) {
        struct conn *conn = instance_connect(&d);
        struct kvd_msg_space_info_reply info;
        uint64_t n;

        space_facts(conn, 0, &info);
        n = info.sealed;
        conn_close(conn);
        return n;
}

/* ---- peers ----------------------------------------------------------------------------------- */

static uint32_t base; /* number of the first chain that a peer publishes */

static void publish_all(struct side *s, uint32_t first, uint32_t n) {
        for (uint32_t i = 0; i < n; i++) {
                struct kvd_pin pin = {0};

                publish(s, first + i, BLOCKS, &pin);
                kvd_unpin_on(s->space, &pin, s->stream);
        }
        sync_stream(s);
        kvd_settle(s->space);
}

/* The number of blocks of these chains that are found. Checks every word of them. */
static uint32_t check_all(struct side *s, uint32_t first, uint32_t n) {
        uint32_t ids[BLOCKS], found = 0;

        for (uint32_t i = 0; i < n; i++) {
                struct kvd_pin pin = {0};
                uint32_t got = find(s, first + i, BLOCKS, &pin, ids);

                if (!got)
                        continue;
                must(kvd_wait_on(s->space, &pin, s->stream));
                put_read(s, &pin, ids, got);
                sync_stream(s);
                must(kvd_check_pin(s->space, &pin));
                if (wrong_words(s, first + i, got))
                        die("chain %u has wrong words", first + i);
                kvd_unpin(s->space, &pin);
                found += got;
        }
        return found;
}

static void publishes(struct role *role) {
        struct side s;

        side_open(&s, role->socket, "s");
        publish_all(&s, base, CHAINS);
        side_close(&s);
}

static void finds_all(struct role *role) {
        struct side s;
        uint32_t n;

        side_open(&s, role->socket, "s");
        n = check_all(&s, base, CHAINS);
        if (n != CHAINS * BLOCKS)
                die("%u of %u blocks are found", n, CHAINS * BLOCKS);
        side_close(&s);
}

static void finds_nothing(struct role *role) {
        struct side s;

        side_open(&s, role->socket, "s");
        if (check_all(&s, base, CHAINS))
                die("something is found");
        side_close(&s);
}

static void run_peer(void (*play)(struct role *)) {
        struct peer peer = peer_start(play, d.socket, NULL);

        peer_end(&peer);
}

/* ---- what is sealed -------------------------------------------------------------------------- */

static void every_sealed_block_is_found(void) {
        start_kept("cuda", "daemon.quarantine_ms=20");
        base = 100;
        run_peer(publishes);
        for (int i = 0; i < 4; i++) {
                end_kvd(i % 2);
                run_peer(finds_all);
                printf("%llu of %u sealed blocks are kept\n", (unsigned long long)adopted(),
                       CHAINS * BLOCKS);
                if (adopted() != CHAINS * BLOCKS)
                        die("others than those are sealed");
        }
        end_kept();
}

/* The daemon is killed at once, before it has seen that the data has come. */
static void what_came_unseen_is_found(void) {
        start_kept("cuda", "daemon.quarantine_ms=20");
        for (base = 100; base < 500; base += 100) {
                run_peer(publishes);
                end_kvd(0);
                run_peer(finds_all);
        }
        end_kept();
}

static void a_worker_may_die_as_well(void) {
        start_kept("cuda", "daemon.quarantine_ms=20");
        base = 100;
        run_peer(publishes);
        for (int i = 0; i < 3; i++) {
                kill_worker();
                end_kvd(0);
                kill_worker();
                run_peer(finds_all);
        }
        end_kept();
}

/* Memory of legacy handles ends with the process that made it. */
static void legacy_handles_begin_empty(void) {
        start_kept("cuda-legacy", "daemon.quarantine_ms=20");
        base = 100;
        run_peer(publishes);
        run_peer(finds_all);
        end_kvd(0);
        run_peer(finds_nothing);
        run_peer(publishes);
        run_peer(finds_all);
        end_kept();
}

/* ---- clients that stay ----------------------------------------------------------------------- */

/* The pool has room for 128 chains. */
static void fills_the_pool(struct role *role) {
        struct side s;

        side_open(&s, role->socket, "s");
        for (uint32_t i = 0; i < 400; i += CHAINS)
                publish_all(&s, 1000 + i, CHAINS);
        side_close(&s);
}

static void holds_one(struct role *role) {
        uint32_t ids[BLOCKS], n;
        struct kvd_pin pin = {0};
        struct side s;

        side_open(&s, role->socket, "s");
        publish_all(&s, 7, 1);
        if (find(&s, 7, BLOCKS, &pin, ids) != BLOCKS)
                die("not found");
        for (int i = 0; i < 2; i++) {
                say(role, 'h');
                hear(role, 'c');
                put_read(&s, &pin, ids, BLOCKS);
                sync_stream(&s);
                must(kvd_check_pin(s.space, &pin));
                if (wrong_words(&s, 7, BLOCKS))
                        die("what is pinned has wrong words");
        }
        kvd_unpin(s.space, &pin);
        n = check_all(&s, 7, 1); /* reconnects by itself */
        if (n != BLOCKS)
                die("%u blocks of what was pinned all the time are found", n);
        publish_all(&s, 50, CHAINS);
        if (check_all(&s, 50, CHAINS) != CHAINS * BLOCKS)
                die("what it published with the next daemon is not found");
        side_close(&s);
}

static void holds_on(int how) {
        struct peer peer;

        start_kept("cuda", "daemon.quarantine_ms=20");
        peer = peer_start(holds_one, d.socket, NULL);
        for (int i = 0; i < 2; i++) {
                expect(&peer, 'h');
                end_kvd(how);
                run_peer(fills_the_pool);
                cue(&peer, 'c');
        }
        peer_end(&peer);
        end_kept();
}

static void who_reads_reads_on(void) {
        holds_on(0);
}

static void who_reads_reads_on_through_an_upgrade(void) {
        holds_on(1);
}

/* ---- data that comes late, or never ---------------------------------------------------------- */

/* Its stream is slow: the blocks are sealed before they are written. */
static void publishes_late(struct role *role) {
        struct kvd_pin pin = {0};
        struct side s;

        side_open(&s, role->socket, "s");
        publish(&s, 7, BLOCKS, &pin);
        say(role, 'p');
        hear(role, 'e');
        sync_stream(&s);
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

/* Its stream waits for blocks that it has pinned before the daemon dies. */
static void waits(struct role *role, int wanted) {
        uint32_t ids[BLOCKS];
        struct kvd_pin pin = {0};
        struct side s;
        int r;

        side_open(&s, role->socket, "s");
        if (find(&s, 7, BLOCKS, &pin, ids) != BLOCKS)
                die("not found");
        must(kvd_wait_on(s.space, &pin, s.stream));
        put_read(&s, &pin, ids, BLOCKS);
        say(role, 'w');
        sync_stream(&s);
        r = kvd_check_pin(s.space, &pin);
        if (r != wanted)
                die("the earlier data: %d, %s", r, kvd_error());
        if (r == 0 && wrong_words(&s, 7, BLOCKS))
                die("wrong words");
        kvd_unpin(s.space, &pin);
        side_close(&s);
}

static void waits_in_vain(struct role *role) {
        waits(role, -EIO);
}

static void waits_for_it(struct role *role) {
        waits(role, 0);
}

/* How long a fill takes: until the process is killed, or for some time. */
static const char *const for_ever[] = {"FAKECUDA_SLOW=set:1000000", NULL};
static const char *const slow[] = {"FAKECUDA_SLOW=set:200", NULL};

static void a_producer_dies_with_the_daemon(void) {
        struct peer producer, reader;

        start_kept("cuda", "daemon.quarantine_ms=50");
        producer = peer_start(publishes_late, d.socket, for_ever);
        expect(&producer, 'p');
        reader = peer_start(waits_in_vain, d.socket, NULL);
        expect(&reader, 'w');
        kill(producer.pid, SIGKILL);
        end_kvd(0);
        peer_kill(&producer);
        peer_end(&reader);
        base = 7;
        run_peer(finds_nothing);
        run_peer(fills_the_pool);
        end_kept();
}

/* The daemon dies first, and the producer dies during the next one. */
static void a_producer_dies_after_the_daemon(void) {
        struct peer producer, reader;

        start_kept("cuda", "daemon.quarantine_ms=50");
        producer = peer_start(publishes_late, d.socket, for_ever);
        expect(&producer, 'p');
        reader = peer_start(waits_in_vain, d.socket, NULL);
        expect(&reader, 'w');
        end_kvd(0);
        base = 7;
        run_peer(finds_nothing);
        peer_kill(&producer);
        peer_end(&reader);
        run_peer(fills_the_pool);
        end_kept();
}

static void a_producer_that_lives_goes_on(void) {
        struct peer producer, reader;

        start_kept("cuda", "daemon.quarantine_ms=50");
        producer = peer_start(publishes_late, d.socket, slow);
        expect(&producer, 'p');
        reader = peer_start(waits_for_it, d.socket, NULL);
        expect(&reader, 'w');
        end_kvd(0);
        cue(&producer, 'e');
        peer_end(&producer);
        peer_end(&reader);
        run_peer(fills_the_pool);
        end_kept();
}

/* ---- at any point ---------------------------------------------------------------------------- */

#define ROUNDS 24u
#define STEADY_US 300000 /* daemons that die sooner are restarted only a few times */

/* False: the daemon was gone. Even chains are written before the seal, others maybe later. */
static bool try_to_publish(struct side *s, uint32_t first) {
        bool waits = first % 2 == 0;
        uint32_t tokens[BLOCKS * BT], n = 0;
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};
        int r = 0;

        make_tokens(first, BLOCKS, tokens);
        while (n < BLOCKS && (r = kvd_alloc(s->space, BLOCKS - n, blocks + n)) > 0)
                n += (uint32_t)r;
        for (uint32_t i = 0; n == BLOCKS && i < BLOCKS; i++)
                put_fill(s, &blocks[i], word_of(first, i));
        if (waits)
                sync_stream(s);
        r = n < BLOCKS ? -EAGAIN :
            waits      ? kvd_seal(s->space, &pin, BLOCKS, blocks, tokens, BLOCKS * BT) :
                         kvd_seal_on(s->space, &pin, BLOCKS, blocks, tokens, BLOCKS * BT, s->stream);
        sync_stream(s);
        kvd_settle(s->space);
        if (r < 0)
                kvd_free(s->space, n, blocks);
        else
                kvd_unpin(s->space, &pin);
        return r >= 0;
}

static void publishes_through(struct role *role) {
        struct side s;

        side_open(&s, role->socket, "s");
        for (uint32_t i = 0; i < ROUNDS; i++) {
                say(role, 'r');
                hear(role, 'p');
                WAIT_UNTIL(try_to_publish(&s, 100 + i));
        }
        say(role, 'r');
        hear(role, 'e');
        side_close(&s);
}

static bool has_said(const struct peer *peer) {
        struct pollfd said = {peer->from, POLLIN, 0};

        return poll(&said, 1, 0) > 0;
}

static void finds_what_it_may(struct role *role) {
        struct side s;

        side_open(&s, role->socket, "s");
        for (uint32_t i = 0; i < ROUNDS; i++) {
                uint32_t n = check_all(&s, 100 + i, 1);

                if (n != BLOCKS && i % 2 == 0)
                        die("%u of %u blocks of chain %u are found", n, BLOCKS, i);
        }
        side_close(&s);
}

static void arm(pid_t pid, uint32_t at) {
        if (sigqueue(pid, ARMED_SIGNAL, (union sigval){.sival_int = (int)at}) < 0 && errno != ESRCH)
                die("sigqueue: %s", strerror(errno));
}

static bool is_gone(pid_t pid) {
        return kill(pid, 0) < 0;
}

/* The next daemon dies while it takes over or a little later, or at once if it has not begun. */
static pid_t arm_successor(pid_t pid, uint32_t at) {
        pid_t next = 0;

        kill(pid, SIGKILL);
        WAIT_UNTIL(is_gone(pid) && (next = child_of(d.pid, NULL)) > 0);
        arm(next, at);
        return next;
}

/* This kvd kills itself at the n-th access to shared memory or system call, once armed. */
static void dies_at_points(bool successors) {
        uint32_t died = 0, at = 1;
        struct peer peer;

        start_kept("cuda", "daemon.quarantine_ms=20");
        peer = peer_start(publishes_through, d.socket, NULL);
        for (uint32_t i = 0; i < ROUNDS; i++, at += 1 + at / 3) {
                pid_t pid;

                expect(&peer, 'r');
                conn_close(instance_connect(&d)); /* the daemon of now serves */
                usleep(STEADY_US);
                pid = kvd_of_now();
                if (successors)
                        pid = arm_successor(pid, at * 8);
                else
                        arm(pid, at);
                cue(&peer, 'p');
                WAIT_UNTIL(is_gone(pid) || has_said(&peer));
                died += is_gone(pid);
                if (!is_gone(pid))
                        end_kvd(0);
        }
        expect(&peer, 'r');
        run_peer(finds_what_it_may);
        cue(&peer, 'e');
        peer_end(&peer);
        printf("%u daemons died at points up to %u, %u behind them\n", died,
               successors ? at * 8 : at, ROUNDS - died);
        if (!died)
                die("none died by itself");
        end_kept();
}

static void kvd_dies_at_points(void) {
        dies_at_points(false);
}

static void successors_die_at_points(void) {
        dies_at_points(true);
}

int main(int argc, char **argv) {
        static const struct play plays[] = {
                {"every-sealed-block", every_sealed_block_is_found},
                {"unseen", what_came_unseen_is_found},
                {"worker", a_worker_may_die_as_well},
                {"legacy", legacy_handles_begin_empty},
                {"reader", who_reads_reads_on},
                {"reader-upgrade", who_reads_reads_on_through_an_upgrade},
                {"producer-dies-too", a_producer_dies_with_the_daemon},
                {"producer-dies-later", a_producer_dies_after_the_daemon},
                {"producer-lives", a_producer_that_lives_goes_on},
                {"points", kvd_dies_at_points},
                {"successor-points", successors_die_at_points},
        };

        return plays_run(plays, ARRAY_SIZE(plays), argv + 1);
}
