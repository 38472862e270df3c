/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/client/killpoints/hook.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "tests/lib/oracle.h"

#define MAX_RANGES 128

#define BETWEEN_PAUSES 200u /* maximum number of points; about one pause per lookup */

static bool on;
/* points so far, and the points at which something happens; 0: never */
static uint64_t seen, signal_at, pause_at;
static int the_signal;
static uint64_t stopped_ns; /* total time for which the signals stopped this process */
static struct random dice;

static struct range { uintptr_t from, to; } ranges[MAX_RANGES];
static uint32_t n_ranges;

/* ---- shared memory --------------------------------------------------------------------------- */

int hook_is_shared(const volatile void *at) {
        uintptr_t a = (uintptr_t)at;

        for (uint32_t i = 0; i < n_ranges; i++)
                if (a >= ranges[i].from && a < ranges[i].to)
                        return 1;
        return 0;
}

void hook_forget(const void *at, size_t n) {
        uintptr_t from = (uintptr_t)at, to = from + n;

        for (uint32_t i = 0; i < n_ranges;)
                if (ranges[i].from >= from && ranges[i].to <= to)
                        ranges[i] = ranges[--n_ranges];
                else
                        i++;
}

static void remember(const void *at, size_t n) {
        hook_forget(at, n);
        if (n_ranges == MAX_RANGES)
                abort();
        ranges[n_ranges++] = (struct range){(uintptr_t)at, (uintptr_t)at + n};
}

/* ---- at a point ------------------------------------------------------------------------------ */

void hook_signal(int signal) {
        syscall(SYS_kill, syscall(SYS_getpid), signal);
}

/* Long enough for other clients to evict, fill and seal, sometimes several times. */
static void pause_here(void) {
        uint32_t us = random_below(&dice, 8) ? random_below(&dice, 100) : random_below(&dice, 1000);
        struct timespec t = {0, us * 1000L};

        if (us < 20)
                sched_yield();
        else
                nanosleep(&t, NULL);
}

static void signal_here(void) {
        uint64_t before = 0, behind = 0;

        kvd_sys_real.clock_ns(&before);
        hook_signal(the_signal);
        kvd_sys_real.clock_ns(&behind);
        stopped_ns += behind - before;
}

void hook_point(void) {
        int e = errno;

        if (!on)
                return;
        seen++;
        if (seen == signal_at)
                signal_here();
        if (seen != pause_at)
                return;
        pause_here();
        pause_at = seen + 1 + random_below(&dice, BETWEEN_PAUSES);
        errno = e;
}

void hook_access(const volatile void *at) {
        if (on && hook_is_shared(at))
                hook_point();
}

/* ---- settings -------------------------------------------------------------------------------- */

void hook_signal_at(uint64_t nth, int signal) {
        signal_at = nth;
        the_signal = signal;
}

void hook_shake(uint64_t seed) {
        dice.state = seed;
        pause_at = 1 + random_below(&dice, BETWEEN_PAUSES);
}

void hook_start(void) {
        seen = 0;
        on = true;
}

uint64_t hook_stop(void) {
        on = false;
        signal_at = pause_at = 0;
        return seen;
}

/* ---- the table of system calls --------------------------------------------------------------- */

#define HOOKED_CALL(type, name, parameters, arguments) \
        static type hooked_##name parameters { \
                hook_point(); \
                return kvd_sys_real.name arguments; \
        }
KVD_SYS_CALLS(HOOKED_CALL)

static void *noted_mmap(void *at, size_t n, int prot, int flags, int fd, off_t off) {
        void *r = hooked_mmap(at, n, prot, flags, fd, off);

        if (r != MAP_FAILED && (flags & MAP_SHARED))
                remember(r, n);
        return r;
}

/* The clock minus stopped_ns: deadlines do not advance while the process is stopped. */
static int clock_without_stops(uint64_t *ret) {
        int r = hooked_clock_ns(ret);

        *ret -= stopped_ns;
        return r;
}

void hook_install(void) {
#define HOOKED_MEMBER(type, name, parameters, arguments) .name = hooked_##name,
        static struct kvd_sys hooked = {KVD_SYS_CALLS(HOOKED_MEMBER)};

        hooked.mmap = noted_mmap;
        hooked.clock_ns = clock_without_stops;
        sys = &hooked;
}
