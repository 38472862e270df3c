/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The same rule applies to every kind of cost. All domains together may use `limit` of it. A domain
 * may use the share of the limit that its quota is of the pool. The share that its guarantee is of
 * the pool is reserved for it, as far as it does not use it yet:
 *
 *      most(d)       limit x quota / pool, or the whole limit less what is kept for small domains
 *      reserved(d)   limit x guarantee / pool - used(d), if that is positive
 *      room(d)       the smaller of  most(d) - used(d)  and  limit - used by all - reserved for all others,
 *                    less what is kept for small domains
 *
 * So a guarantee holds whatever others have used before. The sum of all reservations is maintained,
 * so that a request costs the same for any number of domains. If there are several domains, each is
 * guaranteed a part of the memory for copies, without any configuration.
 */

#include "store/account.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "store/cache/cache.h"
#include "store/file_tier.h"

#define OVERHEAD_LEAST (UINT64_C(2) << 30)
/* each is a descriptor, and clients decide how small they are */
#define MOST_SKETCHES 2048u
#define MOST_OF_OTHERS 65536u

static const char *const texts[] = {
#define KVD_COST(name, unit, text) text,
#include "ipc/base/costs.def"
#undef KVD_COST
};

/* ---- shares ---------------------------------------------------------------------------------- */

static uint64_t share_of(const struct store *store, enum kvd_cost cost, uint64_t pool_bytes) {
        assert(store->config.pool_bytes);
        return (uint64_t)((unsigned __int128)store->account.limit[cost] * pool_bytes /
                          store->config.pool_bytes);
}

/* Copies cannot be revoked, so each domain is guaranteed a part of the memory for them. */
uint64_t domain_guaranteed(const struct domain *d, enum kvd_cost cost) {
        uint64_t asked = share_of(d->store, cost, d->config.guarantee);
        uint64_t fair = cost == KVD_COST_spill ? d->store->account.fair_spill : 0;

        if (d->config.quota)
                fair = MIN(fair, share_of(d->store, cost, d->config.quota));
        return MAX(asked, fair);
}

/* With several domains: equal parts of half of the memory that no configured guarantee reserves. */
static uint64_t fair_spill(const struct store *store) {
        uint64_t asked = 0, n = 0;

        for (const struct domain *d = store->domains; d; d = d->next, n++)
                asked += share_of(store, KVD_COST_spill, d->config.guarantee);
        return n > 1 ? less(store->account.limit[KVD_COST_spill], asked) / 2 / n : 0;
}

/*
 * Memory of the pool and of copies can move from one domain to another, since blocks are evicted.
 * Other resources cannot: a part of them is kept for small domains, so that the first domain leaves
 * some for the next one.
 */
#define KEPT 16u     /* limit / KEPT is kept ... */
#define NEWCOMER 64u /* ... for domains that use less than limit / NEWCOMER */

static bool changes_hands(enum kvd_cost cost) {
        return cost == KVD_COST_pool || cost == KVD_COST_spill;
}

static uint64_t kept(const struct store *store, enum kvd_cost cost) {
        return changes_hands(cost) ? 0 : store->account.limit[cost] / KEPT;
}

uint64_t domain_most(const struct domain *d, enum kvd_cost cost) {
        uint64_t most = d->store->account.limit[cost] - kept(d->store, cost),
                 quota = MIN(d->config.quota, d->store->config.pool_bytes);

        if (quota)
                most = MIN(most, share_of(d->store, cost, quota));
        return MAX(most, domain_guaranteed(d, cost));
}

uint64_t domain_used(const struct domain *d, enum kvd_cost cost) {
        return d->used[cost];
}

static uint64_t reserved_for(const struct domain *d, enum kvd_cost cost) {
        return less(domain_guaranteed(d, cost), d->used[cost]);
}

/* If it is not all that is unused, whole segments, so that the guarantee is kept. */
static uint64_t spare(const struct domain *d) {
        uint64_t above = less(d->used[KVD_COST_pool], domain_guaranteed(d, KVD_COST_pool));

        return d->unused <= above ? d->unused : above / d->largest * d->largest;
}

uint64_t account_spare(const struct domain *d) {
        return d->store->account.spare - spare(d);
}

bool account_may_give(const struct domain *d, uint64_t bytes) {
        return d->used[KVD_COST_pool] >= domain_guaranteed(d, KVD_COST_pool) + bytes;
}

uint64_t account_over(const struct domain *d) {
        const struct account *account = &d->store->account;

        return less(account->used[KVD_COST_pool] + account->reserved[KVD_COST_pool] -
                            reserved_for(d, KVD_COST_pool),
                    account->limit[KVD_COST_pool]);
}

uint64_t account_unreserved(const struct domain *d, enum kvd_cost cost) {
        const struct account *account = &d->store->account;
        uint64_t limit = account->limit[cost];
        uint64_t others = account->reserved[cost] - reserved_for(d, cost);
        uint64_t left = less(limit, account->used[cost] + others);
        uint64_t little = MAX(limit / NEWCOMER, domain_guaranteed(d, cost));

        return MAX(less(left, kept(d->store, cost)), MIN(left, less(little, d->used[cost])));
}

uint64_t account_room(const struct domain *d, enum kvd_cost cost) {
        return MIN(less(domain_most(d, cost), d->used[cost]), account_unreserved(d, cost));
}

bool account_below_guarantee(const struct domain *d, enum kvd_cost cost) {
        return reserved_for(d, cost) > 0;
}

uint64_t store_most_used(const struct store *store) {
        const struct account *account = &store->account;
        uint64_t most = 0;

        for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                if (!changes_hands((enum kvd_cost)i))
                        most = MAX(most, account->used[i] * 100 / MAX(account->limit[i], 1));
        return most;
}

void account_shares_changed(struct store *store) {
        struct account *account = &store->account;

        memset(account->reserved, 0, sizeof account->reserved);
        account->spare = 0;
        account->fair_spill = fair_spill(store);
        for (struct domain *d = store->domains; d; d = d->next) {
                for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                        account->reserved[i] += reserved_for(d, (enum kvd_cost)i);
                account->spare += spare(d);
        }
}

void account_open(struct store *store) {
        const struct store_config *config = &store->config;
        uint64_t *limit = store->account.limit;

        for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                limit[i] = MOST_OF_OTHERS;
        limit[KVD_COST_pool] = config->pool_bytes;
        limit[KVD_COST_overhead] = config->overhead_bytes ?:
                                           MAX(config->pool_bytes / 2, OVERHEAD_LEAST);
        limit[KVD_COST_files] = config->max_files ?: UINT32_MAX;
        limit[KVD_COST_spill] = config->spill_bytes;
        limit[KVD_COST_sketches] = MOST_SKETCHES;
        limit[KVD_COST_file_names] = STORE_DISK_SPACES;
        limit[KVD_COST_session_pins] = config->pool_bytes / 2;
        limit[KVD_COST_kept] = config->keep_bytes ?: UINT32_MAX;
}

/* ---- charges --------------------------------------------------------------------------------- */

static void change(struct space *space, enum kvd_cost cost, uint64_t n) {
        struct domain *d = space_domain(space);
        struct account *account = &d->store->account;

        account->reserved[cost] -= reserved_for(d, cost);
        account->spare -= spare(d);
        account->used[cost] += n;
        d->used[cost] += n;
        space->account.used[cost] += n;
        account->reserved[cost] += reserved_for(d, cost);
        account->spare += spare(d);
        space_changes(space);
}

void account_unused(struct space *space, uint64_t bytes) {
        struct space_account *own = &space->account;
        struct domain *d = space_domain(space);

        d->store->account.spare -= spare(d);
        if (bytes)
                d->largest = MAX(d->largest, space_index(space)->segment_bytes);
        d->unused += bytes - own->unused;
        own->unused = bytes;
        d->store->account.spare += spare(d);
}

void account_add(struct space *space, enum kvd_cost cost, uint64_t n) {
        change(space, cost, n);
}

void account_discharge(struct space *space, enum kvd_cost cost, uint64_t n) {
        change(space, cost, -n);
}

void account_close(struct space *space) {
        account_unused(space, 0);
        for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                account_discharge(space, (enum kvd_cost)i, space->account.used[i]);
}

/* The message reveals nothing about other domains. */
int account_refuse(struct space *space, enum kvd_cost cost, uint64_t n) {
        const struct domain *d = space_domain(space);

        d->store->account.short_of = (struct short_of){cost, n};
        if (d->used[cost] + n > domain_most(d, cost))
                return store_refuse(d->store, -EDQUOT,
                                    "domain '%s' is at its limit of this: %s; delete spaces, or "
                                    "raise the limit (see kvctl domain)",
                                    d->config.name, texts[cost]);
        return store_refuse(d->store, -ENOBUFS, "this is used up at present: %s", texts[cost]);
}

int account_charge(struct space *space, enum kvd_cost cost, uint64_t n) {
        if (n > account_room(space_domain(space), cost))
                return account_refuse(space, cost, n);
        change(space, cost, n);
        return 0;
}
