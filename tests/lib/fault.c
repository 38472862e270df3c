/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/sanitized.h"

static struct fault_state *state; /* in the process under test */
static const struct fault_state *swept;

static const char *const names[] = {
#define FAULT_NAME(type, name, parameters, arguments) #name,
        KVD_SYS_CALLS(FAULT_NAME)
#undef FAULT_NAME
};

/* The errors of each call. 0 ends the list. */
static const int errors[N_FAULT_CALLS][5] = {
        [FAULT_calloc] = {ENOMEM},
        [FAULT_mmap] = {ENOMEM},
        [FAULT_pread] = {EIO, EINTR, FAULT_SHORT},
        [FAULT_pwrite] = {EIO, ENOSPC, EINTR, FAULT_SHORT},
        [FAULT_fdatasync] = {EIO, ENOSPC},
        [FAULT_uring] = {ENOMEM, EAGAIN},
        [FAULT_completion] = {EIO, ENOSPC, EAGAIN, FAULT_SHORT},
        [FAULT_madvise] = {ENOMEM},
        [FAULT_prefer_node] = {EPERM},
        [FAULT_memfd_create] = {EMFILE, ENOMEM},
        [FAULT_ftruncate] = {ENOMEM},
        [FAULT_fallocate] = {ENOSPC, ENOMEM, EINTR},
        [FAULT_fchmod] = {EIO},
        [FAULT_add_seals] = {EBUSY},
        [FAULT_open] = {ENFILE},
        [FAULT_flock] = {ENOLCK, ENOSYS},
        [FAULT_getrandom] = {EAGAIN, EINTR},
        [FAULT_sysconf] = {0},
        [FAULT_clock_ns] = {EINVAL},
        [FAULT_cpu_ns] = {EINVAL},
        [FAULT_socket] = {EMFILE, ENOBUFS},
        [FAULT_socketpair] = {EMFILE, ENOMEM},
        [FAULT_connect] = {ECONNREFUSED, EACCES, EINTR},
        [FAULT_bind] = {EADDRINUSE, ENOMEM},
        [FAULT_listen] = {EADDRINUSE},
        [FAULT_accept] = {EMFILE, ENOMEM},
        [FAULT_getsockopt] = {ENOPROTOOPT, ENOMEM},
        [FAULT_pidfd_open] = {EMFILE, ESRCH},
        [FAULT_pipe] = {EMFILE},
        [FAULT_spawn] = {EAGAIN, ENOENT},
        [FAULT_sendmsg] = {ENOBUFS, EAGAIN, EINTR},
        [FAULT_recvmsg] = {ENOMEM, EAGAIN, EINTR},
        [FAULT_poll] = {ENOMEM, EINTR},
        [FAULT_lchown] = {EPERM},
        [FAULT_eventfd] = {EMFILE},
        [FAULT_signalfd] = {EMFILE},
        [FAULT_epoll_create] = {EMFILE},
        [FAULT_epoll_ctl] = {ENOSPC},
        [FAULT_epoll_wait] = {EINTR},
};

/*
 * May this error be permanent? The first one of each call and ENOSPC may. EAGAIN and EINTR pass by
 * themselves, and no known system's clock fails for good.
 */
static bool may_last(enum fault_call call, uint32_t i) {
        return (i == 0 || errors[call][i] == ENOSPC) && errors[call][i] != EAGAIN &&
               errors[call][i] != EINTR && call != FAULT_clock_ns;
}

/* ---- the table ------------------------------------------------------------------------------- */

/*
 * While accept fails, no client is served and all wait. A permanent failure of accept therefore
 * ends after 250 ms, which is longer than the daemon pauses before it tries again.
 */
static uint64_t now_ms(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static bool is_over(void) {
        return state->fault.call == FAULT_accept && now_ms() - state->began_ms > 250;
}

static bool hit(enum fault_call call) {
        uint32_t n;

        if (!state->on)
                return false;
        state->calls[call]++;
        if (call != state->fault.call)
                return false;
        n = ++state->seen;
        if (n != state->fault.nth && !(state->fault.forever && n > state->fault.nth && !is_over()))
                return false;
        if (state->injected++ == 0)
                state->began_ms = now_ms();
        while (state->fault.error == FAULT_HANG)
                pause();
        errno = state->fault.error;
        return true;
}

static intptr_t failure(enum fault_call call) {
        return call == FAULT_calloc ? 0 : -1;
}

#define FAULT_FUNCTION(type, name, parameters, arguments) \
        static type fault_##name parameters { \
                return hit(FAULT_##name) ? (type)failure(FAULT_##name) : \
                                           kvd_sys_real.name arguments; \
        }
KVD_SYS_CALLS(FAULT_FUNCTION)
#undef FAULT_FUNCTION

/*
 * The daemon calls pidfd_open only on kernels before 6.5, and pipe (for lifelines) only if the peer
 * has no process id either. To reach these calls, the newer ways fail.
 */
static int fault_getsockopt_old(int fd, int level, int name, void *to, unsigned *n) {
        bool unnumbered = state->on && state->fault.call == FAULT_pipe;
        int r;

        if ((unnumbered || (state->on && state->fault.call == FAULT_pidfd_open)) && name == 77) {
                errno = ENOPROTOOPT;
                return -1;
        }
        r = fault_getsockopt(fd, level, name, to, n);
        if (r == 0 && unnumbered && level == SOL_SOCKET && name == SO_PEERCRED)
                ((struct ucred *)to)->pid = 0;
        return r;
}

#define SECTOR 4096u

/* Half of a transfer, in whole sectors; all of it if it has less than two. */
static size_t short_of(size_t n) {
        return n < 2 * SECTOR ? n : n / 2 / SECTOR * SECTOR;
}

static ssize_t fault_pread_short(int fd, void *to, size_t n, off_t at) {
        if (!hit(FAULT_pread))
                return kvd_sys_real.pread(fd, to, n, at);
        return state->fault.error == FAULT_SHORT ? pread(fd, to, short_of(n), at) : -1;
}

static ssize_t fault_pwrite_short(int fd, const void *from, size_t n, off_t at) {
        if (!hit(FAULT_pwrite))
                return kvd_sys_real.pwrite(fd, from, n, at);
        return state->fault.error == FAULT_SHORT ? pwrite(fd, from, short_of(n), at) : -1;
}

static int fault_completion_short(int result) {
        if (!hit(FAULT_completion))
                return kvd_sys_real.completion(result);
        if (state->fault.error != FAULT_SHORT)
                return -1;
        return result > 0 ? (int)short_of((size_t)result) : kvd_sys_real.completion(result);
}

static struct kvd_sys table = {
#define FAULT_MEMBER(type, name, parameters, arguments) .name = fault_##name,
        KVD_SYS_CALLS(FAULT_MEMBER)
#undef FAULT_MEMBER
};

void fault_install(struct fault_state *s) {
        state = s;
        table.getsockopt = fault_getsockopt_old;
        table.pread = fault_pread_short;
        table.pwrite = fault_pwrite_short;
        table.completion = fault_completion_short;
        sys = &table;
}

void fault_set(struct fault_state *s, const struct fault *fault) {
        s->on = false;
        s->fault = *fault;
        s->seen = s->injected = 0;
}

/* ---- the loop -------------------------------------------------------------------------------- */

struct fault_state *fault_state_new(void) {
        void *at = mmap(NULL, sizeof(struct fault_state), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        return at == MAP_FAILED ? NULL : at;
}

struct fault_state *fault_state_of(int fd) {
        void *at = mmap(NULL, sizeof(struct fault_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                        0);

        return at == MAP_FAILED ? NULL : at;
}

/* The first place, then every stride-th from a place that depends on turn. Returns the runs. */
static uint32_t sweep_one(struct fault_state *s, struct fault fault, uint32_t stride, uint32_t turn,
                          void (*run)(struct fault_state *, void *), void *arg) {
        uint32_t runs = 0;

        do {
                fault.nth = runs ? 2 + turn % stride + (runs - 1) * stride : 1;
                fault_set(s, &fault);
                run(s, arg);
                runs++;
        } while (s->injected);
        return runs;
}

static void describe(void) {
        const struct fault *f = &swept->fault;

        fprintf(stderr, "\nfailing call %u of %s, errno %d%s: ", f->nth, names[f->call], f->error,
                f->forever ? ", for good" : "");
}

void fault_sweep(struct fault_state *s, const char *who, uint32_t stride,
                 void (*run)(struct fault_state *, void *), void *arg) {
        uint32_t total = 0, runs = 0, turn = 0;

        stride = getenv("KVD_TEST_LONG") ? 1 : stride * (SANITIZED ? 2 : 1);
        swept = s;
        before_death = describe;
        printf("%s:", who);
        fflush(stdout);
        for (uint32_t call = 0; call < N_FAULT_CALLS; call++) {
                uint32_t most = 0;

                for (uint32_t i = 0;
                     i < ARRAY_SIZE(errors[call]) && errors[call][i] && (!i || most); i++)
                        for (int forever = 0; forever <= may_last(call, i); forever++) {
                                struct fault fault = {call, errors[call][i], 0, forever};

                                runs += sweep_one(s, fault, stride, turn++, run, arg);
                                most = MAX(most, s->seen);
                        }
                total += most;
                if (most)
                        printf(" %s %u", names[call], most);
                fflush(stdout);
        }
        printf("\n%s: %u call sites x {once, always} x errors, %u runs: all survived\n", who, total,
               runs);
        fflush(stdout);
}

/* ---- processes ------------------------------------------------------------------------------- */

int fault_fork(struct fault_state *s, void (*run)(struct fault_state *, void *), void *arg,
               unsigned seconds) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                alarm(seconds);
                run(s, arg);
                exit(0);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid)
                exit(1);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
                return 0;
        die("a process ended with status %#x", status);
}
