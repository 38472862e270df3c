/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Files that the configuration names are opened only if no other user can read or change them. Each
 * rule is tried on files made for it, and then with a daemon for each setting.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/base/trusted.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

enum { MALLORY = 4001, KVD_USER = 4002 };

static struct instance in;
static char path[128], other[128];
static struct kvd_why why;

static void setup(void) {
        instance_make_dir(&in);
        snprintf(path, sizeof path, "%s/file", in.dir);
        snprintf(other, sizeof other, "%s/other", in.dir);
}

static void teardown(void) {
        ck_assert_int_eq(seteuid(0), 0);
        become_user(0);
        instance_sweep(&in);
}

static void make(const char *at, uid_t owner, mode_t mode) {
        int fd = open(at, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(write(fd, "0123456789abcdef", 16), 16);
        ck_assert_int_eq(fchown(fd, owner, owner), 0);
        ck_assert_int_eq(fchmod(fd, mode), 0);
        close(fd);
}

static int try(enum trust trust, uid_t user) {
        int fd = trusted_open(&(struct trusted){"setting", path, trust, user}, O_RDONLY, &why);

        if (fd < 0)
                return fd;
        ck_assert_int_eq(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
        close(fd);
        return 0;
}

static void expect_refused(enum trust trust, const char *text) {
        char begin[160];

        ck_assert_int_eq(try(trust, geteuid()), TRUSTED_NOT);
        snprintf(begin, sizeof begin, "setting %s: ", path);
        ck_assert_msg(strstr(why.line, begin) == why.line && strstr(why.line, text), "%s",
                      why.line);
}

/* ---- files ----------------------------------------------------------------------------------- */

#define READ "others may read or change it; chmod 600 it"
#define WRITE "others may change it; chmod go-w it"
#define OWNER "user 4001 owns it"

static const struct {
        uid_t we, owner;
        mode_t mode;
        enum trust trust;
        const char *why; /* NULL if it is opened */
} files[] = {
        {0, 0, 0600, TRUST_DATA, NULL},
        {0, MALLORY, 0600, TRUST_DATA, OWNER},
        {0, MALLORY, 0666, TRUST_DATA, OWNER},
        {0, 0, 0640, TRUST_DATA, READ},
        {0, 0, 0604, TRUST_DATA, READ},
        {0, 0, 0620, TRUST_DATA, READ},
        {0, 0, 0601, TRUST_DATA, READ},
        {0, 0, 0400, TRUST_SECRET, NULL},
        {0, 0, 0640, TRUST_SECRET, READ},
        {0, MALLORY, 0600, TRUST_SECRET, OWNER},
        {0, 0, 0644, TRUST_CONFIG, NULL},
        {0, 0, 0664, TRUST_CONFIG, WRITE},
        {0, MALLORY, 0644, TRUST_CONFIG, OWNER},
        {0, 0, 0644, TRUST_PUBLIC, NULL},
        {0, 0, 0664, TRUST_PUBLIC, WRITE},
        {0, 0, 0646, TRUST_PUBLIC, WRITE},
        {0, MALLORY, 0644, TRUST_PUBLIC, OWNER},
        {0, 0, 0755, TRUST_LIBRARY, NULL},
        {0, 0, 0775, TRUST_LIBRARY, WRITE},
        {0, MALLORY, 0755, TRUST_LIBRARY, OWNER},
        /* root may give the group of kvd a secret, but no file tier */
        {KVD_USER, 0, 0640, TRUST_SECRET, NULL},
        {KVD_USER, 0, 0660, TRUST_SECRET, READ},
        {KVD_USER, 0, 0644, TRUST_SECRET, READ},
        {KVD_USER, KVD_USER, 0600, TRUST_SECRET, NULL},
        {KVD_USER, KVD_USER, 0640, TRUST_SECRET, READ},
        {KVD_USER, KVD_USER, 0600, TRUST_DATA, NULL},
        {KVD_USER, 0, 0644, TRUST_DATA, "user 0 owns it"},
        {KVD_USER, 0, 0644, TRUST_PUBLIC, NULL},
        {KVD_USER, MALLORY, 0644, TRUST_PUBLIC, OWNER},
};

START_TEST(a_file_is_opened_if_no_other_user_could_change_it) {
        make(path, files[_i].owner, files[_i].mode);
        if (files[_i].owner != files[_i].we) /* so that open() works */
                ck_assert_int_eq(chown(path, files[_i].owner, KVD_USER), 0);
        ck_assert_int_eq(chmod(in.dir, 0755), 0);
        if (files[_i].we)
                become_user(files[_i].we);
        if (files[_i].why)
                expect_refused(files[_i].trust, files[_i].why);
        else
                ck_assert_msg(try(files[_i].trust, files[_i].we) == 0, "%s", why.line);
}
END_TEST

START_TEST(the_user_that_kvd_becomes_is_trusted) {
        make(path, KVD_USER, 0600);
        ck_assert_int_eq(try(TRUST_DATA, KVD_USER), 0);
        ck_assert_int_eq(try(TRUST_DATA, MALLORY), TRUSTED_NOT);
}
END_TEST

/*
 * In a sticky folder the kernel may refuse to open another user's file with O_CREAT. The error must
 * still name its owner.
 */
START_TEST(only_own_files_in_a_sticky_folder_are_opened) {
        struct trusted file = {"setting", path, TRUST_DATA, 0};
        struct stat st;
        int fd;

        ck_assert_int_eq(chmod(in.dir, 01777), 0);
        make(path, MALLORY, 0666);
        ck_assert_int_eq(trusted_open(&file, O_RDWR | O_CREAT, &why), TRUSTED_NOT);
        ck_assert_ptr_nonnull(strstr(why.line, OWNER));
        unlink(path);
        umask(0);
        fd = trusted_open(&file, O_RDWR | O_CREAT, &why);
        ck_assert_int_ge(fd, 0);
        ck_assert(fstat(fd, &st) == 0 && (st.st_mode & 07777) == 0600);
        close(fd);
        ck_assert_int_eq(try(TRUST_DATA, 0), 0);
}
END_TEST

START_TEST(a_hard_link_is_refused) {
        make(path, 0, 0600);
        ck_assert_int_eq(link(path, other), 0);
        expect_refused(TRUST_DATA, "2 hard links");
        expect_refused(TRUST_SECRET, "2 hard links");
        expect_refused(TRUST_PUBLIC, "2 hard links");
        ck_assert_int_eq(try(TRUST_LIBRARY, 0), 0); /* package managers make hard links */
}
END_TEST

/* Another user's link may lead to a file of ours that serves another purpose. */
START_TEST(a_link_is_followed_if_it_is_ours) {
        make(other, 0, 0600);
        ck_assert_int_eq(symlink(other, path), 0);
        ck_assert_int_eq(try(TRUST_DATA, 0), 0);
        ck_assert_int_eq(lchown(path, MALLORY, MALLORY), 0);
        expect_refused(TRUST_DATA, "it is a link of user 4001");
        ck_assert_int_eq(lchown(path, 0, 0), 0);
        ck_assert_int_eq(chown(other, MALLORY, MALLORY), 0);
        expect_refused(TRUST_DATA, OWNER); /* the target counts, too */
        unlink(other);
        ck_assert_int_eq(try(TRUST_DATA, 0), -ENOENT);
        ck_assert_int_eq(symlink(path, other), 0);
        ck_assert_int_eq(try(TRUST_DATA, 0), -ELOOP);
}
END_TEST

/* A pipe without a writer would block the start forever. */
START_TEST(a_path_that_is_not_a_file_is_refused) {
        ck_assert_int_eq(mkfifo(path, 0600), 0);
        expect_refused(TRUST_SECRET, "it is not a regular file");
        expect_refused(TRUST_PUBLIC, "it is not a regular file");
        expect_refused(TRUST_DATA, "neither a regular file nor a block device");
        unlink(path);
        ck_assert_int_eq(mkdir(path, 0700), 0);
        expect_refused(TRUST_PUBLIC, "it is not a regular file");
        snprintf(path, sizeof path, "/dev/zero");
        expect_refused(TRUST_CONFIG, "it is not a regular file");
        snprintf(path, sizeof path, "/dev/null");
        ck_assert_int_eq(try(TRUST_CONFIG, 0), 0);
        expect_refused(TRUST_SECRET, "it is not a regular file");
}
END_TEST

START_TEST(others_must_not_be_able_to_replace_the_socket) {
        static const struct {
                uid_t owner;
                mode_t mode;
                bool good;
        } folders[] = {{0, 0755, true},        {0, 01777, true}, {KVD_USER, 0755, true},
                       {0, 0777, false},       {0, 0775, false}, {MALLORY, 0755, false},
                       {MALLORY, 01777, false}};

        for (size_t i = 0; i < ARRAY_SIZE(folders); i++) {
                ck_assert_int_eq(chown(in.dir, folders[i].owner, 0), 0);
                ck_assert_int_eq(chmod(in.dir, folders[i].mode), 0);
                ck_assert_int_eq(trusted_socket(in.socket, KVD_USER, &why),
                                 folders[i].good ? 0 : TRUSTED_NOT);
        }
        ck_assert_int_eq(trusted_socket("@abstract/name", KVD_USER, &why), 0);
        ck_assert_int_eq(trusted_socket("/nonexistent/kvd.sock", KVD_USER, &why), -ENOENT);
}
END_TEST

/* ---- daemons --------------------------------------------------------------------------------- */

/* Settings that name a file, which belongs to another user here, and what they need to be valid. */
static const struct {
        const char *setting, *more;
} settings[] = {
        {"file", "daemon.file_size=4M"},
        {"remote_key", "daemon.remote=redis://127.0.0.1:1"},
        {"remote_password", "daemon.remote=redis://127.0.0.1:1"},
        {"remote_ca", "daemon.remote=rediss://127.0.0.1:1"},
        {"remote_certificate", "daemon.remote=rediss://127.0.0.1:1"},
        {"remote_certificate_key", "daemon.remote=rediss://127.0.0.1:1"},
        {"remote_library", "daemon.remote=mooncake://127.0.0.1:1"},
};

static void expect_no_start(const char *arguments, int status, const char *text) {
        char command[1000], said[1000] = "";
        FILE *f;

        snprintf(command, sizeof command, "exec timeout 60 %s --backend host --pool 4M %s 2>&1",
                 getenv("KVD"), arguments);
        f = popen(command, "re");
        ck_assert_ptr_nonnull(f);
        said[fread(said, 1, sizeof said - 1, f)] = 0;
        ck_assert_int_eq(WEXITSTATUS(pclose(f)), status);
        ck_assert_msg(strstr(said, text) != NULL, "%s", said);
}

START_TEST(a_setting_that_names_another_users_file_is_refused) {
        char arguments[600], text[200];

        make(path, MALLORY, 0666);
        snprintf(arguments, sizeof arguments, "--private %s --set %s --set daemon.%s=%s", in.dir,
                 settings[_i].more, settings[_i].setting, path);
        snprintf(text, sizeof text, "%s %s: " OWNER, settings[_i].setting, path);
        expect_no_start(arguments, 2, text);
}
END_TEST

START_TEST(a_configuration_that_others_may_change_is_refused) {
        char arguments[300], text[200];

        make(path, _i ? 0 : MALLORY, 0666);
        snprintf(arguments, sizeof arguments, "--private %s --config %s", in.dir, path);
        snprintf(text, sizeof text, "configuration %s: %s", path, _i ? WRITE : OWNER);
        expect_no_start(arguments, 1, text);
}
END_TEST

START_TEST(a_socket_in_a_folder_of_another_user_is_refused) {
        char arguments[300];

        ck_assert_int_eq(chown(in.dir, _i ? 0 : MALLORY, 0), 0);
        ck_assert_int_eq(chmod(in.dir, _i ? 0777 : 0755), 0);
        snprintf(arguments, sizeof arguments, "--socket %s --user root", in.socket);
        expect_no_start(arguments, 2, "could replace the socket in it");
        snprintf(arguments, sizeof arguments, "--keep --socket %s --user root", in.socket);
        expect_no_start(arguments, 2, "could replace the socket in it");
}
END_TEST

SUITE("trusted", SKIP_IF(geteuid() != 0), FIXTURE(setup, teardown),
      LOOPS(ARRAY_SIZE(files), a_file_is_opened_if_no_other_user_could_change_it),
      TESTS(the_user_that_kvd_becomes_is_trusted, only_own_files_in_a_sticky_folder_are_opened,
            a_hard_link_is_refused, a_link_is_followed_if_it_is_ours,
            a_path_that_is_not_a_file_is_refused, others_must_not_be_able_to_replace_the_socket),
      LOOPS(ARRAY_SIZE(settings), a_setting_that_names_another_users_file_is_refused),
      LOOPS(2, a_configuration_that_others_may_change_is_refused,
            a_socket_in_a_folder_of_another_user_is_refused))
