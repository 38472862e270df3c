/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_ACCOUNT_H
#define KVD_STORE_ACCOUNT_H

/*
 * What domains cost, and what they may cost: the one place that decides. Each kind of cost
 * (ipc/base/costs.def) has a limit for all domains together; see account.c for a domain's share.
 */

#include "ipc/base/cost.h"
#include "store/core.h"

/* Limits of the store's own, once its configuration is known. */
void account_open(struct store *store);

/* A domain's quota or guarantee is another one, or there is one domain more. */
void account_shares_changed(struct store *store);

/* How much more of it the domain could have now; its quota aside, in account_unreserved. */
uint64_t account_room(const struct domain *domain, enum kvd_cost cost);
uint64_t account_unreserved(const struct domain *domain, enum kvd_cost cost);

/* Is it that low that it may take from domains that have more than their guarantee? */
bool account_below_guarantee(const struct domain *domain, enum kvd_cost cost);

/* For the space: 0, or -EDQUOT (its domain's quota) or -ENOBUFS with the words said. */
int account_charge(struct space *space, enum kvd_cost cost, uint64_t n);
void account_discharge(struct space *space, enum kvd_cost cost, uint64_t n);
void account_add(struct space *space, enum kvd_cost cost, uint64_t n); /* whether it may or not */
void account_close(struct space *space); /* all that is still charged to it */

/* The space has so many bytes of the pool in which nobody uses a block. */
void account_unused(struct space *space, uint64_t bytes);
/* What others than that domain could be made to give, down to their guarantees. */
uint64_t account_spare(const struct domain *domain);
/* May that segment go to another domain? Its own must keep what it is guaranteed. */
bool account_may_give(const struct domain *domain, uint64_t bytes);
/* Bytes by which the pool is used or promised beyond its size, that domain's part aside. */
uint64_t account_over(const struct domain *domain);

#endif
