/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This file makes and frees the store, its domains, and the list of its spaces. What a space is
 * made of belongs to the rooms; which parts there are stands in hooks.c.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "store/cache/memory.h"
#include "store/device/device.h"
#include "store/hooks.h"
#include "store/job.h"

/* ---- pages ----------------------------------------------------------------------------------- */

#define HUGE_BYTES (UINT64_C(2) << 20)

/* Counts the reserved 2 MiB pages that nobody uses yet; 0 where there are none. */
static uint64_t free_huge_pages(void) {
        FILE *f = fopen("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "re");
        unsigned long long n = 0;

        if (!f)
                return 0;
        if (fscanf(f, "%llu", &n) != 1)
                n = 0;
        fclose(f);
        return n;
}

static int choose_pages(struct store *store) {
        uint64_t needed = DIV_UP(store->config.pool_bytes, HUGE_BYTES);
        uint64_t have = store->config.pages == STORE_PAGES_SMALL ? 0 : free_huge_pages();

        if (store->config.pages == STORE_PAGES_HUGE && have < needed)
                return store_refuse(store, -ENOMEM,
                                    "pages = huge needs %llu reserved 2 MiB pages and %llu are "
                                    "free; "
                                    "raise vm.nr_hugepages or set pages = auto",
                                    (unsigned long long)needed, (unsigned long long)have);
        store->huge = store->config.pages != STORE_PAGES_SMALL && have >= needed;
        store->page_bytes = store->huge ? HUGE_BYTES : 4096;
        return 0;
}

const char *store_pages_name(const struct store *store) {
        if (store->config.backend != KVD_BACKEND_HOST)
                return "GPU memory";
        return store->huge ? "2 MiB, reserved" : "4 KiB";
}

/* ---- store ----------------------------------------------------------------------------------- */

int store_new(const struct store_config *config, struct store **ret) {
        struct store *store = sys->calloc(1, sizeof *store);

        *ret = store;
        if (!store)
                return -ENOMEM;
        store->config = *config;
        store->hooks = store_hooks;
        if (!store->config.max_attachments)
                store->config.max_attachments = 256;
        if (!store->config.segment_bytes)
                store->config.segment_bytes = MIN(UINT64_C(64) << 20, store->config.pool_bytes);
        if (!store->config.spill_bytes)
                store->config.spill_bytes = store->config.pool_bytes;
        store->ranks = sys->calloc(STORE_RANKS, sizeof *store->ranks);
        if (!store->ranks || jobs_new(store) < 0)
                return store_refuse(store, -ENOMEM, "out of memory for jobs");
        if (config->backend != KVD_BACKEND_HOST) {
                store->memory = &memory_device;
                return device_open(store);
        }
        store->memory = &memory_host;
        return choose_pages(store);
}

struct store *store_free(struct store *store) {
        if (!store)
                return NULL;
        store->wakes = false;
        for (struct domain *d = store->domains; d; d = d->next)
                while (d->spaces)
                        space_delete(d->spaces, true);
        while (store_bury(store))
                ;
        while (store->domains) {
                struct domain *domain = store->domains;

                store->domains = domain->next;
                free(domain);
        }
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

uint64_t store_pool_used(const struct store *store) {
        return store->used;
}

/* ---- domain ---------------------------------------------------------------------------------- */

struct domain *store_domain_by_name(struct store *store, const char *name) {
        for (struct domain *d = store->domains; d; d = d->next)
                if (strcmp(d->config.name, name) == 0)
                        return d;
        return NULL;
}

int store_domain(struct store *store, const struct domain_config *config, struct domain **ret) {
        struct domain *domain = store_domain_by_name(store, config->name);

        if (config->arena && store->config.backend == KVD_BACKEND_LEGACY)
                return store_refuse(store, -EOPNOTSUPP,
                                    "isolation = arena of domain '%s' needs memory that can be "
                                    "mapped read-only, and legacy CUDA handles cannot; set "
                                    "isolation = shared",
                                    config->name);
        if (!domain) {
                domain = sys->calloc(1, sizeof *domain);
                if (!domain)
                        return store_refuse(store, -ENOMEM, "out of memory for domain '%s'",
                                            config->name);
                domain->store = store;
                /* of spaces to come: it cannot change under existing ones */
                domain->config.arena = config->arena;
                domain->next = store->domains;
                store->domains = domain;
        }
        memcpy(domain->config.name, config->name, sizeof domain->config.name);
        domain->config.quota = config->quota;
        domain->config.guarantee = config->guarantee;
        domain->config.client_quota = config->client_quota;
        *ret = domain;
        return 0;
}

const struct domain_config *domain_config(const struct domain *domain) {
        return &domain->config;
}

struct space *store_next_space(struct store *store, uint32_t cursor) {
        struct space *best = NULL;

        for (struct domain *d = store->domains; d; d = d->next)
                for (struct space *s = d->spaces; s; s = s->next)
                        if (s->number >= cursor && (!best || s->number < best->number))
                                best = s;
        return best;
}

/* Clients keep what they have mapped, as if their space had been deleted. */
void store_exporter_gone(struct store *store) {
        struct space *space;

        store->exporter_gone = true;
        while ((space = store_next_space(store, 0)))
                space_delete(space, true);
        store->exporter_gone = false;
        chunks_lost(store);
}
