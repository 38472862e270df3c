/* SPDX-License-Identifier: Apache-2.0 */

/* If the system lacks something at the start, the message contains the system's error. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "client/kvd.h"
#include "daemon/main/daemon.h"
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

/* Expects that the daemon does not start; the reason is in why. */
static void refused(const char *const *settings) {
        struct daemon *daemon;
        struct config config;

        inproc_configure(&config, in.socket, settings);
        ck_assert_int_lt(daemon_new(&config, &daemon, &why), 0);
}

/* ---- file locks ------------------------------------------------------------------------------ */

static int fail_flock(int fd, int operation) {
        errno = given;
        return -1;
}

static const int no_lock[] = {ENOLCK, ENOSYS, EOPNOTSUPP, EIO};

START_TEST(a_file_system_without_locks_is_named) {
        failing.flock = fail_flock;
        given = no_lock[_i];
        refused(SETTINGS(file, "daemon.file_size=4M"));
        ck_assert_msg(strstr(why.line, strerror(given)) && strstr(why.line, "cannot be locked"),
                      "%s", why.line);
        ck_assert_ptr_null(strstr(why.line, "another kvd"));
}
END_TEST

START_TEST(another_kvd_that_has_the_file_is_named) {
        int fd = open(file + strlen("daemon.file="), O_RDWR | O_CREAT | O_CLOEXEC, 0600);

        ck_assert_int_eq(flock(fd, LOCK_EX | LOCK_NB), 0);
        refused(SETTINGS(file, "daemon.file_size=4M"));
        ck_assert_ptr_nonnull(strstr(why.line, "another kvd has it open"));
        close(fd);
}
END_TEST

/* ---- what the system lacks ------------------------------------------------------------------- */

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

START_TEST(a_start_without_memfd_is_refused) {
        failing.memfd_create = fail_memfd;
        given = ENOSYS;
        refused(NULL);
        ck_assert_str_eq(why.line, "memory cannot be shared: Function not implemented; kvd needs "
                                   "memfd_create with seals (Linux 5.1)");
}
END_TEST

START_TEST(a_start_without_proc_is_refused) {
        failing.open = open_without_proc;
        refused(NULL);
        ck_assert_ptr_nonnull(strstr(why.line, "mount /proc"));
}
END_TEST

/* Clients get ENOMEM instead: ENOENT would mean that there is no daemon, or no such space. */
START_TEST(clients_get_no_enoent_for_what_the_daemon_lacks) {
        static const struct kvd_geometry geometry = {.layers = 1,
                                                     .kv_heads = 1,
                                                     .head_dim = 32,
                                                     .dtype = KVD_F32,
                                                     .vocab = 1000};
        struct inproc d;
        kvd_space *space;
        kvd *handle;

        failing.open = open_without_proc;
        on = false;
        inproc_start(&d, NULL);
        ck_assert_int_eq(kvd_open(d.in.socket, &handle), 0);
        on = true;
        ck_assert_int_eq(kvd_space_open(handle, "s", &geometry, NULL, &space), -ENOMEM);
        ck_assert_msg(strstr(kvd_error(), "no memory for the index of space 's'"), "%s",
                      kvd_error());
        failing.open = kvd_sys_real.open;
        failing.memfd_create = fail_memfd;
        given = EMFILE;
        ck_assert_int_eq(kvd_space_open(handle, "s", &geometry, NULL, &space), -ENOMEM);
        ck_assert_msg(strstr(kvd_error(), strerror(EMFILE)), "%s", kvd_error());
        kvd_close(handle);
        inproc_stop(&d);
}
END_TEST

/* Only kvd_open returns -ENOENT for this. */
START_TEST(an_open_handle_gets_no_enoent_from_a_stopped_daemon) {
        static const struct kvd_geometry geometry = {.layers = 1,
                                                     .kv_heads = 1,
                                                     .head_dim = 32,
                                                     .dtype = KVD_F32,
                                                     .vocab = 1000};
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

/* ---- --check-config -------------------------------------------------------------------------- */

/* KEY stands for the path of a file, TIER for a path that does not exist. */
static const struct {
        const char *text;
        mode_t mode;     /* of KEY */
        const char *why; /* NULL if both accept it */
} judged[] = {
        {"[daemon]\nfile = TIER\nfile_size = 8M\n", 0600, NULL},
        {"[daemon]\nremote = redis://127.0.0.1:1\nremote_key = KEY\n", 0600, NULL},
        {"[daemon]\nfile = TIER\nfile_size = 1M\n", 0600, "file_size is smaller than 4M"},
        {"[daemon]\nfile = TIER\n", 0600, "set file_size"},
        {"[daemon]\nfile = KEY\n", 0600, "set file_size"},
        {"[daemon]\nfile = TIER, KEY\nfile_size = 8M\n", 0600, "name one path"},
        {"[daemon]\nfile = /nonexistent/tier\nfile_size = 8M\n", 0600, "No such file"},
        {"[daemon]\nremote = http://foo\n", 0600, "remote 'http://foo' must begin with"},
        {"[daemon]\nremote = redis://h:0\n", 0600, "h:0"},
        {"[daemon]\nremote = redis://h\nremote_key = KEY\n", 0644, "others may read or change it"},
        {"[daemon]\nremote = redis://h\nremote_key = /nonexistent\n", 0600, "No such file"},
        {"[daemon]\nremote = rediss://h\nremote_ca = KEY\n", 0600, "no certificates in PEM"},
        {"[daemon]\nremote = mooncake://h:1\nremote_password = KEY\n", 0600, "remote_password"},
        {"[daemon]\nbackend = cuda\n", 0600, "the GPU backend is not available"},
        {"[daemon]\npool = 25%\n[domain a]\nguarantee = 200T\n", 0600, "all guarantees together"},
};

static void replace(char *text, const char *name, const char *by) {
        char rest[300];

        for (char *at = text; (at = strstr(at, name)); at += strlen(by)) {
                strcpy(rest, at + strlen(name));
                sprintf(at, "%s%s", by, rest);
        }
}

static void write_judged(const char *path, const char *key, const char *tier, int i) {
        char text[400];
        FILE *f = fopen(path, "w");

        strcpy(text, judged[i].text);
        replace(text, "KEY", key);
        replace(text, "TIER", tier);
        fputs(text, f);
        fclose(f);
        f = fopen(key, "w");
        fputs("0123456789abcdef", f);
        fchmod(fileno(f), judged[i].mode);
        fclose(f);
}

/* Returns the exit status of kvd. */
static int run(const char *format, const char *path, char said[static 1000]) {
        char command[600];
        FILE *f;

        snprintf(command, sizeof command, format, getenv("KVD"), in.dir, path);
        f = popen(command, "re");
        ck_assert_ptr_nonnull(f);
        said[fread(said, 1, 999, f)] = 0;
        return WEXITSTATUS(pclose(f));
}

/* A daemon that starts is ended as soon as it serves. */
#define START \
        "mkfifo %2$s/up && { %1$s --private %2$s --config %3$s --ready-fd 4 2>&1 4>%2$s/up & " \
        "} && if read up <%2$s/up; then kill $!; fi; wait $!"
#define CHECK "%1$s --check-config %3$s 2>&1 && : %2$s"

START_TEST(the_check_and_the_start_agree) {
        char path[128], key[128], tier[128], said[1000] = "";
        int checked, started;

        snprintf(path, sizeof path, "%s/kvd.conf", in.dir);
        snprintf(key, sizeof key, "%s/secret", in.dir);
        snprintf(tier, sizeof tier, "%s/tier", in.dir);
        write_judged(path, key, tier, _i);
        unsetenv("LD_LIBRARY_PATH"); /* no GPU */
        checked = run(CHECK, path, said);
        ck_assert_int_eq(checked, judged[_i].why ? 1 : 0);
        ck_assert_msg(judged[_i].why ? strstr(said, judged[_i].why) != NULL : !said[0], "%s", said);
        ck_assert_int_eq(access(tier, F_OK), -1); /* the check creates no file */
        started = run(START, path, said);
        ck_assert_msg((started != 0) == (checked != 0), "%d: %s", started, said);
        ck_assert_msg(!judged[_i].why || strstr(said, judged[_i].why), "%s", said);
}
END_TEST

/* Administrators check a configuration while a kvd runs with it. */
START_TEST(the_check_takes_no_lock) {
        const char *tier = file + strlen("daemon.file=");
        char path[128], said[1000];
        int fd = open(tier, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        FILE *f;

        ck_assert_int_eq(flock(fd, LOCK_EX | LOCK_NB), 0);
        snprintf(path, sizeof path, "%s/kvd.conf", in.dir);
        f = fopen(path, "w");
        fprintf(f, "[daemon]\nfile = %s\nfile_size = 8M\n", tier);
        fclose(f);
        ck_assert_int_eq(run(CHECK, path, said), 0);
        close(fd);
}
END_TEST

SUITE("start", FIXTURE(setup, teardown),
      LOOPS(ARRAY_SIZE(no_lock), a_file_system_without_locks_is_named),
      TESTS(another_kvd_that_has_the_file_is_named, a_start_without_memfd_is_refused,
            a_start_without_proc_is_refused, clients_get_no_enoent_for_what_the_daemon_lacks,
            an_open_handle_gets_no_enoent_from_a_stopped_daemon, the_check_takes_no_lock),
      LOOPS(ARRAY_SIZE(judged), the_check_and_the_start_agree))
