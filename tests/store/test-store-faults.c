/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The store alone, while the n-th system call fails: every operation answers, sealed blocks stay
 * unchanged, nothing leaks, and everything works once calls succeed again.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/store.h"
#include "tests/lib/fault.h"
#include "tests/lib/instance.h"

#define BT 4u
#define BLOCK_BYTES 4096u
#define POOL_BLOCKS 64u

static const struct kvd_shape geometry = {.layers = 1,
                                          .kv_heads = 1,
                                          .head_dim = 128,
                                          .block_tokens = BT,
                                          .dtype = KVD_dtype_f32,
                                          .vocab = 100000};

/* ---- steps: each may be refused -------------------------------------------------------------- */

static struct space *make_space(struct domain *domain, const char *name, uint32_t kind) {
        struct space_spec spec = {.geometry = geometry, .options.kind = kind};
        struct space *space;
        bool created;

        snprintf(spec.name, sizeof spec.name, "%s", name);
        return space_open(domain, &spec, true, &space, &created) < 0 ? NULL : space;
}

static struct attachment *attach(struct space *space) {
        struct attachment *a;

        return space && attachment_new(space, NULL, 1, NULL, &a) == 0 ? a : NULL;
}

/* Seals a chain of up to n blocks of its own. Returns how many blocks it got. */
static uint32_t seal_chain(struct attachment *a, uint32_t n, uint32_t first_token) {
        kvd_ref own[POOL_BLOCKS], now[POOL_BLOCKS];
        uint32_t tokens[POOL_BLOCKS * BT], got = 0;
        struct seal_request q = {.blocks = own, .tokens = tokens};
        int r = 0;

        while (a && got < n && (r = space_allocate(a, n - got, own + got)) > 0)
                got += (uint32_t)r;
        if (got == 0)
                return 0;
        for (uint32_t i = 0; i < got * BT; i++)
                tokens[i] = first_token + i;
        q.n_blocks = got;
        q.n_tokens = got * BT;
        if (attachment_space(a) && space_seal(a, &q, now) < 0)
                exit(2);
        space_session(a, &(struct session_request){.name = "s",
                                                   .keep = KVD_keep_high,
                                                   .ttl_s = 60,
                                                   .n_blocks = 1,
                                                   .blocks = &now[got - 1]});
        return got;
}

static void check_spaces(const struct fault_state *s, struct store *store) {
        struct check_report report = {0};
        struct space *space;
        uint64_t cursor = 0;

        for (space = store_next_space(store, 0); space;
             space = store_next_space(store, space_number(space) + 1))
                do {
                        space_check(space, &cursor, &report);
                        if (report.broken)
                                die("%s", report.first);
                } while (cursor);
}

/* ---- the session ----------------------------------------------------------------------------- */

static void idle(struct store *store) {
        for (int i = 0; i < 100 && store_idle(store); i++)
                ;
}

static void work(const struct fault_state *s, struct store *store, struct domain *domain) {
        struct space *one = make_space(domain, "one", KVD_kind_causal), *two;
        struct attachment *a = attach(one), *b = attach(one), *c;
        kvd_ref ref;
        bool more;

        seal_chain(a, POOL_BLOCKS, 1);
        idle(store);
        check_spaces(s, store);
        if (b && space_allocate(b, 1, &ref) == 1)
                attachment_orphan(b);
        two = make_space(domain, "two", KVD_kind_causal); /* takes segments from the first */
        c = attach(two);
        seal_chain(c, POOL_BLOCKS / 3, 50000);
        check_spaces(s, store);
        attachment_free(b, true);
        if (one)
                space_evict(one, 3, KVD_ROOT, &more);
        if (one)
                space_set(one, "max_blocks", "16");
        idle(store);
        check_spaces(s, store);
        attachment_free(a, false);
        attachment_free(c, false);
        if (two && space_delete(two, false) < 0)
                die("a space that nobody uses cannot be deleted");
}

/* Once calls succeed again, there is as much room as if none had failed. */
static void expect_full_service(const struct fault_state *s, struct store *store,
                                struct domain *domain) {
        struct space *fresh;
        struct attachment *a;

        while (store_next_space(store, 0))
                space_delete(store_next_space(store, 0), true);
        /* deleted spaces are freed in idle work */
        while (store_idle(store))
                ;
        if (store_pool_used(store))
                die("bytes of the pool are left over");
        fresh = make_space(domain, "fresh", KVD_kind_causal);
        a = attach(fresh);
        if (!a || seal_chain(a, POOL_BLOCKS / 2, 7) < POOL_BLOCKS / 2)
                die("a fresh space does not work");
        check_spaces(s, store);
}

static void run(struct fault_state *s, void *arg) {
        const bool *arena = arg;
        struct store_config config = {.pool_bytes = POOL_BLOCKS * BLOCK_BYTES,
                                      .segment_bytes = 4 * BLOCK_BYTES,
                                      .pages = STORE_PAGES_SMALL,
                                      .max_attachments = 8};
        struct domain_config domain_config = {.name = "d", .arena = *arena};
        struct store *store;
        struct domain *domain;
        uint32_t fds = fds_of(0);

        s->on = true;
        if (store_new(&config, &store) == 0 && store_domain(store, &domain_config, &domain) == 0) {
                work(s, store, domain);
                s->on = false;
                expect_full_service(s, store, domain);
        }
        s->on = false;
        store_free(store);
        if (fds_of(0) != fds)
                die("descriptors are left over");
}

int main(void) {
        struct fault_state *s = fault_state_new();
        bool arena = false;

        fault_install(s);
        fault_sweep(s, "store", 1, run, &arena);
        arena = true;
        fault_sweep(s, "store, isolation = arena", 1, run, &arena);
        return 0;
}
