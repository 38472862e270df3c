/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_DEGRADED_H
#define KVCTL_DEGRADED_H

/* Finds degraded states (ipc/base/degraded.def) in the daemon's replies. */

#include "ipc/base/degraded.h"
#include "ipc/msg.h"

/* One number per state; 0 if it does not apply. */
void degraded_of_daemon(const struct kvd_msg_daemon_info_reply *info, uint64_t ret[KVD_N_DEGRADED]);
void degraded_of_space(const struct kvd_msg_space_info_reply *info, uint64_t ret[KVD_N_DEGRADED]);

/* Percent of the limit of a cost (KVD_COST_*) that is used; 0 if that is not near the limit. */
uint64_t degraded_near_limit(const struct kvd_msg_domain_info_reply *info, uint32_t cost);

#endif
