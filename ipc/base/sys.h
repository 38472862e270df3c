/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SYS_H
#define KVD_BASE_SYS_H

/*
 * System calls in one table: memory, descriptors, sockets, clock, randomness. The daemon, the store
 * and the client call sys->name(...), so that a test can make the n-th call fail
 * (tests/lib/fault.h), count calls, or replay a clock. The functions behave like the system calls
 * they are named after: -1 and errno, or MAP_FAILED, or NULL.
 *
 * Not in the table are calls that free something (munmap, close, free), since no caller could act
 * on their failure. A client's lookups make no system calls.
 *
 * uring takes the result of a call of liburing, completion the result in a completion. Both turn a
 * negative errno into -1 and errno, and return other results unchanged.
 *
 * spawn starts a program with fd as its descriptor SYS_SPAWN_FD and our standard descriptors, and
 * no others. No signal is blocked or ignored. Returns the program's pid.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct msghdr;
struct epoll_event;
struct sockaddr;
struct pollfd;

#define KVD_SYS_CALLS(CALL) \
        CALL(void *, calloc, (size_t n, size_t size), (n, size)) \
        CALL(void *, mmap, (void *at, size_t n, int prot, int flags, int fd, off_t off), \
             (at, n, prot, flags, fd, off)) \
        CALL(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at)) \
        CALL(ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at)) \
        CALL(int, fdatasync, (int fd), (fd)) \
        CALL(int, uring, (int result), (result)) \
        CALL(int, completion, (int result), (result)) \
        CALL(int, madvise, (void *at, size_t n, int advice), (at, n, advice)) \
        CALL(int, prefer_node, (void *at, size_t n, unsigned node), (at, n, node)) \
        CALL(int, memfd_create, (const char *name, unsigned flags), (name, flags)) \
        CALL(int, ftruncate, (int fd, off_t size), (fd, size)) \
        CALL(int, fallocate, (int fd, int mode, off_t off, off_t n), (fd, mode, off, n)) \
        CALL(int, fchmod, (int fd, mode_t mode), (fd, mode)) \
        CALL(int, add_seals, (int fd, int seals), (fd, seals)) \
        CALL(int, open, (const char *path, int flags), (path, flags)) \
        CALL(int, flock, (int fd, int operation), (fd, operation)) \
        CALL(ssize_t, getrandom, (void *to, size_t n, unsigned flags), (to, n, flags)) \
        CALL(long, sysconf, (int name), (name)) \
        CALL(int, clock_ns, (uint64_t * ret), (ret)) \
        CALL(int, cpu_ns, (uint64_t * ret), (ret)) \
        CALL(int, socket, (int domain, int type, int protocol), (domain, type, protocol)) \
        CALL(int, socketpair, (int domain, int type, int protocol, int *ends), \
             (domain, type, protocol, ends)) \
        CALL(int, connect, (int fd, const struct sockaddr *to, unsigned n), (fd, to, n)) \
        CALL(int, bind, (int fd, const struct sockaddr *to, unsigned n), (fd, to, n)) \
        CALL(int, listen, (int fd, int backlog), (fd, backlog)) \
        CALL(int, accept, (int fd, int flags), (fd, flags)) \
        CALL(int, getsockopt, (int fd, int level, int name, void *to, unsigned *n), \
             (fd, level, name, to, n)) \
        CALL(int, setsockopt, (int fd, int level, int name, const void *from, unsigned n), \
             (fd, level, name, from, n)) \
        CALL(int, pidfd_open, (pid_t pid), (pid)) \
        CALL(int, pipe, (int *ends, int flags), (ends, flags)) \
        CALL(pid_t, spawn, (const char *path, char *const *arguments, int fd), \
             (path, arguments, fd)) \
        CALL(ssize_t, sendmsg, (int fd, const struct msghdr *msg, int flags), (fd, msg, flags)) \
        CALL(ssize_t, recvmsg, (int fd, struct msghdr *msg, int flags), (fd, msg, flags)) \
        CALL(int, poll, (struct pollfd * fds, unsigned long n, int timeout_ms), \
             (fds, n, timeout_ms)) \
        CALL(int, lchown, (const char *path, uid_t uid, gid_t gid), (path, uid, gid)) \
        CALL(int, eventfd, (unsigned value, int flags), (value, flags)) \
        CALL(int, signalfd, (const void *sigset, int flags), (sigset, flags)) \
        CALL(int, epoll_create, (void), ()) \
        CALL(int, epoll_ctl, (int epfd, int op, int fd, struct epoll_event *event), \
             (epfd, op, fd, event)) \
        CALL(int, epoll_wait, (int epfd, struct epoll_event *events, int n, int timeout_ms), \
             (epfd, events, n, timeout_ms))

#define SYS_SPAWN_FD 3

struct kvd_sys {
#define KVD_SYS_MEMBER(type, name, parameters, arguments) type(*name) parameters;
        KVD_SYS_CALLS(KVD_SYS_MEMBER)
#undef KVD_SYS_MEMBER
};

extern const struct kvd_sys kvd_sys_real;
extern const struct kvd_sys *sys; /* &kvd_sys_real, unless a test has replaced it */

bool sys_is_readable(int fd);
size_t sys_page_bytes(void); /* 4 KiB to 64 KiB */
uint64_t sys_now_ns(void);   /* CLOCK_MONOTONIC */
uint64_t sys_cpu_ns(void);   /* CPU time of this thread; a system call */

static inline double sys_now_ms(void) {
        return (double)sys_now_ns() / 1e6;
}

#endif
