/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Creates and frees the store, its domains, and the list of its spaces. The parts of a space are in
 * the subfolders; hooks.c lists them.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/cache/memory.h"
#include "store/device/chunk.h"
#include "store/hooks.h"
#include "store/job.h"

/* ---- store ----------------------------------------------------------------------------------- */

int store_new(const struct store_config *config, struct store **ret) {
        struct store *store = sys->calloc(1, sizeof *store);
        int r;

        *ret = store;
        if (!store)
                return -ENOMEM;
        store->config = *config;
        store->hooks = store_hooks;
        store->owed.retired = SHARED_FILE_NONE;
        if (!store->config.segment_bytes)
                store->config.segment_bytes = MIN(UINT64_C(64) << 20, store->config.pool_bytes);
        if (!store->config.spill_bytes)
                store->config.spill_bytes = store->config.pool_bytes;
        store->ranks = sys->calloc(STORE_RANKS, sizeof *store->ranks);
        if (!store->ranks || jobs_new(store) < 0)
                return store_refuse(store, -ENOMEM, "out of memory for jobs");
        store->memory = config->backend == KVD_BACKEND_HOST ? &memory_host : &memory_device;
        pages_choose(store);
        r = config->backend == KVD_BACKEND_HOST ? 0 : device_open(store);
        if (!store->config.pool_most || config->backend != KVD_BACKEND_HOST)
                store->config.pool_most = store->config.pool_bytes;
        if (r == 0)
                account_open(store);
        return r;
}

struct store *store_free(struct store *store) {
        if (!store)
                return NULL;
        store->wakes.on = false;
        hooks_store_ends(store);
        for (struct domain *d = store->domains; d; d = d->next)
                while (d->spaces.n)
                        space_leave(d->spaces.at[0].space);
        while (store_bury(store))
                ;
        while (store->domains) {
                struct domain *domain = store->domains;

                store->domains = domain->next;
                roll_free(&domain->spaces);
                free(domain);
        }
        roll_free(&store->spaces.all);
        if (store->memory)
                store->memory->close(store);
        jobs_free(store);
        free(store->ranks);
        free(store);
        return NULL;
}

uint64_t store_pool_bytes(const struct store *store) {
        return store->config.pool_bytes;
}

uint64_t store_pool_most(const struct store *store) {
        return store->config.pool_most;
}

uint64_t store_pool_used(const struct store *store) {
        return store->account.used[KVD_COST_pool];
}

/* ---- domain ---------------------------------------------------------------------------------- */

struct domain *store_domain_by_name(struct store *store, const char *name) {
        for (struct domain *d = store->domains; d; d = d->next)
                if (strcmp(d->config.name, name) == 0)
                        return d;
        return NULL;
}

int store_domain(struct store *store, const struct domain_config *config, struct domain **ret) {
        struct domain *domain = store_domain_by_name(store, config->name), **at = &store->domains;

        if (config->arena && store->config.backend == KVD_BACKEND_LEGACY)
                return store_refuse(
                        store, -EOPNOTSUPP,
                        "isolation = arena of domain '%s' needs memory that can be "
                        "mapped read-only, and legacy CUDA handles cannot; set isolation = shared",
                        config->name);
        if (!domain) {
                domain = sys->calloc(1, sizeof *domain);
                if (!domain)
                        return store_refuse(store, -ENOMEM, "out of memory for domain '%s'",
                                            config->name);
                domain->store = store;
                /* only now: they cannot change while the domain has spaces */
                domain->config.arena = config->arena;
                memcpy(domain->config.remote_prefix, config->remote_prefix,
                       sizeof domain->config.remote_prefix);
                while (*at)
                        at = &(*at)->next;
                *at = domain;
        }
        memcpy(domain->config.name, config->name, sizeof domain->config.name);
        domain->config.quota = config->quota;
        domain->config.guarantee = config->guarantee;
        domain->config.client_quota = config->client_quota;
        account_shares_changed(store);
        *ret = domain;
        return 0;
}

const struct domain_config *domain_config(const struct domain *domain) {
        return &domain->config;
}

struct domain *store_next_domain(struct store *store, struct domain *domain) {
        return domain ? domain->next : store->domains;
}

struct space *store_next_space(struct store *store, uint32_t cursor) {
        return roll_from(&store->spaces.all, cursor);
}

struct space *store_space_by_number(struct store *store, uint32_t number) {
        struct space *space = store_next_space(store, number);

        return space && space_number(space) == number ? space : NULL;
}

struct space *store_space_after(struct store *store, const struct space *space) {
        return store_next_space(store, space ? space_number(space) + 1 : 0);
}

struct space *store_space_in_turn(struct store *store, uint32_t *turn) {
        struct space *space = store_next_space(store, *turn) ?: store_next_space(store, 0);

        *turn = space_number(space) + 1;
        return space;
}

struct space *domain_next_space(struct domain *domain, uint32_t cursor) {
        return roll_from(&domain->spaces, cursor);
}

uint32_t store_spaces(const struct store *store) {
        return store->spaces.all.n;
}

uint32_t domain_spaces(const struct domain *domain) {
        return domain->spaces.n;
}

/* Deletes all spaces. Clients keep what they have mapped. */
void store_exporter_gone(struct store *store) {
        store->exporter_gone = true;
        while (store->spaces.all.n)
                space_delete(store->spaces.all.at[0].space, true);
        store->exporter_gone = false;
        chunks_lost(store);
}
