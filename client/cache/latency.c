/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How long calls take, as histograms in the pin page, which the daemon sums. A lookup makes no
 * system call, so lookups are timed only where the clock can be read without one.
 */

#include <stdio.h>
#include <string.h>

#include "client/internal.h"
#include "ipc/base/sys.h"

#define CLOCK "/sys/devices/system/clocksource/clocksource0/current_clocksource"

static _Atomic(int) clock_is_free; /* 0: not yet known, 1: yes, -1: no */

/* Can processes read the kernel's current clock source without a system call? */
static bool read_is_free(void) {
        static const char *const clocks[] = {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page"};
        char name[64] = "";
        FILE *f = fopen(CLOCK, "re");

        if (!f)
                return false;
        if (!fgets(name, sizeof name, f))
                name[0] = 0;
        fclose(f);
        name[strcspn(name, "\n")] = 0;
        for (size_t i = 0; i < ARRAY_SIZE(clocks); i++)
                if (strcmp(name, clocks[i]) == 0)
                        return true;
        return false;
}

void latency_prepare(void) {
        if (!atomic_load_explicit(&clock_is_free, memory_order_relaxed))
                atomic_store_explicit(&clock_is_free, read_is_free() ? 1 : -1,
                                      memory_order_relaxed);
}

uint64_t latency_begin(void) {
        return atomic_load_explicit(&clock_is_free, memory_order_relaxed) > 0 ? sys_now_ns() : 0;
}

/* Statistics only: concurrent threads may lose a count. */
static void add(shm_u64 *word, uint64_t n) {
        atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + n,
                              memory_order_relaxed);
}

void latency_count(struct view *view, enum kvd_latency which, uint64_t begun_ns) {
        uint64_t ns = sys_now_ns() - begun_ns;

        add(&view->page->counters[kvd_latency_sum(which)], ns);
        add(&view->page->counters[kvd_latency_bucket(which, ns)], 1);
}
