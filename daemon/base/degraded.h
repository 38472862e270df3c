/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_DEGRADED_H
#define KVD_DAEMON_BASE_DEGRADED_H

/*
 * The degraded states of this process (ipc/base/degraded.def), a number each; 0: not degraded. Code
 * that makes do with less than was asked for reports it here. Only the loop's thread may call this.
 */

#include <stdint.h>

#include "ipc/base/degraded.h"

#define degraded_set(name, n) degraded_set_to(KVD_DEGRADED_##name, n)
#define degraded_note(name) degraded_note_one(KVD_DEGRADED_##name)

void degraded_set_to(enum kvd_degraded which, uint64_t n); /* until it is set again */
void degraded_note_one(enum kvd_degraded which); /* adds 1; expires after a minute without a call */

void degraded_get(uint64_t ret[KVD_N_DEGRADED]);

#endif
