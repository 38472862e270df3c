/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of all scripts, and how a script is run */
#include "tests/gpu/check.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/driver.h"

#define GPU_PATIENCE_MS 20000

static struct driver driver;

void check_driver(const struct driver *d) {
        driver = *d;
        if (!driver.stand_in)
                actor_patience(GPU_PATIENCE_MS);
}

bool check_on_stand_in(void) {
        return driver.stand_in;
}

unsigned check_ms(unsigned on_a_gpu, unsigned on_a_stand_in) {
        return driver.stand_in ? on_a_stand_in : on_a_gpu;
}

uint64_t check_bytes(uint64_t wanted) {
        return driver.stand_in ? MIN(wanted, 4 * MIB) :
                                 MIN(wanted, ALIGN_UP(driver.free / 8, 4 * MIB));
}

unsigned check_rounds(unsigned wanted) {
        return driver.stand_in ? MIN(wanted, wanted > 1000 ? 64u : 3u) : wanted;
}

bool cannot_ask(struct line *l, int r, const char *step, const struct actor *a) {
        if (!r)
                return false;
        line_answer(l, OPEN_QUESTION, "not asked: %s: %s%s%s", step, actor_word(r),
                    a && a->note.text[0] ? ", " : "", a ? a->note.text : "");
        return true;
}

int host_page(uint64_t bytes, unsigned flags) {
        int fd = memfd_create("kvd-gpu-check", MFD_CLOEXEC | flags);

        if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 &&
            (!(flags & MFD_HUGETLB) || fallocate(fd, 0, 0, (off_t)bytes) == 0))
                return fd;
        closep(&fd);
        return -1;
}

static int ascending(const void *a, const void *b) {
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

/* Sorts x. */
double median(double *x, unsigned n) {
        qsort(x, n, sizeof *x, ascending);
        return n ? x[n / 2] : 0;
}

double ms_of(uint64_t ns) {
        return (double)ns / 1e6;
}

double us_of(uint64_t ns) {
        return (double)ns / 1e3;
}

/* ---- one after the other --------------------------------------------------------------------- */

static void say_ended(const struct check *check, const char *how) {
        struct line l;

        line_begin(&l, check->name, "%s", check->about);
        line_answer(&l, NO, "the check did not end by itself: %s", how);
}

/*
 * False: the process does not end, although its alarm should have killed it. It is stuck in the
 * driver and left alone.
 */
static bool wait_for(pid_t pid, unsigned seconds, int *status) {
        struct pollfd p = {(int)syscall(SYS_pidfd_open, pid, 0), POLLIN, 0};
        unsigned ending_ms = check_ms(5000, CHECK_PATIENCE_MS); /* time to end after its alarm */
        bool ended = p.fd < 0 || poll(&p, 1, (int)(seconds * 1000 + ending_ms)) == 1;

        closep(&p.fd);
        return ended && waitpid(pid, status, 0) == pid;
}

/* Runs the check in a process of its own; its actors die with it. True: it ended well. */
bool check_run(const struct check *check, unsigned seconds) {
        int status, limit = SIGALRM;
        char how[80];
        pid_t pid;

        seconds = seconds ? seconds : check->seconds * (driver.stand_in ? 5 : 1);

        fflush(stdout);
        pid = fork();
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                alarm(seconds);
                check->run();
                exit(0);
        }
        if (pid < 0 || !wait_for(pid, seconds, &status)) {
                say_ended(check, "it is stuck in the driver");
                return false;
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
                return true;
        if (WIFSIGNALED(status) && WTERMSIG(status) == limit)
                snprintf(how, sizeof how, "it ran for %u s", seconds);
        else
                snprintf(how, sizeof how, "status %d, signal %d", WEXITSTATUS(status),
                         WTERMSIG(status));
        say_ended(check, how);
        return false;
}

bool check_is_wanted(const char *only, const char *name) {
        size_t n = strlen(name);

        if (!only)
                return true;
        for (const char *at = only; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
                if (strncmp(at, name, n) == 0 && (at[n] == 0 || at[n] == ','))
                        return true;
        return false;
}
