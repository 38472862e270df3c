/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_WAITS_H
#define KVD_TESTS_LIB_WAITS_H

/*
 * Measures how long calls of libkvd intend to wait: the timeouts that they pass to the system, as
 * these do not depend on the speed of the machine. With waits_pass, a wait in vain ends early, and
 * the clock jumps forward by the rest of its timeout.
 */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"

#define WAITS_LOOK_MS 50u /* real wait with waits_pass: something may come after all */

static _Thread_local uint64_t waits_read_ns;  /* the clock at this thread's last reading */
static _Thread_local uint64_t waits_until_ns; /* the latest end of its timeouts */
static _Thread_local uint64_t waits_send_ms;  /* its timeout of a connect */
static _Atomic uint64_t waits_passed_ns;      /* how far the clock has jumped in total */
static _Atomic bool waits_pass;               /* waits in vain end early from now on */

static inline int waits_clock_ns(uint64_t *ret) {
        int r = kvd_sys_real.clock_ns(ret);

        *ret += waits_passed_ns;
        waits_read_ns = *ret;
        return r;
}

/* Notes a timeout. Returns how long to really wait. */
static inline uint64_t waits_for(uint64_t ms) {
        waits_until_ns = MAX(waits_until_ns, ms ? waits_read_ns + ms * 1000000 : 0);
        return waits_pass ? MIN(ms, WAITS_LOOK_MS) : ms;
}

static inline void waits_in_vain(uint64_t ms) {
        if (waits_pass && ms > WAITS_LOOK_MS)
                waits_passed_ns += (ms - WAITS_LOOK_MS) * 1000000;
}

static inline int waits_poll(struct pollfd *fds, unsigned long n, int timeout_ms) {
        uint64_t ms = (uint64_t)(timeout_ms < 0 ? 3600000 : timeout_ms);
        int r = kvd_sys_real.poll(fds, n, (int)waits_for(ms));

        if (r == 0)
                waits_in_vain(ms);
        return r;
}

static inline int waits_setsockopt(int fd, int level, int name, const void *to, unsigned n) {
        struct timeval t;

        if (level != SOL_SOCKET || name != SO_SNDTIMEO)
                return kvd_sys_real.setsockopt(fd, level, name, to, n);
        t = *(const struct timeval *)to;
        waits_send_ms = (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_usec / 1000;
        if (waits_for(waits_send_ms) != waits_send_ms)
                t = (struct timeval){0, WAITS_LOOK_MS * 1000};
        return kvd_sys_real.setsockopt(fd, level, name, &t, sizeof t);
}

static inline int waits_connect(int fd, const struct sockaddr *to, unsigned n) {
        int r = kvd_sys_real.connect(fd, to, n);

        if (r < 0 && errno == EAGAIN)
                waits_in_vain(waits_send_ms);
        return r;
}

/* Watches all calls of this process, and of its future children. */
static inline void waits_watch(void) {
        static struct kvd_sys table;

        table = kvd_sys_real;
        table.clock_ns = waits_clock_ns;
        table.poll = waits_poll;
        table.setsockopt = waits_setsockopt;
        table.connect = waits_connect;
        sys = &table;
}

/* Returns only once the daemon has stopped: until then, it could still answer. */
static inline void stop_daemon(const struct instance *in) {
        int status;

        kill(in->pid, SIGSTOP);
        if (waitpid(in->pid, &status, WUNTRACED) != in->pid || !WIFSTOPPED(status))
                die("the daemon does not stop");
}

static inline void stop_daemon_and_time(const struct instance *in) {
        stop_daemon(in);
        waits_watch();
        waits_pass = true;
}

static inline void continue_daemon(const struct instance *in) {
        waits_pass = false;
        kill(in->pid, SIGCONT);
}

/* To be called before the call to measure. Returns the time. */
static inline uint64_t waits_begin(void) {
        waits_until_ns = 0;
        return sys_now_ns();
}

/* How long the call intended to wait in total; 0: it did not wait. */
static inline uint64_t waits_ms(uint64_t began) {
        return waits_until_ns ? (waits_until_ns - began) / 1000000 : 0;
}

#endif
