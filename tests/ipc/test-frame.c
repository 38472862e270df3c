/* SPDX-License-Identifier: Apache-2.0 */

/* Packets and the descriptors that travel with them. No failure leaves a descriptor open. */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "ipc/address.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "tests/lib/emulated.h"
#include "tests/lib/suite.h"

static int ends[2];
static uint8_t *buffer;

static void setup(void) {
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        buffer = calloc(1, KVD_FRAME_MAX + 1);
}

static void teardown(void) {
        closep(&ends[0]);
        closep(&ends[1]);
        free(buffer);
}

static unsigned count_fds(void) {
        DIR *d = opendir("/proc/self/fd");
        unsigned n = 0;

        while (readdir(d))
                n++;
        closedir(d);
        return n;
}

START_TEST(a_packet_is_a_packet) {
        ck_assert_int_eq(kvd_frame_send(ends[0], "hello", 5, NULL, 0), 0);
        ck_assert_int_eq(kvd_frame_send(ends[0], "you", 3, NULL, 0), 0);
        ck_assert_int_eq(kvd_frame_receive(ends[1], buffer, NULL, 0), 5);
        ck_assert_int_eq(memcmp(buffer, "hello", 5), 0);
        ck_assert_int_eq(kvd_frame_receive(ends[1], buffer, NULL, 0), 3);
        ck_assert_int_eq(kvd_frame_receive(ends[1], buffer, NULL, MSG_DONTWAIT), -EAGAIN);
}
END_TEST

START_TEST(the_largest_frame_fits) {
        memset(buffer, 7, KVD_FRAME_MAX);
        ck_assert_int_eq(kvd_frame_send(ends[0], buffer, KVD_FRAME_MAX, NULL, 0), 0);
        memset(buffer, 0, KVD_FRAME_MAX);
        ck_assert_int_eq(kvd_frame_receive(ends[1], buffer, NULL, 0), KVD_FRAME_MAX);
        ck_assert_int_eq(buffer[KVD_FRAME_MAX - 1], 7);
}
END_TEST

START_TEST(a_larger_one_is_refused) {
        struct kvd_fds fds = {.fd = {0, 1}, .n = 2};
        unsigned before = count_fds();

        ck_assert_int_eq(kvd_frame_send(ends[0], buffer, KVD_FRAME_MAX + 1, &fds, 0), 0);
        ck_assert_int_eq(kvd_frame_receive(ends[1], buffer, &fds, 0), -EMSGSIZE);
        ck_assert_uint_eq(fds.n, 0);
        ck_assert_uint_eq(count_fds(), before);
}
END_TEST

START_TEST(descriptors_travel) {
        struct kvd_fds fds = {.n = 0}, got;
        unsigned before = count_fds();

        for (uint32_t i = 0; i < (uint32_t)_i; i++)
                fds.fd[fds.n++] = ends[0];
        ck_assert_int_eq(kvd_frame_send(ends[0], "x", 1, &fds, 0), 0);
        ck_assert_int_eq(kvd_frame_receive(ends[1], buffer, &got, 0), 1);
        ck_assert_uint_eq(got.n, (uint32_t)_i);
        ck_assert_uint_eq(count_fds(), before + (unsigned)_i);
        for (uint32_t i = 0; i < got.n; i++)
                ck_assert_int_eq(fcntl(got.fd[i], F_GETFD), FD_CLOEXEC);
        kvd_fds_close(&got);
        ck_assert_uint_eq(count_fds(), before);
}
END_TEST

static void send_many(int n) {
        union {
                struct cmsghdr align;
                uint8_t bytes[CMSG_SPACE(sizeof(int) * 100)];
        } control = {0};
        struct iovec piece = {buffer, 1};
        struct msghdr m = {.msg_iov = &piece,
                           .msg_iovlen = 1,
                           .msg_control = &control,
                           .msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n)};
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);

        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n);
        memset(CMSG_DATA(c), 0, sizeof(int) * (size_t)n); /* descriptor 0, n times */
        ck_assert_int_eq(sendmsg(ends[0], &m, 0), 1);
}

START_TEST(too_many_descriptors) {
        unsigned before = count_fds();
        struct kvd_fds fds;

        send_many(KVD_FRAME_FDS + 1);
        ck_assert_int_eq(kvd_frame_receive(ends[1], buffer, &fds, 0), -ENOMSG);
        ck_assert_uint_eq(fds.n, 0);
        ck_assert_uint_eq(count_fds(), before);
}
END_TEST

START_TEST(unwanted_descriptors) {
        unsigned before = count_fds();

        send_many(3);
        ck_assert_int_eq(kvd_frame_receive(ends[1], buffer, NULL, 0), 1);
        ck_assert_uint_eq(count_fds(), before);
}
END_TEST

START_TEST(the_peer_is_gone) {
        close(ends[1]);
        ends[1] = -1;
        ck_assert_int_eq(kvd_frame_send(ends[0], "x", 1, NULL, 0), -EPIPE);
        ck_assert_int_eq(kvd_frame_receive(ends[0], buffer, NULL, 0), 0);
}
END_TEST

START_TEST(addresses) {
        struct kvd_address a;
        char path[110];

        ck_assert_int_eq(kvd_address_make("/run/x", &a), 0);
        ck_assert_uint_eq(a.size, offsetof(struct sockaddr_un, sun_path) + 7);
        ck_assert_int_eq(kvd_address_make("@kvd", &a), 0);
        ck_assert_uint_eq(a.size, offsetof(struct sockaddr_un, sun_path) + 4);
        ck_assert_int_eq(a.un.sun_path[0], 0);
        ck_assert_int_eq(kvd_address_make("", &a), -EINVAL);
        ck_assert_int_eq(kvd_address_make("@", &a), -EINVAL);
        memset(path, 'a', sizeof path);
        path[107] = 0;
        ck_assert_int_eq(kvd_address_make(path, &a), 0);
        path[107] = 'a';
        path[108] = 0;
        ck_assert_int_eq(kvd_address_make(path, &a), -ENAMETOOLONG);
}
END_TEST

SUITE("frame", FIXTURE(setup, teardown),
      TESTS(a_packet_is_a_packet, the_largest_frame_fits, a_larger_one_is_refused),
      LOOPS(KVD_FRAME_FDS + 1, descriptors_travel),
      TESTS(unwanted_descriptors, the_peer_is_gone, addresses),
      WHEN(!emulated("recvmsg() does not report MSG_CTRUNC"), TESTS(too_many_descriptors)))
