/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/bench/harness.h"
#include "tests/bench/process.h"

#define PATIENCE_MS 60000
#define LARGEST_MESSAGE 65536

static void pause_ms(long ms) {
        nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* ---- starting -------------------------------------------------------------------------------- */

/* In the child: makes it die with its parent, even with one that died before this call. */
static void die_with(pid_t parent) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
                _exit(127);
}

int process_run(void (*function)(void *), void *ctx, struct process *ret) {
        pid_t parent = getpid(), pid = fork();

        if (pid < 0)
                return -errno;
        if (pid == 0) {
                die_with(parent);
                function(ctx);
                _exit(0);
        }
        *ret = (struct process){.pid = pid, .fd = -1};
        return 0;
}

struct program {
        char *const *argv;
        const char *log;
};

static void become(void *ctx) {
        const struct program *program = ctx;
        int out = open(program->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        int in = open("/dev/null", O_RDONLY | O_CLOEXEC);

        if (out >= 0 && in >= 0 && dup2(in, 0) >= 0 && dup2(out, 1) >= 0 && dup2(out, 2) >= 0)
                execvp(program->argv[0], program->argv);
        _exit(127);
}

int process_start(char *const argv[], const char *log, struct process *ret) {
        return process_run(become, &(struct program){argv, log}, ret);
}

static int wait_ready(int fd, pid_t pid) {
        struct pollfd waiting = {.fd = fd, .events = POLLIN};
        char byte;

        if (poll(&waiting, 1, PATIENCE_MS) <= 0)
                return -ETIMEDOUT;
        if (read(fd, &byte, 1) == 1)
                return 0;
        pause_ms(20);
        return waitpid(pid, NULL, WNOHANG) == 0 ? 0 : -EIO;
}

int process_start_ready(char *const argv[], const char *log, int ready_fd, struct process *ret) {
        int ends[2], r;

        if (pipe(ends) < 0)
                return -errno;
        fcntl(ends[0], F_SETFD, FD_CLOEXEC);
        if (ends[1] != ready_fd) {
                r = dup2(ends[1], ready_fd);
                close(ends[1]);
                if (r < 0) {
                        close(ends[0]);
                        return -errno;
                }
        }
        r = process_start(argv, log, ret);
        close(ready_fd);
        if (r >= 0) {
                r = wait_ready(ends[0], ret->pid);
                if (r < 0)
                        process_end(ret);
        }
        close(ends[0]);
        return r;
}

struct responder {
        int fd;
        size_t (*respond)(void *ctx, void *message, size_t n);
        void *ctx;
};

static void respond_forever(void *ctx) {
        static char message[LARGEST_MESSAGE];
        const struct responder *r = ctx;
        ssize_t n;

        do
                n = recv(r->fd, message, sizeof message, 0);
        while (n > 0 &&
               send(r->fd, message, r->respond(r->ctx, message, (size_t)n), MSG_NOSIGNAL) >= 0);
}

int process_fork(size_t (*respond)(void *, void *, size_t), void *ctx, struct process *ret) {
        int ends[2], r;

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                return -errno;
        r = process_run(respond_forever, &(struct responder){ends[1], respond, ctx}, ret);
        close(ends[1]);
        if (r < 0)
                close(ends[0]);
        else
                ret->fd = ends[0];
        return r;
}

/* ---- ending, waiting ------------------------------------------------------------------------- */

void process_end(struct process *process) {
        if (process->fd >= 0)
                close(process->fd);
        if (process->pid > 0) {
                kill(process->pid, SIGTERM);
                for (int i = 0; i < 100 && waitpid(process->pid, NULL, WNOHANG) == 0; i++)
                        pause_ms(20);
                kill(process->pid, SIGKILL);
                waitpid(process->pid, NULL, 0);
        }
        *process = NO_PROCESS;
}

uint64_t process_cpu_ns(const struct process *process) {
        unsigned long long ns = 0;
        char path[64];
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/schedstat", (int)process->pid);
        f = fopen(path, "re");
        if (!f)
                return 0;
        if (fscanf(f, "%llu", &ns) != 1)
                ns = 0;
        fclose(f);
        return ns;
}

/* True if the process sleeps or has ended. */
static bool is_asleep(const struct process *process) {
        char path[64], state = 'S';
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/stat", (int)process->pid);
        f = fopen(path, "re");
        if (!f)
                return true;
        if (fscanf(f, "%*d (%*[^)]) %c", &state) != 1)
                state = 'S';
        fclose(f);
        return state == 'S';
}

/* Waking up for a timer is not work. */
#define IDLE_NS UINT64_C(500000)
#define LOOKS 10

/*
 * Processor time alone is not enough: on a busy machine, a process that waits for a processor uses
 * no time either, but does not sleep.
 */
static bool is_at_rest(const struct process *process) {
        uint64_t before = process_cpu_ns(process);
        int asleep = 0;

        for (int i = 0; i < LOOKS; i++) {
                asleep += is_asleep(process);
                pause_ms(10);
        }
        return asleep == LOOKS && is_asleep(process) && process_cpu_ns(process) - before <= IDLE_NS;
}

void process_settle(const struct process *process) {
        uint64_t end = now_ns() + PATIENCE_MS * UINT64_C(1000000);

        while (!is_at_rest(process) && now_ns() < end)
                continue;
}

/* ---- processors ------------------------------------------------------------------------------ */

int process_stay(void) {
        int last = CPU_SETSIZE - 1;
        cpu_set_t set;

        if (sched_getaffinity(0, sizeof set, &set) < 0)
                return -errno;
        while (last > 0 && !CPU_ISSET(last, &set))
                last--;
        CPU_ZERO(&set);
        CPU_SET(last, &set);
        return sched_setaffinity(0, sizeof set, &set) < 0 ? -errno : 0;
}

void process_go_anywhere(void) {
        cpu_set_t set;

        CPU_ZERO(&set);
        for (int i = 0; i < CPU_SETSIZE; i++)
                CPU_SET(i, &set);
        sched_setaffinity(0, sizeof set, &set);
}
