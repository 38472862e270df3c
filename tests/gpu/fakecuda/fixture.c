/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/fakecuda/fixture.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

const struct kvd_cuda *cuda;

const struct cu_allocation shareable = {.type = CU_ALLOCATION_PINNED,
                                        .handle_types = CU_HANDLE_POSIX_FD,
                                        .location = {CU_LOCATION_DEVICE, 0}};

/* Uses a group of its own, so that concurrent tests do not count each other's memory. */
static void own_group(void) {
        char group[16];

        snprintf(group, sizeof group, "%d", getpid());
        setenv("FAKECUDA_GROUP", group, 0);
}

void load(void) {
        const char *why = "";

        own_group();
        cuda = kvd_cuda_load(&why);
        ck_assert_msg(cuda != NULL, "%s", why);
}

void start(void) {
        cu_context context;

        load();
        OK(cuInit(0));
        OK(cuDevicePrimaryCtxRetain(&context, 0));
        OK(cuCtxPushCurrent(context));
}

cu_memory create(size_t bytes) {
        cu_memory memory;

        OK(cuMemCreate(&memory, bytes, &shareable, 0));
        return memory;
}

int export(cu_memory memory) {
        int fd;

        OK(cuMemExportToShareableHandle(&fd, memory, CU_HANDLE_POSIX_FD, 0));
        return fd;
}

cu_memory import(int fd) {
        cu_memory memory;

        OK(cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd, CU_HANDLE_POSIX_FD));
        return memory;
}

cu_address map(cu_memory memory, size_t bytes, int access) {
        const struct cu_access how = {.location = {CU_LOCATION_DEVICE, 0}, .flags = access};
        cu_address at;

        OK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
        OK(cuMemMap(at, bytes, 0, memory, 0));
        OK(cuMemSetAccess(at, bytes, &how, 1));
        return at;
}

cu_address map_fd(int fd, size_t bytes, int access) {
        cu_memory memory = import(fd);
        cu_address at;

        close(fd);
        at = map(memory, bytes, access);
        OK(cuMemRelease(memory));
        return at;
}

cu_stream new_stream(void) {
        cu_stream stream;

        OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
        return stream;
}

struct peer peer_start(void (*work)(int fd)) {
        struct peer peer;
        int ends[2];

        own_group();
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        peer = (struct peer){.pid = fork(), .fd = ends[0]};
        ck_assert_int_ge(peer.pid, 0);
        if (peer.pid > 0) {
                close(ends[1]);
                return peer;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[0]);
        work(ends[1]);
        _exit(EXIT_SUCCESS);
}

static int reap(struct peer *peer) {
        int status;

        ck_assert_int_eq(waitpid(peer->pid, &status, 0), peer->pid);
        close(peer->fd);
        return status;
}

void peer_end(struct peer *peer) {
        ck_assert_int_eq(reap(peer), 0);
}

void peer_kill(struct peer *peer) {
        int status;

        kill(peer->pid, SIGKILL);
        status = reap(peer);
        ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

union control {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
};

void tell(int fd, const void *data, size_t bytes, int descriptor) {
        union control control = {.head = {.cmsg_level = SOL_SOCKET,
                                          .cmsg_type = SCM_RIGHTS,
                                          .cmsg_len = CMSG_LEN(sizeof descriptor)}};
        struct iovec piece = {(void *)data, bytes};
        struct msghdr msg = {.msg_iov = &piece, .msg_iovlen = 1};

        if (descriptor >= 0) {
                memcpy(CMSG_DATA(&control.head), &descriptor, sizeof descriptor);
                msg.msg_control = &control;
                msg.msg_controllen = sizeof control.room;
        }
        ck_assert_int_eq(sendmsg(fd, &msg, MSG_NOSIGNAL), (ssize_t)bytes);
}

int hear(int fd, void *data, size_t bytes) {
        union control control;
        struct iovec piece = {data, bytes};
        struct msghdr msg = {.msg_iov = &piece,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control.room};
        int descriptor = -1;

        ck_assert_int_eq(recvmsg(fd, &msg, MSG_CMSG_CLOEXEC), (ssize_t)bytes);
        if (CMSG_FIRSTHDR(&msg))
                memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof descriptor);
        return descriptor;
}

void meet(int fd) {
        char one = 1;

        tell(fd, &one, 1, -1);
        hear(fd, &one, 1);
}
