/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The store by itself: chains, duplicates, eviction order, quotas, death, leases, and a random walk
 * with checks.
 */

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "store/account.h"
#include "store/cache/cache.h"
#include "store/store.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

static const struct kvd_shape geometry = {.layers = 2,
                                          .kv_heads = 1,
                                          .head_dim = 8,
                                          .block_tokens = BT,
                                          .dtype = KVD_dtype_f32,
                                          .vocab = 1000};
static const uint64_t block_bytes = 2 * 2 * 1 * 8 * BT * 4;

static void open_store(uint64_t blocks, const struct domain_config *config) {
        struct store_config c = {.pool_bytes = blocks * block_bytes,
                                 .segment_bytes = 16 * block_bytes,
                                 .pages = STORE_PAGES_SMALL,
                                 .max_attachments = 8};

        ck_assert_int_eq(store_new(&c, &store), 0);
        ck_assert_int_eq(store_domain(store, config, &domain), 0);
}

static void setup(void) {
        open_store(64, &(struct domain_config){.name = "d"});
}

static void teardown(void) {
        ck_assert_uint_eq(store ? store_pool_used(store) % block_bytes : 0, 0);
        store = store_free(store);
}

static struct space *make_space_with(const char *name, struct space_options options) {
        struct space_spec spec = {.geometry = geometry, .options = options};
        struct space *space;
        bool created;

        snprintf(spec.name, sizeof spec.name, "%s", name);
        ck_assert_int_eq(space_open(domain, &spec, true, &space, &created), 0);
        return space;
}

static struct space *make_space(const char *name) {
        return make_space_with(name, (struct space_options){0});
}

/*
 * Seals n blocks behind parent, in a chain of that salt. Their first tokens count up from `token`, and
 * the others are `token`: with 8-bit keys a chain of equal blocks runs into a cycle of keys, and the
 * buckets of a short cycle do not hold them all.
 */
static int seal_salted(struct attachment *a, uint64_t salt, kvd_ref parent, uint32_t n,
                       uint32_t token, kvd_ref *ret) {
        uint32_t tokens[64 * BT];
        kvd_ref own[64];
        struct seal_request q = {.parent = parent,
                                 .n_blocks = n,
                                 .blocks = own,
                                 .n_tokens = n * BT,
                                 .tokens = tokens,
                                 .root = salt};
        uint32_t got = 0;
        int r;

        for (uint32_t i = 0; i < n * BT; i++)
                tokens[i] = i % BT ? token : (token + i / BT) % geometry.vocab;
        while (got < n) {
                r = space_allocate(a, n - got, own + got);
                if (r < 0) {
                        space_release(a, own, got);
                        return r;
                }
                got += (uint32_t)r;
        }
        r = space_seal(a, &q, ret);
        for (uint32_t i = 0; i < n; i++)
                if (r < 0 || ret[i] != own[i])
                        space_release(a, &own[i], 1);
        return r;
}

static int seal_run(struct attachment *a, kvd_ref parent, uint32_t n, uint32_t token,
                    kvd_ref *ret) {
        return seal_salted(a, 0, parent, n, token, ret);
}

/* ---- chains ---------------------------------------------------------------------------------- */

/* With 8-bit keys, both buckets of a block may be full. It is then not found again. */
static bool all_are_indexed(struct space *space) {
        bool all = counter(space, KVD_SPACE_UNINDEXED) == 0;

        ck_assert(all || KVD_HASH_BITS == 8);
        return all;
}

START_TEST(chain_is_sealed_and_found_again) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space), *b = fixture_attach(space);
        kvd_ref first[40], second[40];

        ck_assert_int_eq(seal_run(a, KVD_ROOT, 20, 7, first), 0);
        ck_assert_uint_eq(usage_of(space).sealed, 20);
        ck_assert_uint_eq(usage_of(space).leaves, 1);
        ck_assert_uint_eq(usage_of(space).runs, 1);
        if (!all_are_indexed(space))
                return;
        ck_assert_int_eq(seal_run(b, KVD_ROOT, 20, 7, second), 0);
        ck_assert_mem_eq(first, second, 20 * sizeof *first);
        ck_assert_uint_eq(usage_of(space).sealed, 20);
        ck_assert_int_eq(seal_run(b, first[9], 5, 8, second), 0);
        ck_assert_uint_eq(usage_of(space).leaves, 2);
        check_clean(space);
}
END_TEST

/*
 * The same tokens under several salts: each salt has blocks of its own and finds them again, and no
 * chain continues in that of another salt.
 */
START_TEST(chains_of_different_salts_never_share) {
        static const uint64_t salts[] = {0, 1, 2, 1ull << 32, UINT64_MAX};
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space);
        kvd_ref chain[5][12], again[12];

        for (uint32_t i = 0; i < 5; i++)
                ck_assert_int_eq(seal_salted(a, salts[i], KVD_ROOT, 12, 7, chain[i]), 0);
        ck_assert_uint_eq(usage_of(space).sealed, 60);
        for (uint32_t i = 0; i < 5 && all_are_indexed(space); i++) {
                ck_assert_int_eq(seal_salted(a, salts[i], KVD_ROOT, 4, 7, again), 0);
                ck_assert_mem_eq(again, chain[i], 4 * sizeof *again);
                ck_assert_int_eq(seal_salted(a, salts[(i + 1) % 5], chain[i][11], 1, 8, again),
                                 -EINVAL);
        }
        ck_assert_uint_eq(usage_of(space).sealed, 60);
        check_clean(space);
}
END_TEST

START_TEST(partial_tail_ends_a_chain) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space);
        uint32_t tokens[BT] = {1, 2};
        kvd_ref own, sealed, more[1];
        struct seal_request q = {.n_blocks = 1, .blocks = &own, .n_tokens = 2, .tokens = tokens};

        ck_assert_int_eq(space_allocate(a, 1, &own), 1);
        ck_assert_int_eq(space_seal(a, &q, &sealed), 0);
        ck_assert_int_eq(seal_run(a, sealed, 1, 3, more), -EINVAL);
        check_clean(space);
}
END_TEST

START_TEST(a_whole_prefix_has_a_length) {
        struct space *space =
                make_space_with("s", (struct space_options){.kind = KVD_kind_bidirectional});
        struct attachment *a = fixture_attach(space);
        kvd_ref ret[2];

        ck_assert_int_eq(seal_salted(a, 0, KVD_ROOT, 2, 1, ret), -EINVAL);
        ck_assert_int_eq(seal_salted(a, (1ull << 32) + 2 * BT, KVD_ROOT, 2, 1, ret), -EINVAL);
        ck_assert_int_eq(seal_salted(a, BT, KVD_ROOT, 2, 1, ret), -EINVAL);
        ck_assert_uint_eq(usage_of(space).sealed, 0);
        ck_assert_int_eq(seal_salted(a, 2 * BT, KVD_ROOT, 2, 1, ret), 0);
        check_clean(space);
}
END_TEST

/* A post has no key of the whole prefix, by which a bidirectional prefix is found. */
START_TEST(whole_prefixes_are_not_posted) {
        struct space *space =
                make_space_with("s", (struct space_options){.kind = KVD_kind_bidirectional});
        struct attachment *a = fixture_attach(space);
        const struct kvd_index *ix = space_index(space);
        uint64_t bytes = attachment_pin_bytes(a);
        struct kvd_pinpage *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                                        attachment_pin_fd(a), 0);
        struct kvd_post *post;
        kvd_ref block;

        ck_assert_ptr_ne(page, MAP_FAILED);
        ck_assert_int_eq(space_allocate(a, 1, &block), 1);
        post = (struct kvd_post *)(void *)((uint8_t *)page + kvd_posts_off(ix->capacity));
        *post = (struct kvd_post){.block = block, .parent = KVD_ROOT, .root = BT};
        memset(post->tokens, 0, BT * sizeof *post->tokens);
        atomic_store(&page->posted, 1);
        attachment_take_posts(a);
        ck_assert_uint_eq(atomic_load(&page->posts_taken), 1);
        ck_assert_uint_eq(atomic_load(&page->posts_refused), 1);
        ck_assert_uint_eq(atomic_load(&page->posts_errno), EINVAL);
        ck_assert_uint_eq(usage_of(space).sealed, 0);
        ck_assert_uint_eq(space_release(a, &block, 1), 1);
        check_clean(space);
        munmap(page, bytes);
}
END_TEST

/* ---- posts ----------------------------------------------------------------------------------- */

/* Posts a chain of one block in the ring's next place. */
static void post(struct attachment *a, kvd_ref block, uint32_t token) {
        const struct kvd_index *ix = space_index(attachment_space(a));
        uint64_t number = atomic_load(&a->page->posted);
        struct kvd_post *at = (void *)((uint8_t *)a->page + kvd_posts_off(ix->capacity) +
                                       number % KVD_POSTS * kvd_post_stride(BT));

        *at = (struct kvd_post){.block = block, .parent = KVD_ROOT};
        for (uint32_t i = 0; i < BT; i++)
                at->tokens[i] = token;
        atomic_store(&a->page->posted, number + 1);
}

static uint32_t fill(struct attachment *a, uint32_t n, kvd_ref *ret) {
        uint32_t got = 0;
        int r;

        while (got < n && (r = space_allocate(a, n - got, ret + got)) > 0)
                got += (uint32_t)r;
        return got;
}

START_TEST(posts_beyond_the_filling_blocks_are_refused) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space);
        uint64_t lie = UINT64_C(1) << 40;
        kvd_ref own[3];

        ck_assert_uint_eq(fill(a, 3, own), 3);
        post(a, own[0], 1);
        ck_assert_uint_eq(attachment_posts(a), 1);
        atomic_store(&a->page->posted, lie);
        ck_assert_uint_eq(attachment_posts(a), 3);
        ck_assert(attachment_take_posts(a));
        ck_assert_uint_eq(usage_of(space).sealed, 1);
        ck_assert_uint_eq(atomic_load(&a->page->posts_taken), lie);
        ck_assert_uint_eq(atomic_load(&a->page->posts_refused), lie - 1);
        ck_assert_uint_eq(attachment_posts(a), 0);
        ck_assert(!attachment_take_posts(a));
        atomic_store(&a->page->posted, 7); /* the counter goes back */
        ck_assert_uint_eq(space_release(a, own, 3), 2);
        ck_assert_uint_eq(attachment_posts(a), 0);
        ck_assert(!attachment_was_kicked(a));
        ck_assert_uint_eq(atomic_load(&a->page->posts_taken), 7);
        check_clean(space);
}
END_TEST

#define A_PIECE 16u /* maximum number of posts per piece */

START_TEST(posts_of_the_dead_are_taken_in_pieces) {
        struct space *spaces[2];
        kvd_ref own[24];
        uint64_t sealed = 0;

        for (uint32_t i = 0; i < 2; i++) {
                struct attachment *a = fixture_attach_as(spaces[i] = make_space(i ? "t" : "s"), 1);

                ck_assert_uint_eq(fill(a, 24, own), 24);
                for (uint32_t k = 0; k < 20; k++)
                        post(a, own[k], k);
                if (_i)
                        attachment_orphan(a);
                else
                        attachment_free(a, true);
                ck_assert_uint_eq(usage_of(spaces[i]).sealed, 0);
        }
        for (bool more = true; more;) {
                uint64_t before = sealed;

                more = store_idle(store);
                sealed = usage_of(spaces[0]).sealed + usage_of(spaces[1]).sealed;
                ck_assert_uint_le(sealed - before, A_PIECE);
        }
        ck_assert_uint_eq(sealed, 40);
        for (uint32_t i = 0; i < 2; i++) {
                ck_assert_uint_eq(usage_of(spaces[i]).limbo, _i ? 4 : 0);
                ck_assert_uint_eq(usage_of(spaces[i]).filling, 0);
                check_clean(spaces[i]);
        }
}
END_TEST

/* The posts take the whole space, and another client allocates before there was idle time. */
START_TEST(posts_of_the_dead_are_taken_before_an_allocation_fails) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach_as(space, 1), *b = fixture_attach_as(space, 2);
        kvd_ref own[32], others[32];
        int r;

        domain->config.client_quota = UINT64_MAX;
        ck_assert_uint_eq(fill(a, 32, own), 32);
        ck_assert_uint_eq(fill(b, 32, others), 32);
        for (uint32_t k = 0; k < 32; k++)
                post(a, own[k], k);
        attachment_free(a, true);
        while ((r = space_allocate(b, 1, own)) == 0)
                ;
        ck_assert_int_eq(r, 1);
        check_clean(space);
}
END_TEST

START_TEST(nonsense_is_refused_and_changes_nothing) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space), *b = fixture_attach(space);
        uint32_t tokens[2 * BT] = {0};
        kvd_ref own[2], ret[2], foreign;
        struct seal_request q = {.n_blocks = 2,
                                 .blocks = own,
                                 .n_tokens = 2 * BT,
                                 .tokens = tokens};

        ck_assert_int_eq(space_allocate(a, 2, own), 2);
        ck_assert_int_eq(space_allocate(b, 1, &foreign), 1);
        q.n_tokens = BT;
        ck_assert_int_eq(space_seal(a, &q, ret), -EINVAL);
        q.n_tokens = 2 * BT + 1;
        ck_assert_int_eq(space_seal(a, &q, ret), -EINVAL);
        q.n_tokens = 2 * BT;
        tokens[3] = 1000;
        ck_assert_int_eq(space_seal(a, &q, ret), -EINVAL);
        tokens[3] = 0;
        q.group = 1;
        ck_assert_int_eq(space_seal(a, &q, ret), -EINVAL);
        q.group = 0;
        q.parent = own[0];
        ck_assert_int_eq(space_seal(a, &q, ret), -ESTALE);
        q.parent = UINT64_MAX;
        ck_assert_int_eq(space_seal(a, &q, ret), -ESTALE);
        q.parent = KVD_ROOT;
        q.blocks = (kvd_ref[]){own[0], own[0]};
        ck_assert_int_eq(space_seal(a, &q, ret), -ESTALE);
        q.blocks = (kvd_ref[]){own[0], foreign};
        ck_assert_int_eq(space_seal(a, &q, ret), -ESTALE);
        q.blocks = (kvd_ref[]){own[0], own[1] + (UINT64_C(1) << 32)};
        ck_assert_int_eq(space_seal(a, &q, ret), -ESTALE);
        ck_assert_uint_eq(usage_of(space).sealed, 0);
        ck_assert_uint_eq(usage_of(space).filling, 3);
        ck_assert_uint_eq(space_release(b, own, 2), 0);
        ck_assert_uint_eq(space_release(a, own, 2), 2);
        ck_assert_uint_eq(space_release(a, own, 2), 0);
        check_clean(space);
}
END_TEST

/* ---- eviction -------------------------------------------------------------------------------- */

static void touch_now(struct attachment *a, uint32_t id) {
        a->words[id].touch = ((struct kvd_index *)space_index(attachment_space(a)))->clock;
}

static bool is_sealed(struct space *space, kvd_ref ref) {
        uint64_t slot = shm_load(&kvd_index_desc(space_index(space), kvd_ref_id(ref))->slot);

        return slot == kvd_slot_make(KVD_SEALED, kvd_ref_generation(ref));
}

START_TEST(full_pool_evicts_coldest_leaf_first) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space);
        kvd_ref cold[16], warm[16], more[32], last[8];

        ck_assert_int_eq(seal_run(a, KVD_ROOT, 16, 1, cold), 0);
        ck_assert_int_eq(seal_run(a, KVD_ROOT, 16, 2, warm), 0);
        ck_assert_int_eq(seal_run(a, KVD_ROOT, 32, 3, more), 0);
        touch_now(a, kvd_ref_id(cold[15])); /* used last, though sealed first */
        ck_assert_int_eq(seal_run(a, KVD_ROOT, 8, 4, last), 0);
        ck_assert(is_sealed(space, cold[15]) && is_sealed(space, cold[0]));
        ck_assert(!is_sealed(space, warm[15]) && is_sealed(space, warm[0]));
        ck_assert_uint_eq(space_index(space)->counters[KVD_SPACE_EVICTED], 8);
        check_clean(space);
}
END_TEST

/*
 * A replay of real requests found that some uses had no order: the clock stood still between two
 * allocations, and a magazine makes one allocation last for several requests.
 */
START_TEST(uses_between_two_allocations_have_an_order) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space);
        uint32_t tokens[3][BT] = {{1}, {2}, {3}};
        kvd_ref blocks[3];
        bool more;

        ck_assert_int_eq(space_allocate(a, 3, blocks), 3);
        for (uint32_t i = 0; i < 3; i++) {
                struct seal_request q = {.n_blocks = 1,
                                         .blocks = &blocks[i],
                                         .n_tokens = BT,
                                         .tokens = tokens[i]};

                ck_assert_int_eq(space_seal(a, &q, &blocks[i]), 0);
                if (i == 2)
                        touch_now(a, kvd_ref_id(blocks[0]));
        }
        ck_assert_int_eq(space_evict(space, 1, KVD_ROOT, &more), 1);
        ck_assert(is_sealed(space, blocks[0]) && !is_sealed(space, blocks[1]));
        ck_assert(is_sealed(space, blocks[2]));
        check_clean(space);
}
END_TEST

START_TEST(fifo_ignores_use) {
        struct space *space = make_space_with("s",
                                              (struct space_options){.policy = KVD_policy_fifo});
        struct attachment *a = fixture_attach(space);
        kvd_ref first[16], second[48], last[8];

        ck_assert_int_eq(seal_run(a, KVD_ROOT, 16, 1, first), 0);
        ck_assert_int_eq(seal_run(a, KVD_ROOT, 24, 2, second), 0);
        ck_assert_int_eq(seal_run(a, second[23], 24, 2, second + 24), 0);
        touch_now(a, kvd_ref_id(first[15]));
        ck_assert_int_eq(seal_run(a, KVD_ROOT, 8, 3, last), 0);
        ck_assert(!is_sealed(space, first[15]) && is_sealed(space, second[47]));
        check_clean(space);
}
END_TEST

START_TEST(pinned_leaf_keeps_its_whole_chain) {
        struct space *space =
                make_space_with("s", (struct space_options){.policy = _i ? KVD_policy_fifo :
                                                                           KVD_policy_lru});
        struct attachment *a = fixture_attach(space), *reader = fixture_attach(space);
        kvd_ref chain[20], other[44], more[60];
        shm_u32 *pin;

        ck_assert_int_eq(seal_run(a, KVD_ROOT, 20, 1, chain), 0);
        ck_assert_int_eq(seal_run(a, KVD_ROOT, 30, 2, other), 0);
        pin = &reader->words[kvd_ref_id(chain[19])].pins;
        *pin = 1;
        for (uint32_t i = 3; i < 40; i++)
                ck_assert_int_eq(seal_run(a, KVD_ROOT, 10, i, more), 0);
        for (uint32_t i = 0; i < 20; i++)
                ck_assert(is_sealed(space, chain[i]));
        ck_assert_uint_gt(space_index(space)->counters[KVD_SPACE_EVICTIONS_PINNED], 0);
        check_clean(space);
        *pin = 0;
        ck_assert_int_eq(seal_run(a, KVD_ROOT, 30, 50, more), 0);
        ck_assert_int_eq(seal_run(a, KVD_ROOT, 30, 51, more), 0);
        ck_assert(!is_sealed(space, chain[19]));
        check_clean(space);
}
END_TEST

START_TEST(full_of_pins_is_refused_not_stalled) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space);
        kvd_ref chain[64], one;

        for (uint32_t i = 0; i < 64; i++) {
                ck_assert_int_eq(seal_run(a, KVD_ROOT, 1, i, &chain[i]), 0);
                a->words[kvd_ref_id(chain[i])].pins = 1;
        }
        ck_assert_int_eq(space_allocate(a, 1, &one), -ENOBUFS);
        a->words[kvd_ref_id(chain[40])].pins = 0;
        ck_assert_int_eq(space_allocate(a, 1, &one), 1);
        ck_assert_uint_eq(kvd_ref_id(one), kvd_ref_id(chain[40]));
        ck_assert_uint_ne(one, chain[40]); /* another generation */
        check_clean(space);
}
END_TEST

START_TEST(evict_on_request) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space);
        kvd_ref trunk[20], branch[5];
        bool more;

        ck_assert_int_eq(seal_run(a, KVD_ROOT, 20, 1, trunk), 0);
        ck_assert_int_eq(seal_run(a, trunk[9], 5, 2, branch), 0);
        ck_assert_int_eq(space_evict(space, 0, trunk[15], &more), 5);
        ck_assert_int_eq(space_evict(space, 0, trunk[15], &more), -ENOENT);
        ck_assert_int_eq(space_evict(space, 3, KVD_ROOT, &more), 3);
        ck_assert_int_eq(space_evict(space, 0, trunk[0], &more), 17);
        ck_assert_uint_eq(usage_of(space).sealed, 0);
        ck_assert_uint_eq(usage_of(space).runs, 0);
        check_clean(space);
}
END_TEST

START_TEST(chain_eviction_leaves_only_what_is_used) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space);
        kvd_ref trunk[4], used[3], unused[5];
        bool more;

        ck_assert_int_eq(seal_run(a, KVD_ROOT, 4, 1, trunk), 0);
        ck_assert_int_eq(seal_run(a, trunk[3], 5, 2, unused), 0);
        ck_assert_int_eq(seal_run(a, trunk[3], 3, 3, used), 0);
        a->words[kvd_ref_id(used[1])].pins = 1;
        ck_assert_int_eq(space_evict(space, 0, trunk[0], &more), 6);
        ck_assert(!more && is_sealed(space, used[1]) && is_sealed(space, trunk[0]));
        ck_assert(!is_sealed(space, used[2]) && !is_sealed(space, unused[0]));
        check_clean(space);
}
END_TEST

/* ---- quota, several spaces, death ------------------------------------------------------------ */

START_TEST(client_quota_bounds_filling) {
        struct domain_config config = {.name = "q", .client_quota = 8 * block_bytes};
        struct space *space;
        struct attachment *a, *b;
        kvd_ref refs[32];

        ck_assert_int_eq(store_domain(store, &config, &domain), 0);
        space = make_space("s");
        a = fixture_attach(space);
        b = fixture_attach(space);
        ck_assert_int_eq(space_allocate(a, 32, refs), 8);
        ck_assert_int_eq(space_allocate(a, 1, refs + 8), -EDQUOT);
        ck_assert_int_eq(space_allocate(b, 4, refs + 8), 4); /* another process */
        ck_assert_uint_eq(space_release(a, refs, 1), 1);
        ck_assert_int_eq(space_allocate(a, 2, refs), 1);
        check_clean(space);
}
END_TEST

START_TEST(domain_quota_bounds_the_space) {
        struct domain_config config = {.name = "q", .quota = 20 * block_bytes};
        struct space *space;
        struct attachment *a;
        kvd_ref refs[64];

        ck_assert_int_eq(store_domain(store, &config, &domain), 0);
        space = make_space("s");
        a = fixture_attach(space);
        for (uint32_t i = 0; i < 10; i++)
                ck_assert_int_eq(seal_run(a, KVD_ROOT, 5, i, refs), 0);
        ck_assert_uint_le(usage_of(space).total, 20);
        check_clean(space);
}
END_TEST

START_TEST(second_space_takes_memory_from_the_first) {
        struct space *one = make_space("one"), *two = make_space("two");
        struct attachment *a = fixture_attach(one), *b = fixture_attach(two);
        kvd_ref refs[64];

        for (uint32_t i = 0; i < 10; i++)
                ck_assert_int_eq(seal_run(a, KVD_ROOT, 10, i, refs), 0);
        for (uint32_t i = 0; i < 10; i++)
                ck_assert_int_eq(seal_run(b, KVD_ROOT, 10, i, refs), 0);
        ck_assert_uint_ge(usage_of(two).total, 24);
        ck_assert_uint_le(store_pool_used(store), store_pool_bytes(store));
        check_clean(one);
        check_clean(two);
}
END_TEST

/* The next existing space from a number on is found, even where many were deleted. */
START_TEST(spaces_are_found_from_any_number) {
        struct space *spaces[40], *s;
        char name[8];

        for (uint32_t i = 0; i < 40; i++) {
                snprintf(name, sizeof name, "s%u", i);
                spaces[i] = fixture_space(name, 4);
                ck_assert_uint_eq(space_number(spaces[i]), i);
                ck_assert_uint_eq(space_place(spaces[i]), i);
        }
        for (uint32_t i = 0; i < 40; i++)
                if (i % 3 == 1 || i > 36)
                        ck_assert_int_eq(space_delete(spaces[i], true), 0);
        for (uint32_t from = 0; from < 42; from++) {
                uint32_t next = from + (from % 3 == 1);

                s = next > 36 ? NULL : spaces[next];
                ck_assert_ptr_eq(store_next_space(store, from), s);
                ck_assert_ptr_eq(domain_next_space(domain, from), s);
        }
        ck_assert_uint_eq(store_spaces(store), domain_spaces(domain));
}
END_TEST

/* Bytes that the kernel holds for the segments of a space. */
static uint64_t resident(struct attachment *a) {
        uint64_t bytes = 0;
        bool writable;
        struct stat st;

        for (uint32_t i = 0; i < space_index(attachment_space(a))->n_segments; i++) {
                ck_assert_int_eq(fstat(space_segment_fd(a, i, 0, &writable), &st), 0);
                bytes += (uint64_t)st.st_blocks * 512;
        }
        return bytes;
}

START_TEST(memory_that_is_given_back_is_freed) {
        struct space *one, *two;
        struct attachment *a, *b;
        kvd_ref refs[64];

        store = store_free(store);
        open_store(1 << 16, &(struct domain_config){.name = "d"});
        one = make_space("one");
        two = make_space("two");
        a = fixture_attach(one);
        b = fixture_attach(two);
        for (uint32_t i = 0; i < 1 << 10; i++)
                ck_assert_int_eq(seal_run(a, KVD_ROOT, 64, i % 1000, refs), 0);
        for (uint32_t i = 0; i < 1 << 10; i++)
                ck_assert_int_eq(seal_run(b, KVD_ROOT, 64, i % 1000, refs), 0);
        while (store_idle(store))
                ;
        ck_assert_uint_gt(space_index(one)->counters[KVD_SPACE_SEGMENTS_RETURNED], 0);
        ck_assert_uint_le(resident(a) + resident(b), store_pool_bytes(store) + (UINT64_C(1) << 20));
        ck_assert_uint_le(resident(a),
                          ALIGN_UP(usage_of(one).total * block_bytes, 1 << 20) + (1 << 20));
        check_clean(one);
        check_clean(two);
        ck_assert_int_eq(space_delete(one, true), 0);
        ck_assert_int_eq(space_delete(two, true), 0);
        while (store_idle(store))
                ;
        ck_assert_uint_eq(store_pool_used(store), 0);
}
END_TEST

START_TEST(death_discards_what_was_being_filled) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space), *b = fixture_attach(space);
        kvd_ref refs[16], chain[8], more[8];
        int n;

        ck_assert_int_eq(seal_run(a, KVD_ROOT, 8, 1, chain), 0);
        a->words[kvd_ref_id(chain[7])].pins = 1;
        n = space_allocate(a, 16, refs);
        ck_assert_int_gt(n, 0);
        attachment_orphan(a);
        ck_assert_uint_gt(usage_of(space).limbo, 0);
        ck_assert_uint_eq(space_release(a, refs, 16), 0);
        check_clean(space);
        for (uint32_t i = 2; i < 20; i++)
                seal_run(b, KVD_ROOT, 8, i, more);
        ck_assert(is_sealed(space, chain[7])); /* its process may still read it */
        attachment_free(a, true);
        ck_assert_uint_eq(usage_of(space).limbo, 0);
        ck_assert_uint_eq(counter(space, KVD_SPACE_DISCARDED), (uint64_t)n);
        for (uint32_t i = 20; i < 40; i++)
                ck_assert_int_eq(seal_run(b, KVD_ROOT, 8, i, more), 0);
        ck_assert(!is_sealed(space, chain[7]));
        while (store_idle(store))
                ;
        check_clean(space);
}
END_TEST

START_TEST(what_a_dead_client_used_stays_warm) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space), *b = fixture_attach(space);
        kvd_ref used[16], unused[16], more[32], last[8];

        ck_assert_int_eq(seal_run(b, KVD_ROOT, 16, 1, used), 0);
        ck_assert_int_eq(seal_run(b, KVD_ROOT, 16, 2, unused), 0);
        ck_assert_int_eq(seal_run(b, KVD_ROOT, 32, 3, more), 0);
        touch_now(a, kvd_ref_id(used[15]));
        attachment_free(a, true);
        while (store_idle(store))
                ;
        ck_assert_int_eq(seal_run(b, KVD_ROOT, 8, 4, last), 0);
        ck_assert(is_sealed(space, used[15]));
        ck_assert(!is_sealed(space, unused[15]));
        check_clean(space);
}
END_TEST

START_TEST(arena_hands_out_own_segments_only) {
        struct domain_config config = {.name = "arena", .arena = true};
        struct attachment *a, *b;
        struct space *space;
        kvd_ref refs[16];
        bool writable;

        ck_assert_int_eq(store_domain(store, &config, &domain), 0);
        space = make_space("s");
        a = fixture_attach(space);
        b = fixture_attach(space);
        ck_assert_int_gt(space_allocate(a, 4, refs), 0);
        ck_assert_int_gt(space_allocate(b, 4, refs + 4), 0);
        ck_assert_int_ge(space_segment_fd(a, 0, 0, &writable), 0);
        ck_assert(writable);
        ck_assert_int_ge(space_segment_fd(a, 1, 0, &writable), 0);
        ck_assert(!writable);
        ck_assert_int_ge(space_segment_fd(b, 1, 0, &writable), 0);
        ck_assert(writable);
        attachment_free(a, true);
        for (uint32_t i = 0; i < 20; i++)
                ck_assert_int_eq(seal_run(b, KVD_ROOT, 8, i, refs), 0);
        check_clean(space);
}
END_TEST

static uint64_t overhead(void) {
        return domain_used(domain, KVD_COST_overhead);
}

START_TEST(an_arena_without_memory_serves_the_next_client) {
        struct domain_config config = {.name = "arena", .arena = true};
        uint64_t after_one = 0;
        struct space *space;

        ck_assert_int_eq(store_domain(store, &config, &domain), 0);
        space = make_space("s");
        for (uint32_t i = 0; i < 20; i++) {
                attachment_free(fixture_attach(space), true);
                idle();
                after_one = after_one ?: overhead();
                ck_assert_uint_eq(overhead(), after_one);
        }
}
END_TEST

/* Attaches clients until there is no room. Each client that is accepted has an arena. */
static void attach_all(uint64_t overhead_bytes) {
        struct domain_config config = {.name = "arena", .arena = true};
        struct store_config c = {.pool_bytes = 64 * block_bytes,
                                 .segment_bytes = block_bytes,
                                 .pages = STORE_PAGES_SMALL,
                                 .overhead_bytes = overhead_bytes,
                                 .max_attachments = 200};
        struct attachment *a;
        uint32_t n = 0;

        ck_assert_int_eq(store_new(&c, &store), 0);
        ck_assert_int_eq(store_domain(store, &config, &domain), 0);
        for (struct space *s = make_space("s"); attachment_new(s, NULL, n, NULL, &a) == 0; n++)
                ck_assert_ptr_nonnull(a->arena);
        ck_assert_uint_gt(n, 2);
        ck_assert_uint_lt(n, c.max_attachments);
        store = store_free(store);
}

START_TEST(a_client_that_gets_no_arena_is_refused) {
        struct domain_config config = {.name = "arena", .arena = true};
        uint64_t with_none, with_one, one;
        struct space *space;

        ck_assert_int_eq(store_domain(store, &config, &domain), 0);
        space = make_space("s");
        with_none = overhead();
        fixture_attach(space);
        with_one = overhead();
        one = with_one - with_none;
        store = store_free(store);
        for (uint32_t i = 0; i < 64; i++)
                attach_all(4 * with_one + i * one / 64);
}
END_TEST

/* ---- descriptors and memory ------------------------------------------------------------------ */

static uint32_t descriptors(void) {
        DIR *folder = opendir("/proc/self/fd");
        uint32_t n = 0;

        ck_assert_ptr_nonnull(folder);
        while (readdir(folder))
                n++;
        closedir(folder);
        return n;
}

START_TEST(a_store_leaves_no_descriptor) {
        const struct store_config c = {.pool_bytes = 64 * block_bytes, .max_attachments = 8};
        uint32_t fds;

        store = store_free(store);
        fds = descriptors();
        ck_assert_int_eq(store_new(&c, &store), 0);
        ck_assert_int_eq(store_domain(store, &(struct domain_config){.name = "d"}, &domain), 0);
        fixture_attach(make_space("s"));
        ck_assert_uint_gt(descriptors(), fds);
        store = store_free(store);
        ck_assert_uint_eq(descriptors(), fds);
}
END_TEST

/* A check of an index for a million blocks, few of which were ever used, touches little of it. */
START_TEST(a_check_puts_no_memory_behind_what_was_never_written) {
        struct space *space;
        kvd_ref refs[8];
        struct stat st;

        store = store_free(store);
        open_store(1 << 20, &(struct domain_config){.name = "d"});
        space = make_space("s");
        ck_assert_int_eq(seal_run(fixture_attach(space), KVD_ROOT, 8, 7, refs), 0);
        check_clean(space);
        ck_assert_int_eq(fstat(space->index.fd, &st), 0);
        ck_assert_uint_lt((uint64_t)st.st_blocks * 512, space->index.bytes / 32);
}
END_TEST

/* ---- figures --------------------------------------------------------------------------------- */

START_TEST(chains_and_clients_are_told_of) {
        struct space *space = make_space("s");
        struct attachment *a = fixture_attach(space), *b = fixture_attach(space);
        uint32_t cursor = 0, above = 0;
        struct chain_info chain;
        kvd_ref refs[5];

        ck_assert_int_eq(seal_run(a, KVD_ROOT, 5, 7, refs), 0);
        atomic_fetch_add(&a->words[kvd_ref_id(refs[4])].pins, 2);
        atomic_fetch_add(&b->words[kvd_ref_id(refs[4])].pins, 1);
        do
                ck_assert_int_eq(space_next_chain(space, &cursor, &above, &chain), 0);
        while (!chain.leaf);
        ck_assert_uint_eq(chain.leaf, refs[4]);
        ck_assert_uint_eq(chain.blocks, 5);
        ck_assert_uint_eq(chain.shared_blocks, 0);
        ck_assert_uint_eq(chain.tokens, 5 * BT);
        ck_assert_uint_eq(chain.head[0], 7);
        ck_assert_uint_eq(chain.pins, 2); /* number of clients, not of pins */
        atomic_store(&a->page->counters[KVD_CLIENT_LOOKUPS], 3);
        atomic_store(&b->page->counters[KVD_CLIENT_LOOKUPS], 4);
        ck_assert_uint_eq(usage_of(space).client_counters[KVD_CLIENT_LOOKUPS], 7);
        atomic_store(&a->words[kvd_ref_id(refs[4])].pins, 0);
        atomic_store(&b->words[kvd_ref_id(refs[4])].pins, 0);
}
END_TEST

/* Nonsense that a client wrote into its counters, both while the client lives and afterwards. */
START_TEST(nonsense_in_counters_is_cut_off) {
        struct space *space = make_space("s");
        uint32_t fetches = kvd_latency_sum(KVD_LATENCY_FETCH),
                 seals = kvd_latency_sum(KVD_LATENCY_SEAL);
        struct space_usage usage;
        struct attachment *a;

        for (int i = 0; i < 4; i++) {
                a = fixture_attach(space);
                for (uint32_t k = 0; k < KVD_CLIENT_WORDS; k++)
                        atomic_store(&a->page->counters[k], UINT64_MAX / (1 + k % 3));
                atomic_store(&a->page->counters[KVD_CLIENT_LOOKUPS], 100);
                atomic_store(&a->page->counters[KVD_CLIENT_TOKENS_ASKED], 1000);
                for (uint32_t k = 0; k < KVD_LATENCY_BUCKETS; k++)
                        atomic_store(&a->page->counters[seals + 1 + k], k == 1);
                for (int ended = 0; ended < 2; ended++) {
                        uint32_t n = (uint32_t)i + 1;

                        usage = usage_of(space);
                        ck_assert_uint_eq(usage.client_counters[KVD_CLIENT_LOOKUPS], n * 100);
                        ck_assert_uint_eq(usage.client_counters[KVD_CLIENT_HITS], n * 100);
                        ck_assert_uint_eq(usage.client_counters[KVD_CLIENT_TOKENS_FOUND], n * 1000);
                        ck_assert_uint_eq(usage.client_counters[KVD_CLIENT_RETRIES],
                                          (uint64_t)n << 53);
                        ck_assert_uint_eq(usage.client_counters[KVD_N_CLIENT_COUNTERS], 0);
                        ck_assert_uint_eq(usage.client_counters[seals],
                                          n * 128); /* ns: below its bucket's end */
                        for (uint32_t k = 0; k <= KVD_LATENCY_BUCKETS; k++)
                                ck_assert_uint_eq(usage.client_counters[fetches + k], 0);
                        a = attachment_free(a, false);
                }
        }
}
END_TEST

/* ---- spaces, leases -------------------------------------------------------------------------- */

START_TEST(another_geometry_is_refused_by_name) {
        struct space_spec spec = {.name = "s", .geometry = geometry};
        struct space *space;
        bool created;

        make_space("s");
        spec.geometry.head_dim++;
        ck_assert_int_eq(space_open(domain, &spec, true, &space, &created), -EEXIST);
        ck_assert_ptr_nonnull(strstr(store_why(store), "head_dim"));
        spec.geometry = geometry;
        spec.options.kind = KVD_kind_bidirectional;
        ck_assert_int_eq(space_open(domain, &spec, true, &space, &created), -EEXIST);
        ck_assert_ptr_nonnull(strstr(store_why(store), "kind"));
        snprintf(spec.name, sizeof spec.name, "a/b");
        ck_assert_int_eq(space_open(domain, &spec, true, &space, &created), -EINVAL);
}
END_TEST

START_TEST(lease_has_one_holder_and_dies_with_it) {
        struct space *space =
                make_space_with("s", (struct space_options){.kind = KVD_kind_bidirectional});
        struct attachment *a = fixture_attach(space), *b = fixture_attach(space);
        struct kvd_key key = {1, 2};
        uint32_t epoch = space_index(space)->lease_epoch;

        ck_assert_int_eq(space_lease(a, key, 10), 1);
        ck_assert_int_eq(space_lease(a, key, 10), 1);
        ck_assert_int_eq(space_lease(b, key, 10), 0);
        ck_assert_int_eq(space_lease(b, key, 11), 1);
        space_lease_end(b, key, 10); /* a lease of another client */
        ck_assert_int_eq(space_lease(b, key, 10), 0);
        attachment_orphan(a);
        ck_assert_uint_ne(space_index(space)->lease_epoch, epoch);
        ck_assert_int_eq(space_lease(b, key, 10), 1);
        ck_assert_uint_eq(usage_of(space).leases, 2);
        attachment_free(b, true);
        ck_assert_uint_eq(usage_of(space).leases, 0);
}
END_TEST

/* ---- random walk ----------------------------------------------------------------------------- */

struct walker {
        struct attachment *a;
        kvd_ref parent;
        uint64_t salt; /* salt of its chain */
};

static struct random dice = {12345};

static void walk_one(struct space *space, struct walker *w) {
        kvd_ref more[20];

        switch (random_below(&dice, 10)) {
        case 0:
                attachment_orphan(w->a);
                w->a = attachment_free(w->a, true);
                ck_assert_int_eq(attachment_new(space, NULL, 1, NULL, &w->a), 0);
                w->parent = KVD_ROOT;
                break;
        case 1: {
                kvd_ref lost[4];

                /* kept until the client dies */
                space_allocate(w->a, 1 + random_below(&dice, 4), lost);
                break;
        }
        case 2: store_idle(store); break;
        case 3: {
                bool again;

                space_evict(space, 1 + random_below(&dice, 5), KVD_ROOT, &again);
                break;
        }
        default:
                if (random_below(&dice, 4) == 0)
                        w->parent = KVD_ROOT;
                if (w->parent == KVD_ROOT)
                        w->salt = random_below(&dice, 3);
                if (seal_salted(w->a, w->salt, w->parent, 1 + random_below(&dice, 20),
                                random_below(&dice, 3), more) == 0)
                        w->parent = more[0];
                else
                        w->parent = KVD_ROOT;
        }
}

START_TEST(random_walk_keeps_the_invariants) {
        struct space *space =
                make_space_with("s", (struct space_options){.policy = _i ? KVD_policy_fifo :
                                                                           KVD_policy_lru});
        struct walker walkers[4] = {0};

        for (uint32_t i = 0; i < ARRAY_SIZE(walkers); i++)
                walkers[i].a = fixture_attach(space);
        for (uint32_t i = 0; i < 20000; i++) {
                walk_one(space, &walkers[random_below(&dice, ARRAY_SIZE(walkers))]);
                if (i % 16 == 0)
                        check_clean(space);
        }
}
END_TEST

SUITE("store", FIXTURE(setup, teardown),
      TESTS(chain_is_sealed_and_found_again, chains_of_different_salts_never_share,
            partial_tail_ends_a_chain, a_whole_prefix_has_a_length, whole_prefixes_are_not_posted,
            posts_beyond_the_filling_blocks_are_refused,
            posts_of_the_dead_are_taken_before_an_allocation_fails,
            nonsense_is_refused_and_changes_nothing, full_pool_evicts_coldest_leaf_first,
            uses_between_two_allocations_have_an_order, fifo_ignores_use),
      LOOPS(2, posts_of_the_dead_are_taken_in_pieces, pinned_leaf_keeps_its_whole_chain),
      TESTS(full_of_pins_is_refused_not_stalled, evict_on_request,
            chain_eviction_leaves_only_what_is_used, client_quota_bounds_filling,
            domain_quota_bounds_the_space, second_space_takes_memory_from_the_first,
            spaces_are_found_from_any_number, memory_that_is_given_back_is_freed,
            death_discards_what_was_being_filled, what_a_dead_client_used_stays_warm,
            arena_hands_out_own_segments_only, an_arena_without_memory_serves_the_next_client,
            a_client_that_gets_no_arena_is_refused, a_store_leaves_no_descriptor,
            a_check_puts_no_memory_behind_what_was_never_written, chains_and_clients_are_told_of,
            nonsense_in_counters_is_cut_off, another_geometry_is_refused_by_name,
            lease_has_one_holder_and_dies_with_it),
      LOOPS(2, random_walk_keeps_the_invariants))
