/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_DEGRADED_H
#define KVCTL_DEGRADED_H

/* What is degraded (ipc/base/degraded.def) in what the daemon says of itself and of a space. */

#include "ipc/base/degraded.h"
#include "ipc/msg.h"

/* Each a number, 0: it is not so. */
void degraded_of_daemon(const struct kvd_msg_daemon_info_reply *info, uint64_t ret[KVD_N_DEGRADED]);
void degraded_of_space(const struct kvd_msg_space_info_reply *info, uint64_t ret[KVD_N_DEGRADED]);

/* Of one kind of cost. */
uint64_t degraded_near_limit(const struct kvd_msg_domain_info_reply *info, uint32_t cost);

#endif
