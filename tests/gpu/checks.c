/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a driver and its device really do: the ten questions whose answers decide details of kvd, and nothing of kvd is
 * needed to ask them. One line of JSON each (line.h).
 *
 *      checks [--only T1[,T4...]] [--seconds N] [--list]
 *
 * --seconds: the time that each may take, instead of its own limit. KVD_GPU is the device's ordinal (0). T9 needs Python: check_dlpack.py. Exit status 0: all were asked; 1: a check ended
 * by itself, or ran out of time; 77: no driver or no device.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/check.h"
#include "tests/gpu/driver.h"

static const struct check checks[] = {
        {"T1", "is a read-only mapping read-only?", check_read_only, 40},
        {"T2", "does memory outlive its maker?", check_lifetime, 40},
        {"T3", "may another user import it?", check_users, 20},
        {"T4", "slots that order streams of two processes", check_order, 60},
        {"T5", "an owner without a context", check_owner, 20},
        {"T6", "when does the GPU work of a killed process stop?", check_killed, 75},
        {"T7", "what do the calls take?", check_latency, 60},
        {"T8", "images and entry points", check_images, 30},
        {"T10", "registering host memory", check_registering, 40},
};

static struct driver driver;
static unsigned seconds;

uint64_t check_bytes(uint64_t wanted) {
        return driver.stand_in ? MIN(wanted, 4 * MIB) : MIN(wanted, ALIGN_UP(driver.free / 8, 4 * MIB));
}

unsigned check_rounds(unsigned wanted) {
        return driver.stand_in ? MIN(wanted, wanted > 1000 ? 64u : 3u) : wanted;
}

bool cannot_ask(struct line *l, int r, const char *step, const struct actor *a) {
        if (!r)
                return false;
        line_answer(l, OPEN_QUESTION, "not asked: %s: %s%s%s", step, actor_word(r), a && a->note.text[0] ? ", " : "",
                    a ? a->note.text : "");
        return true;
}

int host_page(uint64_t bytes, unsigned flags) {
        int fd = memfd_create("kvd-gpu-check", MFD_CLOEXEC | flags);

        if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && (!(flags & MFD_HUGETLB) || !fallocate(fd, 0, 0, (off_t)bytes)))
                return fd;
        closep(&fd);
        return -1;
}

static int ascending(const void *a, const void *b) {
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

/* Sorts. */
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

/* ---- one after the other -------------------------------------------------------------------------------------------- */

static void say_ended(const struct check *check, const char *how) {
        struct line l;

        line_begin(&l, check->name, "%s", check->about);
        line_answer(&l, NO, "the check did not end by itself: %s", how);
}

/* In a process of its own; its actors die with it. True: it ended well. */
static bool run_check(const struct check *check) {
        int status, limit = SIGALRM;
        char how[80];
        pid_t pid;

        fflush(stdout);
        pid = fork();
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                alarm(seconds ? seconds : check->seconds);
                check->run();
                exit(0);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid)
                return false;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
                return true;
        if (WIFSIGNALED(status) && WTERMSIG(status) == limit)
                snprintf(how, sizeof how, "it ran for %u s", seconds ? seconds : check->seconds);
        else
                snprintf(how, sizeof how, "status %d, signal %d", WEXITSTATUS(status), WTERMSIG(status));
        say_ended(check, how);
        return false;
}

static bool is_wanted(const char *only, const char *name) {
        size_t n = strlen(name);

        if (!only)
                return true;
        for (const char *at = only; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
                if (strncmp(at, name, n) == 0 && (at[n] == 0 || at[n] == ','))
                        return true;
        return false;
}

static void list(void) {
        for (size_t i = 0; i < ARRAY_SIZE(checks); i++)
                printf("%-4s %s\n", checks[i].name, checks[i].about);
}

int main(int argc, char **argv) {
        const char *only = NULL;
        bool well = true;
        int i = 1;

        for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
                if (strcmp(argv[i], "--only") == 0)
                        only = argv[i + 1];
                else if (strcmp(argv[i], "--seconds") == 0)
                        seconds = (unsigned)atoi(argv[i + 1]);
                else
                        break;
        }
        if (i < argc) {
                list();
                return strcmp(argv[i], "--list") == 0 ? 0 : 2;
        }
        if (!driver_say(&driver))
                return 77;
        for (size_t n = 0; n < ARRAY_SIZE(checks); n++)
                if (is_wanted(only, checks[n].name))
                        well = run_check(&checks[n]) && well;
        return !well;
}
