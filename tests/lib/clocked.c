/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/clocked.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define BEGINS_NS UINT64_C(1000000000000)

struct clocked_page {
        _Atomic uint64_t now_ns;   /* the daemon's clock */
        _Atomic uint64_t given_ns; /* the clock may advance to this */
        _Atomic uint64_t rested_ns;
        _Atomic pid_t clients[CLOCKED_CLIENTS];
};

/* ---- in the daemon, and its clients ------------------------------------------------------------ */

static struct clocked self;

static void of_process(pid_t pid, const char *file, char ret[128]) {
        char path[64];
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
        f = fopen(path, "re");
        ret[0] = 0;
        if (f && !fgets(ret, 128, f))
                ret[0] = 0;
        if (f)
                fclose(f);
}

/*
 * The process state alone is not enough: a process that loses the processor on its way to sleep is
 * reported as sleeping. Nor is its system call enough: the process may wait there for memory, and
 * continue without a message.
 */
static bool runs(pid_t pid) {
        char text[128], *state;

        of_process(pid, "syscall", text);
        if (strncmp(text, "running", 7) == 0)
                return true;
        of_process(pid, "stat", text);
        state = strrchr(text, ')');
        return state && strchr("RD", state[2]);
}

static bool any_client_runs(void) {
        for (uint32_t i = 0; i < CLOCKED_CLIENTS; i++) {
                pid_t pid = self.page->clients[i];

                if (pid && runs(pid))
                        return true;
        }
        return false;
}

static int clocked_ns(uint64_t *ret) {
        *ret = self.page->now_ns;
        return 0;
}

/* Waits until there is a message, or more time. */
static void rest_at(int epfd, uint64_t given_ns) {
        struct pollfd ends[2] = {{epfd, POLLIN, 0}, {self.given, POLLIN, 0}};
        uint64_t n = 1;

        self.page->now_ns = given_ns;
        if (self.page->rested_ns != given_ns) {
                self.page->rested_ns = given_ns;
                if (write(self.rested, &n, sizeof n) != sizeof n)
                        die("nobody waits for the daemon");
        }
        poll(ends, 2, -1);
        if (ends[1].revents && read(self.given, &n, sizeof n) < 0 && errno != EAGAIN)
                die("read: %s", strerror(errno));
}

/* Polls after it has seen that all clients sleep, so it does not miss what they sent before. */
static int clocked_epoll_wait(int epfd, struct epoll_event *events, int n, int timeout_ms) {
        uint64_t until = timeout_ms < 0 ? UINT64_MAX :
                                          self.page->now_ns + (uint64_t)timeout_ms * 1000000;

        for (;;) {
                uint64_t given_ns = self.page->given_ns;
                bool busy = any_client_runs();
                int r = kvd_sys_real.epoll_wait(epfd, events, n, busy ? 1 : 0);

                if (r != 0)
                        return r;
                if (busy)
                        continue;
                if (until <= given_ns || timeout_ms == 0) {
                        self.page->now_ns = MAX(self.page->now_ns, timeout_ms ? until : 0);
                        return 0;
                }
                rest_at(epfd, given_ns);
        }
}

/* ---- from outside ---------------------------------------------------------------------------- */

void clocked_start(struct clocked *c, const char *const *settings) {
        static const struct fault none = {.call = N_FAULT_CALLS};
        static struct fault_state well;
        static struct kvd_sys table;

        fault_set(&well, &none);
        *c = (struct clocked){.process.settings = settings,
                              .given = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                              .rested = eventfd(0, EFD_CLOEXEC),
                              .now_ns = BEGINS_NS};
        c->page = mmap(NULL, sizeof *c->page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                       -1, 0);
        if (c->page == MAP_FAILED || c->given < 0 || c->rested < 0)
                die("setup: %s", strerror(errno));
        c->page->now_ns = c->page->given_ns = BEGINS_NS;
        self = *c;
        table = kvd_sys_real;
        table.clock_ns = table.cpu_ns = clocked_ns;
        table.epoll_wait = clocked_epoll_wait;
        sys = &table;
        if (!daemon_process_start(&c->process, &well))
                die("the daemon did not start");
        sys = &kvd_sys_real;
        chmod(c->process.in.dir, 0755);
        clocked_rest(c);
}

void clocked_end_clean(struct clocked *c) {
        instance_expect_clean(&c->process.in);
        daemon_process_stop(&c->process);
        munmap(c->page, sizeof *c->page);
        close(c->given);
        close(c->rested);
}

void clocked_be_client(const struct clocked *c) {
        static struct kvd_sys table;

        self = *c;
        table = kvd_sys_real;
        table.clock_ns = clocked_ns;
        sys = &table;
}

void clocked_client(struct clocked *c, uint32_t number, pid_t pid) {
        c->page->clients[number] = pid;
}

void clocked_give(struct clocked *c, uint64_t ns) {
        uint64_t n = 1;

        c->now_ns += ns;
        c->page->given_ns = c->now_ns;
        if (write(c->given, &n, sizeof n) != sizeof n)
                die("the daemon takes no time: %s", strerror(errno));
}

void clocked_rest(struct clocked *c) {
        uint64_t n;

        clocked_give(c, 1);
        while (c->page->rested_ns != c->now_ns)
                if (read(c->rested, &n, sizeof n) < 0 && errno != EINTR)
                        die("read: %s", strerror(errno));
}
