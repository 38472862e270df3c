/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_BUDGET_H
#define KVLM_BUDGET_H

/* Eviction to a budget of tokens: KeyDiff, and what it is compared with. */

#include "tools/kvlm/relief.h"

int budget_evict(struct relief *, struct sequence *); /* down to the budget; -ENOMEM: everything is still there */

#endif
