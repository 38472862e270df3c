/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Changes the size of a pool in use. Only limits change here: the shares of domains (account.c),
 * and the number of blocks that a space may have. Spaces that have too much give it back as idle
 * work (space_trim).
 */

#include <errno.h>

#include "ipc/base/device.h"
#include "store/account.h"
#include "store/cache/cache.h"

static int check_size(struct store *store, uint64_t pool_bytes) {
        const struct store_config *config = &store->config;

        if (pool_bytes == config->pool_bytes)
                return 0;
        if (pool_bytes > config->pool_most)
                return store_refuse(store, -E2BIG,
                                    "the pool can be raised to %llu MiB without a restart",
                                    (unsigned long long)(config->pool_most >> 20));
        if (store->pages.huge && pool_bytes > config->pool_bytes &&
            pool_bytes > store_pool_used(store) + store_free_huge_bytes())
                return store_refuse(store, -ENOMEM,
                                    "there are not enough free 2 MiB pages for a pool of %llu MiB; "
                                    "raise vm.nr_hugepages",
                                    (unsigned long long)(pool_bytes >> 20));
        return 0;
}

int store_resize(struct store *store, uint64_t pool_bytes, uint64_t spill_bytes) {
        int r, short_of_room = 0;

        if (store->config.backend != KVD_BACKEND_HOST)
                pool_bytes = store->config.pool_bytes;
        r = check_size(store, pool_bytes);
        if (r < 0)
                return r;
        store->config.pool_bytes = pool_bytes;
        store->config.spill_bytes = spill_bytes ?: pool_bytes;
        account_open(store);
        account_shares_changed(store);
        for (struct domain *d = store->domains; d; d = d->next)
                for (uint32_t i = 0; i < d->spaces.n; i++) {
                        short_of_room += !space_fit(d->spaces.at[i].space);
                        space_wants_idle(d->spaces.at[i].space);
                }
        return short_of_room;
}
