/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_COST_H
#define KVD_BASE_COST_H

/* The kinds of what a domain costs: costs.def has them in this order. */

enum kvd_cost {
#define KVD_COST(name, unit, text) KVD_COST_##name,
#include "ipc/base/costs.def"
#undef KVD_COST
        KVD_N_COSTS
};

#endif
