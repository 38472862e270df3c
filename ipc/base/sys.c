/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of real system calls. Everything that can fail goes through the table, so that a test
 * can make the n-th call fail.
 */

#include "ipc/base/sys.h"

#include <linux/mempolicy.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int real_uring(int result) {
        if (result >= 0)
                return result;
        errno = -result;
        return -1;
}

/* Files created with O_CREAT are private to their owner. */
static int real_open(const char *path, int flags) {
        return open(path, flags, 0600);
}

static int real_add_seals(int fd, int seals) {
        return fcntl(fd, F_ADD_SEALS, seals);
}

static int read_clock(clockid_t clock, uint64_t *ret) {
        struct timespec t;

        if (clock_gettime(clock, &t) < 0)
                return -1;
        *ret = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
        return 0;
}

static int real_clock_ns(uint64_t *ret) {
        return read_clock(CLOCK_MONOTONIC, ret);
}

static int real_cpu_ns(uint64_t *ret) {
        return read_clock(CLOCK_THREAD_CPUTIME_ID, ret);
}

static int real_connect(int fd, const struct sockaddr *to, unsigned n) {
        return connect(fd, to, n);
}

static int real_bind(int fd, const struct sockaddr *to, unsigned n) {
        return bind(fd, to, n);
}

static int real_accept(int fd, int flags) {
        return accept4(fd, NULL, NULL, flags);
}

static int real_prefer_node(void *at, size_t n, unsigned node) {
        unsigned long mask = 1ul << node;

        return (int)syscall(SYS_mbind, at, n, MPOL_PREFERRED, &mask, 8 * sizeof mask + 1, 0);
}

static int real_pidfd_open(pid_t pid) {
        return (int)syscall(SYS_pidfd_open, pid, 0);
}

static int spawn_attributes(posix_spawnattr_t *a) {
        sigset_t none, all;
        int r;

        sigemptyset(&none);
        sigfillset(&all);
        r = posix_spawnattr_setsigmask(a, &none);
        if (r == 0)
                r = posix_spawnattr_setsigdefault(a, &all);
        return r ?: posix_spawnattr_setflags(a, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
}

static int spawn_actions(posix_spawn_file_actions_t *f, int fd) {
        int r = posix_spawn_file_actions_adddup2(f, fd, SYS_SPAWN_FD);

        return r ?: posix_spawn_file_actions_addclosefrom_np(f, SYS_SPAWN_FD + 1);
}

static pid_t real_spawn(const char *path, char *const *arguments, int fd) {
        posix_spawn_file_actions_t actions;
        posix_spawnattr_t attributes;
        pid_t pid;
        int r;

        posix_spawn_file_actions_init(&actions);
        posix_spawnattr_init(&attributes);
        r = spawn_actions(&actions, fd);
        if (r == 0)
                r = spawn_attributes(&attributes);
        if (r == 0)
                r = posix_spawn(&pid, path, &actions, &attributes, arguments, environ);
        posix_spawnattr_destroy(&attributes);
        posix_spawn_file_actions_destroy(&actions);
        errno = r;
        return r ? -1 : pid;
}

static int real_poll(struct pollfd *fds, unsigned long n, int timeout_ms) {
        return poll(fds, n, timeout_ms);
}

static int real_eventfd(unsigned value, int flags) {
        return eventfd(value, flags);
}

static int real_signalfd(const void *sigset, int flags) {
        return signalfd(-1, sigset, flags);
}

static int real_epoll_create(void) {
        return epoll_create1(EPOLL_CLOEXEC);
}

const struct kvd_sys kvd_sys_real = {
        .calloc = calloc,
        .mmap = mmap,
        .pread = pread,
        .pwrite = pwrite,
        .fdatasync = fdatasync,
        .uring = real_uring,
        .completion = real_uring,
        .madvise = madvise,
        .prefer_node = real_prefer_node,
        .memfd_create = memfd_create,
        .ftruncate = ftruncate,
        .fallocate = fallocate,
        .fchmod = fchmod,
        .add_seals = real_add_seals,
        .open = real_open,
        .flock = flock,
        .getrandom = getrandom,
        .sysconf = sysconf,
        .clock_ns = real_clock_ns,
        .cpu_ns = real_cpu_ns,
        .socket = socket,
        .socketpair = socketpair,
        .connect = real_connect,
        .bind = real_bind,
        .listen = listen,
        .accept = real_accept,
        .getsockopt = getsockopt,
        .setsockopt = setsockopt,
        .pidfd_open = real_pidfd_open,
        .pipe = pipe2,
        .spawn = real_spawn,
        .sendmsg = sendmsg,
        .recvmsg = recvmsg,
        .poll = real_poll,
        .lchown = lchown,
        .eventfd = real_eventfd,
        .signalfd = real_signalfd,
        .epoll_create = real_epoll_create,
        .epoll_ctl = epoll_ctl,
        .epoll_wait = epoll_wait,
};

const struct kvd_sys *sys = &kvd_sys_real;

uint64_t sys_now_ns(void) {
        uint64_t now = 0;

        sys->clock_ns(&now);
        return now;
}

uint64_t sys_cpu_ns(void) {
        uint64_t ns = 0;

        sys->cpu_ns(&ns);
        return ns;
}

size_t sys_page_bytes(void) {
        return (size_t)sys->sysconf(_SC_PAGESIZE);
}

bool sys_is_readable(int fd) {
        struct pollfd wanted = {.fd = fd, .events = POLLIN};

        return sys->poll(&wanted, 1, 0) > 0;
}
