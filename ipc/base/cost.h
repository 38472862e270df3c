/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_COST_H
#define KVD_BASE_COST_H

/* Kinds of cost of a domain, in the order of costs.def. */

enum kvd_cost {
#define KVD_COST(name, unit, text) KVD_COST_##name,
#include "ipc/base/costs.def"
#undef KVD_COST
        KVD_N_COSTS
};

#endif
