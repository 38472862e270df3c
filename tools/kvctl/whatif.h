/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_WHATIF_H
#define KVCTL_WHATIF_H

#include "tools/kvctl/kvctl.h"
#include "tools/kvctl/requests.h"

/*
 * Takes what is looked up in the space of the first operand, until Ctrl-C or the end of --for.
 * *n_missed: number of times that lookups came faster than they were read.
 */
int whatif_follow(struct kvctl *kvctl, struct requests *ret, uint64_t *n_missed);

#endif
