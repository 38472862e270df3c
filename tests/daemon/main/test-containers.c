/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvd in one container and its clients in others, as tools/container sets them up, on a kernel
 * before 6.5: the daemon can see neither a client's process id nor its end. A seccomp filter
 * emulates the old kernel. The test itself is a client outside of all containers.
 */

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "ipc/base/util.h"
#include "tests/lib/container.h"
#include "tests/lib/oracle.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define PEERPIDFD 77
#define VOLUME "/mnt/kvd"
#define FILLING 4u

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 8,
                                             .block_tokens = 4,
                                             .dtype = KVD_F16,
                                             .vocab = 1000};
static const struct kvd_space_options options = {.max_blocks = 16}; /* a process may fill 8 */

static struct instance in;
static struct conn *outside;

/* ---- the daemon ------------------------------------------------------------------------------ */

static void set_up(void) {
        instance_make_dir(&in);
        forget_socket_option(PEERPIDFD);
        instance_fork = container_fork;
        instance_run(&in,
                     SETTINGS("--keep", "--socket", in.socket, "--user", "root", "--pool", "8M",
                              "--set", "daemon.segment=256K", "--set", "daemon.pages=small",
                              "--backend", "host"),
                     true);
        outside = instance_connect(&in);
}

static void tear_down(void) {
        expect_quiet(outside);
        expect_clean(outside);
        conn_close(outside);
        instance_stop(&in);
        instance_sweep(&in);
}

/* Blocks that are not available to others: being filled, or reserved until their client ends. */
static uint64_t kept(void) {
        struct kvd_msg_space_info_reply info;

        space_facts(outside, 0, &info);
        return info.filling + info.limbo;
}

/* ---- clients --------------------------------------------------------------------------------- */

static kvd *handle;
static kvd_space *space;
static struct kvd_block blocks[FILLING];

/* Mounts the socket's folder at another path. */
static const char *mount_volume(void) {
        static char path[128];

        if (mount("tmpfs", "/mnt", "tmpfs", 0, NULL) < 0 || mkdir(VOLUME, 0755) < 0 ||
            mount(in.dir, VOLUME, NULL, MS_BIND, NULL) < 0)
                die("no volume: %s", strerror(errno));
        snprintf(path, sizeof path, VOLUME "%s", strrchr(in.socket, '/'));
        return path;
}

static void open_space(const char *path) {
        if (kvd_open(path, &handle) < 0 ||
            kvd_space_open(handle, "s", &geometry, &options, &space) < 0)
                die("%s", kvd_error());
}

static void fill(void) {
        if (kvd_alloc(space, FILLING, blocks) != FILLING)
                die("%s", kvd_error());
}

static void tokens_of_blocks(uint32_t tokens[FILLING * 4]) {
        for (uint32_t i = 0; i < FILLING * 4; i++)
                tokens[i] = i;
}

static void publish(void) {
        uint32_t tokens[FILLING * 4];
        struct kvd_pin pin = {0};

        fill();
        tokens_of_blocks(tokens);
        for (uint32_t i = 0; i < FILLING; i++)
                oracle_fill(blocks[i].data, kvd_block_bytes(&geometry),
                            oracle_seed(1, tokens, (i + 1) * 4));
        if (kvd_seal(space, &pin, FILLING, blocks, tokens, FILLING * 4) != FILLING)
                die("%s", kvd_error());
}

static void find(void) {
        uint32_t tokens[FILLING * 4], ids[FILLING];
        struct kvd_pin pin = {0};

        tokens_of_blocks(tokens);
        if (kvd_lookup(space, 0, tokens, FILLING * 4, ids, FILLING, &pin) != FILLING * 4)
                die("the other container's blocks are not found");
        for (uint32_t i = 0; i < FILLING; i++)
                if (oracle_wrong(kvd_pin_block(&pin, ids[i]), pin.block_bytes,
                                 oracle_seed(1, tokens, (i + 1) * 4)))
                        die("a wrong byte");
}

/* A process in a container that opens the space, runs a function, and waits. */
struct client {
        pid_t pid;
        int go; /* closing it ends the client */
};

static _Noreturn void act(void (*what)(void), int said, int go) {
        char byte = 0;

        open_space(mount_volume());
        what();
        if (write(said, &byte, 1) != 1)
                _exit(1);
        while (read(go, &byte, 1) < 0)
                ;
        kvd_space_close(space);
        kvd_close(handle);
        _exit(0);
}

static struct client begin(void (*what)(void)) {
        int said[2], go[2];
        struct client c;
        char byte;

        ck_assert_int_eq(pipe(said), 0);
        ck_assert_int_eq(pipe(go), 0);
        c = (struct client){container_fork(), go[1]};
        if (c.pid == 0) {
                close(go[1]);
                close(said[0]);
                act(what, said[1], go[0]);
        }
        close(said[1]);
        close(go[0]);
        ck_assert_int_eq(read(said[0], &byte, 1), 1);
        close(said[0]);
        return c;
}

static void end(struct client *c) {
        close(c->go);
        ck_assert_int_eq(wait_status(c->pid), 0);
}

static void kill_client(struct client *c) {
        kill(c->pid, SIGKILL);
        ck_assert_int_eq(wait_status(c->pid), 128 + SIGKILL);
        close(c->go);
}

/* ---- what works ------------------------------------------------------------------------------ */

START_TEST(containers_share_a_cache) {
        struct client producer = begin(publish), reader = begin(find);

        end(&reader);
        end(&producer);
}
END_TEST

START_TEST(a_killed_container_holds_nothing) {
        struct client c = begin(fill);

        ck_assert_uint_ge(kept(), FILLING);
        kill_client(&c);
        WAIT_UNTIL(kept() == 0);
}
END_TEST

/* Blocks that it fills stay reserved until its process ends. */
START_TEST(a_client_outlives_its_connection) {
        const struct kvd_msg_client_end request = {.client = 2};
        struct kvd_msg_client_end_reply reply;
        struct client c = begin(fill);
        uint64_t before = kept();

        ck_assert_int_eq(conn_call(outside, KVD_MSG_client_end, &request, &reply), 0);
        ck_assert_uint_eq(reply.spaces, 1);
        ck_assert_uint_eq(reply.pid, 0);
        ck_assert_uint_eq(kept(), before);
        kill_client(&c);
        WAIT_UNTIL(kept() == 0);
}
END_TEST

/* The grandchild, which inherits the lifeline, ends with its container, whose process 1 this is. */
static void fill_in_a_child(void) {
        pid_t pid = fork();

        if (pid == 0) {
                open_space(VOLUME "/kvd.sock");
                fill();
                if (fork() == 0)
                        pause();
                _exit(0);
        }
        if (wait_status(pid) != 0)
                die("the child has failed");
}

START_TEST(a_forked_child_counts_as_its_parent) {
        struct client c = begin(fill_in_a_child);

        ck_assert_uint_ge(kept(), FILLING);
        kill_client(&c);
        WAIT_UNTIL(kept() == 0);
}
END_TEST

static void fill_all(void) {
        uint32_t n = 0;

        while (kvd_alloc(space, 1, blocks) == 1)
                n++;
        if (n != options.max_blocks / 2)
                die("a process could fill %u blocks: %s", n, kvd_error());
}

static void fill_all_twice(void) {
        kvd *first = handle;

        fill_all();
        open_space(VOLUME "/kvd.sock");
        if (handle == first || kvd_alloc(space, 1, blocks) != -EDQUOT)
                die("a second connection has a share of its own");
}

START_TEST(connections_of_a_process_are_one_client) {
        struct client c = begin(fill_all_twice);

        kill_client(&c);
}
END_TEST

START_TEST(processes_of_two_containers_are_two_clients) {
        struct client one = begin(fill_all), other = begin(fill_all);

        kill_client(&one);
        kill_client(&other);
}
END_TEST

/* The next daemon notices the client's end by the descriptors that the keeper kept. */
START_TEST(the_next_daemon_notices_when_clients_end) {
        struct client producer = begin(publish), c = begin(fill), reader;
        pid_t pid = child_of(in.pid, NULL);

        ck_assert_int_gt(pid, 0);
        kill(pid, SIGKILL);
        WAIT_UNTIL(kill(pid, 0) < 0);
        outside = conn_close(outside);
        outside = instance_connect(&in);
        WAIT_UNTIL(kept() >= FILLING); /* it serves before it has adopted them */
        reader = begin(find);
        ck_assert_uint_ge(kept(), FILLING);
        kill_client(&c);
        end(&reader);
        end(&producer);
        WAIT_UNTIL(kept() == 0);
}
END_TEST

/* ---- what is refused ------------------------------------------------------------------------- */

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})

START_TEST(an_old_library_is_told_to_update) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg reply = peer_call(p, MSG(attach, .protocol = KVD_PROTOCOL));
        char text[256];

        ck_assert_uint_eq(reply.number, KVD_MSG_error);
        ck_assert_uint_eq(reply.error.code, ESRCH);
        kvd_slice_copy(reply.error.text, text, sizeof text);
        ck_assert_ptr_nonnull(strstr(text, "pid namespace"));
        ck_assert_ptr_nonnull(strstr(text, "update libkvd"));
        peer_close(p);
}
END_TEST

/* A client that closes its lifeline counts as ended, even if its connection is open. */
START_TEST(a_client_that_closes_its_lifeline_is_gone) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg reply;

        int lifeline;

        peer_ok(p, MSG(lifeline, .process = 7));
        ck_assert_uint_eq(p->fds.n, 1);
        lifeline = p->fds.fd[--p->fds.n];
        peer_refused(p, MSG(lifeline, .process = 7), -EALREADY);
        if (_i) {
                peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));
                peer_ok(p, MSG(allocate, .space = peer_open_space(p, "s"), .count = 4));
                ck_assert_uint_ge(kept(), 4);
        }
        ck_assert_int_eq(close(lifeline), 0);
        while (peer_receive(p, &reply))
                ;
        if (_i)
                WAIT_UNTIL(kept() == 0);
        peer_close(p);
}
END_TEST

START_TEST(no_lifeline_where_the_kernel_reports_ends) {
        struct instance plain;
        struct peer_end *p;

        instance_fork = fork;
        instance_start(&plain, NULL);
        p = peer_connect(plain.socket);
        peer_refused(p, MSG(lifeline, .process = 7), -EALREADY);
        peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));
        peer_close(p);
        instance_end(&plain);
}
END_TEST

/* It sees their process ids, so it needs no lifelines. */
START_TEST(a_daemon_outside_serves_clients_in_containers) {
        struct instance contained = in;
        struct client c;

        conn_close(outside);
        instance_fork = fork;
        instance_start(&in, NULL);
        outside = instance_connect(&in);
        c = begin(fill);
        ck_assert_uint_ge(kept(), FILLING);
        kill_client(&c);
        WAIT_UNTIL(kept() == 0);
        conn_close(outside);
        instance_end(&in);
        in = contained;
        outside = instance_connect(&in);
}
END_TEST

SUITE("containers", SKIP_IF(!container_is_possible()), FIXTURE(set_up, tear_down),
      TESTS(containers_share_a_cache, a_killed_container_holds_nothing,
            a_client_outlives_its_connection, a_forked_child_counts_as_its_parent,
            connections_of_a_process_are_one_client, processes_of_two_containers_are_two_clients,
            the_next_daemon_notices_when_clients_end, an_old_library_is_told_to_update,
            no_lifeline_where_the_kernel_reports_ends,
            a_daemon_outside_serves_clients_in_containers),
      LOOPS(2, a_client_that_closes_its_lifeline_is_gone))
