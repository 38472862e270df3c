/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Another user's folder, and another user's daemon at the path where a client expects its own.
 * Several users run daemons and programs at the same path, so the test must run as root.
 */

#include <errno.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "client/kvd.h"
#include "daemon/base/identity.h"
#include "daemon/main/activation.h"
#include "daemon/main/daemon.h"
#include "tests/lib/inproc.h"
#include "tests/lib/suite.h"

enum { ROOT = 0, MALLORY = 1001, ALICE = 1002 };

static struct instance in; /* a folder and a path in it */
static pid_t server;

static void become(uid_t user) {
        if (setgroups(0, NULL) < 0 || setgid(user) < 0 || setuid(user) < 0)
                die("cannot become user %u: %s", user, strerror(errno));
}

/* ---- daemons --------------------------------------------------------------------------------- */

static _Noreturn void serve(uid_t user, const char *path, int ready) {
        const struct identity same = {.stays = true};
        struct daemon *daemon;
        struct config config;
        struct kvd_why why;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        become(user);
        inproc_configure(&config, path, SETTINGS("daemon.socket_mode=0666"));
        if (daemon_new(&config, &daemon, &why) < 0 ||
            daemon_listen(daemon, &ACTIVATION_NONE, &same, &why) < 0)
                die("%s", why.line);
        if (write(ready, "", 1) != 1)
                _exit(1);
        _exit(daemon_run(daemon) < 0);
}

static void listen_as(uid_t user, const char *path) {
        int ready[2];
        char byte;

        ck_assert_int_eq(pipe(ready), 0);
        server = fork();
        if (server == 0)
                serve(user, path, ready[1]);
        close(ready[1]);
        ck_assert_int_eq(read(ready[0], &byte, 1), 1);
        close(ready[0]);
}

static void end_server(void) {
        if (server) {
                kill(server, SIGKILL);
                waitpid(server, NULL, 0);
        }
        server = 0;
}

static void replace_by(uid_t user, const char *path) {
        end_server();
        unlink(path);
        listen_as(user, path);
}

static void make_folder(uid_t owner, mode_t mode) {
        ck_assert_int_eq(chown(in.dir, owner, owner), 0);
        ck_assert_int_eq(chmod(in.dir, mode), 0);
}

static void set_up(void) {
        unsetenv("KVD_SERVER_USER");
        instance_make_dir(&in);
        make_folder(MALLORY, 0777);
}

static void tear_down(void) {
        end_server();
        instance_sweep(&in);
}

/* ---- programs -------------------------------------------------------------------------------- */

static int open_stated(const char *path, const char *user) {
        kvd *handle;
        int r = kvd_open_expecting(path, user, &handle);

        if (r == 0)
                kvd_close(handle);
        return r;
}

/* Opens the path in a process of this user. Returns 0 or a negative errno. */
static int opened(uid_t user, const char *path, const char *stated) {
        pid_t pid = fork();

        if (pid == 0) {
                become(user);
                _exit(-open_stated(path, stated));
        }
        return -wait_status(pid);
}

START_TEST(another_users_daemon_is_refused) {
        listen_as(MALLORY, in.socket);
        ck_assert_int_eq(opened(ALICE, in.socket, NULL), -EPERM);
        ck_assert_int_eq(opened(ROOT, in.socket, NULL), -EPERM);
        ck_assert_int_eq(open_stated(in.socket, ""), -EPERM);
        ck_assert_ptr_nonnull(
                strstr(kvd_error(), "runs as user 1001, neither as root nor as user 0"));
        ck_assert_int_eq(opened(MALLORY, in.socket, NULL), 0);
}
END_TEST

START_TEST(own_daemons_and_roots_are_trusted) {
        listen_as(ALICE, in.socket);
        ck_assert_int_eq(opened(ALICE, in.socket, NULL), 0);
        ck_assert_int_eq(opened(MALLORY, in.socket, NULL), -EPERM);
        replace_by(ROOT, in.socket);
        ck_assert_int_eq(opened(ALICE, in.socket, NULL), 0);
        ck_assert_int_eq(opened(ALICE, in.socket, "1001"), 0);
}
END_TEST

START_TEST(a_stated_user_is_trusted) {
        listen_as(MALLORY, in.socket);
        ck_assert_int_eq(opened(ALICE, in.socket, "1001"), 0);
        ck_assert_int_eq(opened(MALLORY, in.socket, "root"), -EPERM);
        ck_assert_int_eq(opened(ALICE, in.socket, "1001x"), -EINVAL);
        ck_assert_int_eq(opened(ALICE, in.socket, "4294967295"), -EINVAL);
        setenv("KVD_SERVER_USER", "1001", 1);
        ck_assert_int_eq(opened(ALICE, in.socket, NULL), 0);
        ck_assert_int_eq(opened(ALICE, in.socket, "1002"), -EPERM);
        setenv("KVD_SERVER_USER", "1002", 1);
        ck_assert_int_eq(open_stated(in.socket, NULL), -EPERM);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "runs as user 1001, but user 1002 (or root)"));
}
END_TEST

/* Only root can create this folder, so no other user can listen in it; in one below it, one can. */
START_TEST(a_folder_only_root_can_create_is_trusted) {
        char inner[sizeof in.socket], below[2 * sizeof in.socket], link[sizeof in.socket];
        struct instance tmp = in;

        strcpy(in.dir, "/run/kvd-test-XXXXXX");
        if (!mkdtemp(in.dir))
                die("%s: %s", in.dir, strerror(errno));
        snprintf(in.socket, sizeof in.socket, "%s/kvd.sock", in.dir);
        snprintf(inner, sizeof inner, "%s/inner", in.dir);
        snprintf(below, sizeof below, "%s/kvd.sock", inner);
        snprintf(link, sizeof link, "%s/link", tmp.dir);
        make_folder(MALLORY, 0755);
        listen_as(MALLORY, in.socket);
        ck_assert_int_eq(opened(ALICE, in.socket, NULL), 0);
        ck_assert_int_eq(symlink(in.socket, link), 0);
        ck_assert_int_eq(opened(ALICE, link, NULL), -EPERM);
        ck_assert_int_eq(opened(MALLORY, link, NULL), 0);
        make_folder(MALLORY, 0775);
        ck_assert_int_eq(opened(ALICE, in.socket, NULL), -EPERM);
        make_folder(ROOT, 0755); /* root created the socket, and then changed to another user */
        ck_assert_int_eq(opened(ALICE, in.socket, NULL), 0);
        make_folder(ALICE, 0755);
        ck_assert_int_eq(opened(ROOT, in.socket, NULL), -EPERM);
        make_folder(MALLORY, 0755);
        ck_assert_int_eq(mkdir(inner, 0755), 0);
        ck_assert_int_eq(chown(inner, MALLORY, MALLORY), 0);
        replace_by(MALLORY, below);
        ck_assert_int_eq(opened(ALICE, below, NULL), -EPERM);
        unlink(below);
        rmdir(inner);
        instance_sweep(&in);
        in = tmp;
}
END_TEST

START_TEST(abstract_sockets_are_trusted_by_their_user) {
        char name[64];

        snprintf(name, sizeof name, "@kvd-test-%d", getpid());
        listen_as(MALLORY, name);
        ck_assert_int_eq(opened(ALICE, name, NULL), -EPERM);
        ck_assert_int_eq(opened(MALLORY, name, NULL), 0);
        replace_by(ROOT, name);
        ck_assert_int_eq(opened(ALICE, name, NULL), 0);
}
END_TEST

/* Another user has taken the path by the time the handle reconnects. */
START_TEST(reconnecting_checks_the_server_again) {
        static const struct kvd_geometry geometry = {.layers = 1,
                                                     .kv_heads = 1,
                                                     .head_dim = 32,
                                                     .dtype = KVD_F32,
                                                     .vocab = 1000};
        kvd_space *space;
        kvd *handle;

        listen_as(ROOT, in.socket);
        ck_assert_int_eq(kvd_open(in.socket, &handle), 0);
        replace_by(MALLORY, in.socket);
        while (kvd_space_open(handle, "engine", &geometry, NULL, &space) == -ECONNRESET)
                ;
        ck_assert_int_eq(kvd_space_open(handle, "engine", &geometry, NULL, &space), -EPERM);
        kvd_close(handle);
}
END_TEST

/* In a user namespace without mappings, all users have the same uid, which identifies nobody. */
START_TEST(an_unmapped_user_is_refused) {
        pid_t pid;

        listen_as(MALLORY, in.socket);
        pid = fork();
        if (pid == 0) {
                become(ALICE);
                if (unshare(CLONE_NEWUSER) == 0)
                        _exit(-open_stated(in.socket, NULL));
                puts("not shown: this machine allows no user namespace");
                fflush(stdout);
                _exit(EPERM);
        }
        ck_assert_msg(wait_status(pid) == EPERM, "another user was taken for the caller's own");
}
END_TEST

static bool is_root(void) {
        if (geteuid() == 0)
                return true;
        puts("skipped: only root can be several users");
        return false;
}

SUITE("server-user", SKIP_IF(!is_root()), FIXTURE(set_up, tear_down),
      TESTS(another_users_daemon_is_refused, own_daemons_and_roots_are_trusted,
            a_stated_user_is_trusted, a_folder_only_root_can_create_is_trusted,
            abstract_sockets_are_trusted_by_their_user, reconnecting_checks_the_server_again,
            an_unmapped_user_is_refused))
