/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_ACTIVATION_H
#define KVD_DAEMON_ACTIVATION_H

#include "ipc/base/why.h"

/*
 * The listening socket that systemd hands over as LISTEN_FDNAMES=listen. 1: *ret is it,
 * close-on-exec and ours; 0: there is none; -EINVAL: what was handed over is not usable, in why.
 * The variables are gone afterwards.
 */
int activation_take(int *ret, struct kvd_why *why);

#endif
