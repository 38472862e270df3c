/* SPDX-License-Identifier: Apache-2.0 */

/* What the system refuses at the start is said there, and in the words of its own error. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>

#include "client/kvd.h"
#include "daemon/daemon.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/inproc.h"
#include "tests/lib/suite.h"

static struct kvd_sys failing;
static struct instance in;
static char file[128];
static struct kvd_why why;
static int given; /* errno */
static bool on;

static void setup(void) {
        instance_make_dir(&in);
        snprintf(file, sizeof file, "daemon.file=%s/tier", in.dir);
        failing = kvd_sys_real;
        sys = &failing;
        on = true;
}

static void teardown(void) {
        sys = &kvd_sys_real;
        instance_sweep(&in);
}

/* Does not start; says why in why. */
static void refused(const char *const *settings) {
        struct daemon *daemon;
        struct config config;

        inproc_configure(&config, in.socket, settings);
        ck_assert_int_lt(daemon_new(&config, &daemon, &why), 0);
}

/* ---- B7 -------------------------------------------------------------------------------------- */

static int fail_flock(int fd, int operation) {
        errno = given;
        return -1;
}

static const int no_lock[] = {ENOLCK, ENOSYS, EOPNOTSUPP, EIO};

START_TEST(b7_a_file_system_without_locks_is_named) {
        failing.flock = fail_flock;
        given = no_lock[_i];
        refused(SETTINGS(file, "daemon.file_size=4M"));
        ck_assert_msg(strstr(why.line, strerror(given)) && strstr(why.line, "cannot be locked"), "%s",
                      why.line);
        ck_assert_ptr_null(strstr(why.line, "another kvd"));
}
END_TEST

START_TEST(b7_another_kvd_is_named) {
        int fd = open(file + strlen("daemon.file="), O_RDWR | O_CREAT | O_CLOEXEC, 0600);

        ck_assert_int_eq(flock(fd, LOCK_EX | LOCK_NB), 0);
        refused(SETTINGS(file, "daemon.file_size=4M"));
        ck_assert_ptr_nonnull(strstr(why.line, "another kvd has it open"));
        close(fd);
}
END_TEST

/* ---- B8 -------------------------------------------------------------------------------------- */

static int fail_memfd(const char *name, unsigned flags) {
        errno = given;
        return -1;
}

static int open_without_proc(const char *path, int flags) {
        if (on && strncmp(path, "/proc/", 6) == 0) {
                errno = ENOENT;
                return -1;
        }
        return kvd_sys_real.open(path, flags);
}

START_TEST(b8_a_start_without_memfd_is_refused) {
        failing.memfd_create = fail_memfd;
        given = ENOSYS;
        refused(NULL);
        ck_assert_str_eq(why.line, "memory cannot be shared: Function not implemented; kvd needs "
                                   "memfd_create with seals (Linux 5.1)");
}
END_TEST

START_TEST(b8_a_start_without_proc_is_refused) {
        failing.open = open_without_proc;
        refused(NULL);
        ck_assert_ptr_nonnull(strstr(why.line, "mount /proc"));
}
END_TEST

/* A space needs memory; "there is no such file" would say that there is no daemon, or no space. */
START_TEST(b8_what_the_daemon_lacks_is_not_said_in_its_clients_errors) {
        static const struct kvd_geometry geometry = {.layers = 1, .kv_heads = 1, .head_dim = 32,
                                                     .dtype = KVD_F32, .vocab = 1000};
        struct inproc d;
        kvd_space *space;
        kvd *handle;

        failing.open = open_without_proc;
        on = false;
        inproc_start(&d, NULL);
        ck_assert_int_eq(kvd_open(d.in.socket, &handle), 0);
        on = true;
        ck_assert_int_eq(kvd_space_open(handle, "s", &geometry, NULL, &space), -ENOMEM);
        ck_assert_msg(strstr(kvd_error(), "no memory for the index of space 's'"), "%s", kvd_error());
        failing.open = kvd_sys_real.open;
        failing.memfd_create = fail_memfd;
        given = EMFILE;
        ck_assert_int_eq(kvd_space_open(handle, "s", &geometry, NULL, &space), -ENOMEM);
        ck_assert_msg(strstr(kvd_error(), strerror(EMFILE)), "%s", kvd_error());
        kvd_close(handle);
        inproc_stop(&d);
}
END_TEST

/* -ENOENT is for kvd_open alone. */
START_TEST(b8_a_daemon_that_is_gone_is_not_missing) {
        static const struct kvd_geometry geometry = {.layers = 1, .kv_heads = 1, .head_dim = 32,
                                                     .dtype = KVD_F32, .vocab = 1000};
        struct inproc d;
        kvd_space *space;
        kvd *handle;
        int r;

        inproc_start(&d, NULL);
        ck_assert_int_eq(kvd_open(d.in.socket, &handle), 0);
        inproc_stop(&d);
        while ((r = kvd_space_open(handle, "s", &geometry, NULL, &space)) == -ECONNRESET)
                ;
        ck_assert_int_eq(r, -ECONNREFUSED);
        kvd_close(handle);
        ck_assert_int_eq(kvd_open(d.in.socket, &handle), -ENOENT);
}
END_TEST

SUITE("start", FIXTURE(setup, teardown),
      LOOPS(ARRAY_SIZE(no_lock), b7_a_file_system_without_locks_is_named),
      TESTS(b7_another_kvd_is_named, b8_a_start_without_memfd_is_refused,
            b8_a_start_without_proc_is_refused,
            b8_what_the_daemon_lacks_is_not_said_in_its_clients_errors,
            b8_a_daemon_that_is_gone_is_not_missing))
