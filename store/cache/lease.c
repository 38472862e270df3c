/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A lease says which client computes a bidirectional prefix, so that others wait instead of
 * computing it, too. It ends when its holder says so or is lost. Then the index's lease_epoch
 * moves, and all clients that wait on it (FUTEX_WAIT in their read-only mapping) look again. If the
 * keys of two prefixes collide, they only wait for each other.
 */

#include <errno.h>

#include "store/account.h"
#include "store/cache/inside.h"

static struct lease *find(struct space *space, struct kvd_key prefix, uint32_t prefix_tokens) {
        for (uint32_t i = 0; space->leases.n && i < STORE_MAX_LEASES; i++) {
                struct lease *l = &space->leases.at[i];

                if (l->holder != NONE && kvd_key_equal(l->prefix, prefix) &&
                    l->prefix_tokens == prefix_tokens)
                        return l;
        }
        return NULL;
}

static struct lease *unused(struct space *space) {
        for (uint32_t i = 0; i < STORE_MAX_LEASES; i++)
                if (space->leases.at[i].holder == NONE)
                        return &space->leases.at[i];
        return NULL;
}

int space_lease(struct attachment *a, struct kvd_key prefix, uint32_t prefix_tokens) {
        struct space *space = a->space;
        struct lease *l = find(space, prefix, prefix_tokens);
        int r;

        if (l)
                return l->holder == a->seat;
        l = a->tenant->n_leases < tenant_most(STORE_MAX_LEASES) ? unused(space) : NULL;
        if (!l)
                return store_refuse(space_store(space), -ENOBUFS,
                                    "%u prefixes of space '%s' are being computed, the maximum; "
                                    "compute without a lease",
                                    STORE_MAX_LEASES, space->name);
        r = account_charge(space, KVD_COST_leases, 1);
        if (r < 0)
                return r;
        *l = (struct lease){prefix, prefix_tokens, a->seat};
        space->leases.n++;
        a->n_leases++;
        a->tenant->n_leases++;
        space_count(space, KVD_SPACE_LEASES, 1);
        return 1;
}

static void end(struct attachment *a, struct lease *l) {
        l->holder = NONE;
        a->space->leases.n--;
        a->n_leases--;
        a->tenant->n_leases--;
        account_discharge(a->space, KVD_COST_leases, 1);
        epoch_move(&a->space->ix->lease_epoch);
}

void space_lease_end(struct attachment *a, struct kvd_key prefix, uint32_t prefix_tokens) {
        struct lease *l = find(a->space, prefix, prefix_tokens);

        if (l && l->holder == a->seat)
                end(a, l);
}

void leases_drop(struct attachment *a, bool died) {
        uint32_t n = a->n_leases;

        for (uint32_t i = 0; a->n_leases && i < STORE_MAX_LEASES; i++)
                if (a->space->leases.at[i].holder == a->seat)
                        end(a, &a->space->leases.at[i]);
        if (died)
                space_count(a->space, KVD_SPACE_LEASES_LOST, n);
}
