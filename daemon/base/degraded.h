/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_DEGRADED_H
#define KVD_DAEMON_BASE_DEGRADED_H

/*
 * The degraded states of this process (ipc/base/degraded.def), each a number: how many, or how
 * much; 0: it is not so. Whoever does with less than was asked for says so here, by name. For the
 * thread of the loop only.
 */

#include <stdint.h>

#include "ipc/base/degraded.h"

#define degraded_set(name, n) degraded_set_to(KVD_DEGRADED_##name, n)
#define degraded_note(name) degraded_note_one(KVD_DEGRADED_##name)

void degraded_set_to(enum kvd_degraded which, uint64_t n); /* so it is, until it is set anew */
void degraded_note_one(enum kvd_degraded which); /* once more; over a minute after the last time */

void degraded_get(uint64_t ret[KVD_N_DEGRADED]);

#endif
