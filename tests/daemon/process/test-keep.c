/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon's messages to the process that keeps its descriptors. The test is that keeper, and
 * reads them when it likes.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/loop.h"
#include "daemon/base/notify.h"
#include "daemon/children/keeper_link.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

static struct notify notify;
static struct keep keep;
static struct loop *loop;
static struct loop_source reading;
static int end;             /* the keeper's */
static char seen[400][160]; /* the messages it got, each with its file's inode */
static unsigned n_seen, n_wanted;

static void set_up_with(const char *most) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        socklen_t size = sizeof address.sun_family; /* any name */

        notify.fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        end = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(bind(end, (struct sockaddr *)&address, size), 0);
        size = sizeof address;
        ck_assert_int_eq(getsockname(end, (struct sockaddr *)&address, &size), 0);
        ck_assert_int_eq(connect(notify.fd, (struct sockaddr *)&address, size), 0);
        if (most)
                setenv("FDSTORE", most, 1);
        ck_assert_int_eq(keep_init(&keep, &notify), 0);
        ck_assert_ptr_null(getenv("FDSTORE"));
        ck_assert_int_eq(loop_new(LOOP_EPOLL, 4, &loop), 0);
}

static void set_up(void) {
        set_up_with("300");
}

static void tear_down(void) {
        keep_clear(&keep);
        loop_free(loop);
        close(notify.fd);
        close(end);
}

static long inode(int fd) {
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        return (long)st.st_ino;
}

static bool take(void) {
        uint8_t text[KVD_FRAME_MAX];
        struct kvd_fds fds;
        ssize_t n = kvd_frame_receive(end, text, &fds, MSG_DONTWAIT);

        if (n < 0)
                return false;
        snprintf(seen[n_seen++], sizeof seen[0], "%.*s %ld", (int)n, (char *)text,
                 fds.n ? inode(fds.fd[0]) : 0);
        kvd_fds_close(&fds);
        return true;
}

static void came(struct loop_source *source, short revents) {
        if (take() && n_seen == n_wanted)
                loop_quit(loop);
}

/* Runs the daemon's loop until the keeper has read n messages. */
static void read_all(unsigned n) {
        n_wanted = n;
        while (n_seen < n && take())
                ;
        if (n_seen == n)
                return;
        reading = (struct loop_source){.fd = end, .events = POLLIN, .ready = came};
        ck_assert_int_eq(loop_add(loop, &reading), 0);
        ck_assert_int_eq(loop_run(loop), 0);
        loop_remove(&reading);
}

static void expect(unsigned i, const char *what, const char *name, long file) {
        char line[200];

        snprintf(line, sizeof line, "%s=1\nFDNAME=%s%s %ld", what, name, file ? "\nFDPOLL=0" : "",
                 file);
        ck_assert_str_eq(seen[i], line);
}

static int file(void) {
        int fd = memfd_create("test", MFD_CLOEXEC);

        ck_assert_int_ge(fd, 0);
        return fd;
}

static void keep_it(const char *name, int fd) {
        keep_ops(&keep)->keep(&keep, name, fd);
}

static void drop_it(const char *name) {
        keep_ops(&keep)->drop(&keep, name);
}

START_TEST(each_in_its_order) {
        int fds[200];
        long files[200];
        char name[32];

        for (int i = 0; i < 200; i++) {
                fds[i] = file();
                files[i] = inode(fds[i]);
                snprintf(name, sizeof name, "a.%d", i);
                keep_it(name, fds[i]); /* the keeper does not read, so most are queued */
                close(fds[i]);         /* as the store may */
        }
        keep_start(&keep, loop);
        read_all(200);
        for (unsigned i = 0; i < 200; i++) {
                snprintf(name, sizeof name, "a.%u", i);
                expect(i, "FDSTORE", name, files[i]);
        }
        ck_assert_uint_eq(keep_count(&keep), 200);
}
END_TEST

/* A descriptor that is dropped while it is queued is never sent. */
START_TEST(unsent_descriptors_are_not_removed) {
        int fd = file();
        uint32_t open = fds_of(0), sent;

        keep_start(&keep, loop);
        for (int i = 0; i < 100; i++) {
                char name[32];

                snprintf(name, sizeof name, "b.%d", i);
                keep_it(name, fd);
        }
        sent = 100 - (fds_of(0) - open);
        ck_assert_uint_lt(sent, 100);
        for (uint32_t i = sent; i < 100; i++) {
                char name[32];

                snprintf(name, sizeof name, "b.%u", i);
                drop_it(name);
        }
        keep_it("last.1", fd);
        read_all(sent + 1);
        expect(sent, "FDSTORE", "last.1", inode(fd));
        ck_assert_uint_eq(keep_count(&keep), sent + 1);
        ck_assert_uint_eq(fds_of(0), open);
        ck_assert(!take());
        close(fd);
}
END_TEST

START_TEST(a_name_is_never_there_twice) {
        int one = file(), two = file(), three = file();

        keep_start(&keep, loop);
        keep_it("a.1", one);
        keep_it("a.1", two);
        keep_known(&keep, "b.1"); /* kept for the previous daemon */
        keep_it("b.1", three);
        drop_it("a.1");
        drop_it("a.1");
        drop_it("never.1");
        read_all(6);
        expect(0, "FDSTORE", "a.1", inode(one));
        expect(1, "FDSTOREREMOVE", "a.1", 0);
        expect(2, "FDSTORE", "a.1", inode(two));
        expect(3, "FDSTOREREMOVE", "b.1", 0);
        expect(4, "FDSTORE", "b.1", inode(three));
        expect(5, "FDSTOREREMOVE", "a.1", 0);
        ck_assert_uint_eq(keep_count(&keep), 1);
        ck_assert(!take());
        close(one);
        close(two);
        close(three);
}
END_TEST

/* The next daemon could not be started with more. */
START_TEST(no_more_than_can_be_handed_over) {
        int fd = file();
        char name[96];

        keep_start(&keep, loop);
        for (int i = 0; i < 310; i++) {
                snprintf(name, sizeof name, "c.%d", i);
                keep_it(name, fd);
        }
        ck_assert_uint_eq(keep_count(&keep), 300);
        read_all(300);
        drop_it("c.7");
        keep_it("c.305", fd);
        read_all(302);
        expect(301, "FDSTORE", "c.305", inode(fd));
        for (int i = 100; i < 200; i++) { /* the keeper does not read these */
                snprintf(name, sizeof name, "c.%d", i);
                drop_it(name);
                snprintf(name, sizeof name, "d.%d", i);
                keep_it(name, fd);
        }
        ck_assert_uint_eq(keep_count(&keep), 300);
        tear_down();
        n_seen = 0;
        set_up_with("9999");
        for (int i = 0; i < 2000; i++) {
                snprintf(name, sizeof name, "%090d.%03d", 0, i);
                keep_it(name, fd);
        }
        ck_assert_uint_gt(keep_count(&keep), 1000);
        ck_assert_uint_lt(keep_count(&keep), 1100);
        close(fd);
}
END_TEST

START_TEST(a_keeper_that_is_gone) {
        int fd = file();
        uint32_t open = fds_of(0) - 1;

        keep_start(&keep, loop);
        for (int i = 0; i < 50; i++) {
                char name[32];

                snprintf(name, sizeof name, "d.%d", i);
                keep_it(name, fd);
        }
        close(end);
        while (keep_count(&keep) > 0) {
                keep_it("more.1", fd);
                if (keep.queue.loop)
                        keep.queue.ready(&keep.queue, POLLOUT);
        }
        ck_assert_uint_eq(fds_of(0), open);
        keep_it("more.2", fd);
        drop_it("d.1");
        ck_assert_uint_eq(keep_count(&keep), 0);
        end = -1;
        close(fd);
}
END_TEST

START_TEST(there_is_no_keeper) {
        tear_down();
        set_up_with(_i == 0 ? NULL : _i == 1 ? "0" : "x");
        ck_assert_ptr_null(keep_ops(&keep));
        ck_assert_uint_eq(keep_count(&keep), 0);
}
END_TEST

SUITE("keep", FIXTURE(set_up, tear_down),
      TESTS(each_in_its_order, unsent_descriptors_are_not_removed, a_name_is_never_there_twice,
            no_more_than_can_be_handed_over, a_keeper_that_is_gone),
      LOOPS(3, there_is_no_keeper))
