/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A table of numbers, each with the time at which it expires: a minute after the last event for a
 * count of events, never for a lasting state. So counts expire without a timer.
 */

#include "daemon/base/degraded.h"

#include "ipc/base/sys.h"

#define RECENT_NS UINT64_C(60000000000)

static struct { uint64_t n, over_ns; } states[KVD_N_DEGRADED];

void degraded_set_to(enum kvd_degraded which, uint64_t n) {
        states[which].n = n;
        states[which].over_ns = UINT64_MAX;
}

void degraded_note_one(enum kvd_degraded which) {
        uint64_t now = sys_now_ns();

        if (now >= states[which].over_ns)
                states[which].n = 0;
        states[which].n++;
        states[which].over_ns = now + RECENT_NS;
}

void degraded_get(uint64_t ret[KVD_N_DEGRADED]) {
        uint64_t now = sys_now_ns();

        for (uint32_t i = 0; i < KVD_N_DEGRADED; i++)
                ret[i] = now < states[i].over_ns ? states[i].n : 0;
}
