/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_ACCOUNT_H
#define KVD_STORE_ACCOUNT_H

/*
 * Accounts for the costs of domains and enforces their limits. Each kind of cost
 * (ipc/base/costs.def) has a limit for all domains together; account.c defines a domain's share.
 */

#include "ipc/base/cost.h"
#include "store/core.h"

/* Sets the limits from the store's configuration. */
void account_open(struct store *store);

/* Call after a domain's quota or guarantee has changed, or a domain was added. */
void account_shares_changed(struct store *store);

/* How much more the domain may use now; account_unreserved ignores the domain's own limit. */
uint64_t account_room(const struct domain *domain, enum kvd_cost cost);
uint64_t account_unreserved(const struct domain *domain, enum kvd_cost cost);

/*
 * Does it have less than its guarantee? Then it may take from domains that have more than theirs.
 */
bool account_below_guarantee(const struct domain *domain, enum kvd_cost cost);

/*
 * Charges n to the space. -EDQUOT: its domain's limit; -ENOBUFS: the limit of all; sets store_why.
 */
int account_charge(struct space *space, enum kvd_cost cost, uint64_t n);
int account_refuse(struct space *space, enum kvd_cost cost, uint64_t n); /* as if that failed */
void account_discharge(struct space *space, enum kvd_cost cost, uint64_t n);
void account_add(struct space *space, enum kvd_cost cost, uint64_t n); /* charges without a check */
void account_close(struct space *space); /* discharges all its costs */

/* Sets how many bytes of the space's segments have no block in use. */
void account_unused(struct space *space, uint64_t bytes);
/* Unused pool bytes that other domains have above their guarantees. */
uint64_t account_spare(const struct domain *domain);
/* May the domain lose a segment of that size? It must keep its guarantee. */
bool account_may_give(const struct domain *domain, uint64_t bytes);
/* Bytes by which use and reservations exceed the pool, without the domain's own reservation. */
uint64_t account_over(const struct domain *domain);

#endif
