/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_DEGRADED_H
#define KVD_BASE_DEGRADED_H

/* Degraded states, in the order of degraded.def. */

#define KVD_SLOW_TURN_US 10000u
#define KVD_NEARLY_ALL 90u /* percent */

enum kvd_degraded {
#define KVD_DEGRADED(whose, name, unit, text, remedy) KVD_DEGRADED_##name,
#include "ipc/base/degraded.def"
#undef KVD_DEGRADED
        KVD_N_DEGRADED
};

#endif
