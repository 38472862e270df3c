/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Deletes unused spaces to make room. Other spaces can take the memory of their blocks (take.c),
 * but a space also costs memory outside the pool, descriptors and a place in the list of spaces,
 * for as long as it exists. When one of these is short, the least recently used space without
 * clients is deleted: first in the domain that asks, then in domains that have more of it than they
 * are guaranteed. Its blocks in a file or on servers stay there, and a space of the same name and
 * geometry finds them again. A deleted space is freed in pieces; the request waits for them.
 */

#include <errno.h>

#include "store/account.h"
#include "store/cache/inside.h"

/* What a session pins stays, as if a client pinned it. */
static bool is_idle(const struct space *space) {
        return space_users(space) == 0 && !space_is_incomplete(space) &&
               !space->account.used[KVD_COST_session_pins];
}

/* Returns the least recently used idle space, and adds what all idle ones have of that cost. */
static struct space *oldest_idle(const struct domain *d, const struct space *except,
                                 enum kvd_cost cost, uint64_t *has) {
        struct space *oldest = NULL;

        for (uint32_t i = 0; i < d->spaces.n; i++) {
                struct space *s = d->spaces.at[i].space;

                if (s == except || !is_idle(s))
                        continue;
                *has += s->account.used[cost];
                if (!oldest || s->leaves.ages.last < oldest->leaves.ages.last)
                        oldest = s;
        }
        return oldest;
}

static bool is_older(const struct space *a, const struct space *b) {
        return a && (!b || a->leaves.ages.last < b->leaves.ages.last);
}

/* The same for all other domains. None gives more than it has above its guarantee. */
static struct space *oldest_of_others(const struct domain *than, enum kvd_cost cost,
                                      uint64_t *has) {
        struct space *oldest = NULL, *s;

        for (struct domain *d = than->store->domains; d; d = d->next) {
                uint64_t used = domain_used(d, cost), kept = domain_guaranteed(d, cost), idle = 0;

                if (d == than || used <= kept)
                        continue;
                s = oldest_idle(d, NULL, cost, &idle);
                *has += MIN(idle, used - kept);
                if (is_older(s, oldest))
                        oldest = s;
        }
        return oldest;
}

/* The space to delete. NULL: no space can be deleted, or all of them together are not enough. */
static struct space *choose(const struct domain *domain, const struct space *except, int error) {
        const struct short_of *missing = &domain->store->account.short_of;
        uint64_t has = 0, of_others = 0, used = domain_used(domain, missing->cost);
        struct space *own = oldest_idle(domain, except, missing->cost, &has), *other = NULL;

        if (error == -ENOBUFS)
                other = oldest_of_others(domain, missing->cost, &of_others);
        if (used - has + missing->n > domain_most(domain, missing->cost) ||
            has + of_others + account_room(domain, missing->cost) < missing->n)
                return NULL;
        return own ? own : other;
}

static int collect(struct space *space) {
        struct store *store = space_store(space);
        int r = -EINPROGRESS;

        space->listed.collected = true;
        store->spaces.collected++;
        store_refuse(store, r,
                     "space '%s' of domain '%s' has no clients and is removed to make room",
                     space->name, space->domain->config.name);
        space_delete(space, false);
        return r;
}

int store_make_way(struct domain *domain, const struct space *except, int error) {
        struct store *store = domain->store;
        bool under_way = store->deleted != NULL;
        struct space *space;

        if (error != -EDQUOT && error != -ENOBUFS)
                return error;
        if (under_way && (store_bury(store) || !store->deleted))
                return store_refuse(store, -EINPROGRESS, "room is being made; ask again");
        space = choose(domain, except, error);
        return space ? collect(space) : error;
}

int domain_make_way(struct domain *domain) {
        uint64_t has = 0;
        struct space *space = oldest_idle(domain, NULL, KVD_COST_spaces, &has);

        if (!space)
                return -EDQUOT;
        collect(space);
        return 0;
}

uint64_t store_collected(const struct store *store) {
        return store->spaces.collected;
}
