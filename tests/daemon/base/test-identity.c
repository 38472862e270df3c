/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The user that a daemon switches to if root starts it by hand. A mount namespace replaces the
 * machine's users and groups with the test's own, so that the real ones do not matter.
 */

#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define KVD_LINE "kvd:x:4321:4322::/:/bin/sh\n"

static struct instance in;

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define RUN(ready, ...) \
        instance_run(&in, SETTINGS("--pool", "64M", "--backend", "host", __VA_ARGS__), ready)

static const char *file_in_dir(const char *name) {
        static char path[128];

        snprintf(path, sizeof path, "%s/%s", in.dir, name);
        return path;
}

static const char *write_text(const char *name, const char *text) {
        const char *path = file_in_dir(name);
        FILE *f = fopen(path, "w");

        ck_assert_ptr_nonnull(f);
        fputs(text, f);
        fclose(f);
        chmod(path, 0644);
        return path;
}

static void replace(const char *file, const char *name, const char *text) {
        ck_assert_int_eq(mount(write_text(name, text), file, NULL, MS_BIND, NULL), 0);
}

/* The test has a supplementary group, which the daemon must drop. Standard error goes to a file. */
static void setup(void) {
        int log;

        instance_make_dir(&in);
        chmod(in.dir, 0755);
        ck_assert_int_eq(unshare(CLONE_NEWNS), 0);
        ck_assert_int_eq(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
        replace("/etc/passwd", "passwd",
                "root:x:0:0::/:/bin/sh\n" KVD_LINE "other:x:4331:4332::/:/bin/sh\n");
        replace("/etc/group", "group", "root:x:0:\nmore:x:4400:other,kvd\n");
        ck_assert_int_eq(setgroups(1, (const gid_t[]){4500}), 0);
        log = open(write_text("log", ""), O_WRONLY | O_APPEND);
        ck_assert_int_eq(dup2(log, STDERR_FILENO), STDERR_FILENO);
        close(log);
}

static void teardown(void) {
        umount("/etc/passwd");
        umount("/etc/group");
        instance_sweep(&in);
}

/* Whether the file has a line that consists of key, such as "Uid:\t", and value. */
static bool says(const char *path, const char *key, const char *value) {
        char line[1024];
        FILE *f = fopen(path, "r");
        bool found = false;

        ck_assert_ptr_nonnull(f);
        while (!found && fgets(line, sizeof line, f)) {
                line[strcspn(line, "\n")] = 0;
                found = strncmp(line, key, strlen(key)) == 0 &&
                        strcmp(line + strlen(key), value) == 0;
        }
        fclose(f);
        return found;
}

static void is(const char *key, const char *value) {
        char path[64];

        snprintf(path, sizeof path, "/proc/%d/status", in.pid);
        ck_assert_msg(says(path, key, value), "not in %s: %s%s", path, key, value);
}

static void has_nothing_left(void) {
        is("CapInh:\t", "0000000000000000");
        is("CapPrm:\t", "0000000000000000");
        is("CapEff:\t", "0000000000000000");
        is("CapAmb:\t", "0000000000000000");
        is("NoNewPrivs:\t", "1");
}

static void end(void) {
        kill(in.pid, SIGTERM);
        ck_assert_int_eq(wait_status(in.pid), 0);
}

static bool logged(const char *line) {
        return says(file_in_dir("log"), "kvd: ", line);
}

/* ---- which user ------------------------------------------------------------------------------ */

START_TEST(a_user_with_its_groups) {
        RUN(true, "--socket", in.socket, "--user", "other");
        is("Uid:\t", "4331\t4331\t4331\t4331");
        is("Gid:\t", "4332\t4332\t4332\t4332");
        is("Groups:\t", "4332 4400 ");
        has_nothing_left();
        ck_assert(logged("goes on as user other"));
        end();
}
END_TEST

START_TEST(a_number_without_entry) {
        RUN(true, "--socket", in.socket, "--set", "daemon.user=4777");
        is("Uid:\t", "4777\t4777\t4777\t4777");
        is("Gid:\t", "4777\t4777\t4777\t4777");
        is("Groups:\t", " ");
        has_nothing_left();
        end();
}
END_TEST

START_TEST(unless_told_the_user_kvd) {
        RUN(true, "--socket", in.socket);
        is("Uid:\t", "4321\t4321\t4321\t4321");
        is("Groups:\t", "4322 4400 ");
        has_nothing_left();
        end();
}
END_TEST

START_TEST(there_is_no_such_user) {
        umount("/etc/passwd");
        replace("/etc/passwd", "passwd", "root:x:0:0::/:/bin/sh\n");
        RUN(true, "--socket", in.socket);
        is("Uid:\t", "0\t0\t0\t0");
        ck_assert(logged("started by root, and there is no user kvd: kvd goes on as root; give it "
                         "another user with --user"));
        end();
        RUN(false, "--socket", in.socket, "--user", "kvd");
        ck_assert_int_eq(wait_status(in.pid), 1);
}
END_TEST

START_TEST(root_stays_root_if_told) {
        if (_i == 0)
                RUN(true, "--socket", in.socket, "--user", "root");
        else
                RUN(true, "--private", in.dir);
        is("Uid:\t", "0\t0\t0\t0");
        is("Groups:\t", "4500 ");
        ck_assert(!logged("goes on as user root"));
        end();
        ck_assert_int_eq(access(in.socket, F_OK), -1);
}
END_TEST

START_TEST(refused) {
        RUN(false, "--private", in.dir, "--user", "other");
        ck_assert_int_eq(wait_status(in.pid), 1);
        ck_assert_int_eq(chown(in.dir, 4331, 4332), 0);
        become_user(4331);
        RUN(false, "--socket", in.socket, "--user", "kvd");
        ck_assert_int_eq(wait_status(in.pid), 1);
        ck_assert(logged("only root can become user 4321; leave out the option user, or start kvd "
                         "as root or as that user"));
        RUN(true, "--socket", in.socket, "--user", "other"); /* it runs as that user already */
        end();
        ck_assert_int_eq(setresuid(0, 0, 0), 0);
}
END_TEST

/* ---- service --------------------------------------------------------------------------------- */

/* Checks the daemon's user as the kernel reports it to every client. */
static void serves_as(const struct peer_end *p, uid_t uid, gid_t gid) {
        struct ucred server;
        socklen_t n = sizeof server;
        struct stat st;

        ck_assert_int_eq(getsockopt(p->fd, SOL_SOCKET, SO_PEERCRED, &server, &n), 0);
        ck_assert_uint_eq(server.uid, uid);
        ck_assert_int_eq(server.pid, in.pid);
        ck_assert_int_eq(stat(in.socket, &st), 0);
        ck_assert_uint_eq(st.st_uid, uid);
        ck_assert_uint_eq(st.st_gid, gid);
        ck_assert_uint_eq(st.st_mode & 0777, 0660);
}

static bool belongs_to_red(void) {
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg r = peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL));
        bool red = kvd_slice_is(r.attach_reply.domain, "red");

        peer_close(p);
        return red;
}

/*
 * Serves a client, reloads and ends. The socket stays in root's folder, and does not keep the next
 * daemon from starting.
 */
START_TEST(it_serves_and_ends) {
        struct peer_end *p;
        for (int i = 0; i < 2; i++) {
                RUN(true, "--socket", in.socket, "--user", "other", "--config",
                    write_text("kvd.conf", ""));
                p = peer_attach(in.socket);
                serves_as(p, 4331, 4332);
                peer_ok(p, MSG(allocate, .space = peer_open_space(p, "s"), .count = 4));
                peer_close(p);
                ck_assert(!belongs_to_red());
                write_text("kvd.conf", "[domain red]\nusers=0\n");
                kill(in.pid, SIGHUP);
                WAIT_UNTIL(belongs_to_red());
                end();
                ck_assert_int_eq(access(in.socket, F_OK), 0);
        }
        unlink(in.socket);
        ck_assert_int_eq(chown(in.dir, 4331, 4332), 0); /* kvd may remove the socket now */
        RUN(true, "--socket", in.socket, "--user", "other");
        end();
        ck_assert_int_eq(access(in.socket, F_OK), -1);
}
END_TEST

static bool can_be_tested(void) {
        if (getuid() == 0 && unshare(CLONE_NEWNS) == 0)
                return true;
        fprintf(stderr, "SKIP: this needs root, and a mount namespace\n");
        return false;
}

SUITE("identity", SKIP_IF(!can_be_tested()), FIXTURE(setup, teardown),
      TESTS(a_user_with_its_groups, a_number_without_entry, unless_told_the_user_kvd,
            there_is_no_such_user),
      LOOPS(2, root_stays_root_if_told), TESTS(refused, it_serves_and_ends))
