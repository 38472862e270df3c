/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Eviction stays cheap, whatever clients do. Attackers use pins, keys and many clients. The work is
 * counted, or measured in the process's own time and compared with that for ordinary blocks.
 */

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/key.h"
#include "store/cache/inside.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#ifndef KVD_GENERATION_BITS
#define KVD_GENERATION_BITS 32
#endif

#define BLOCK 64u /* bytes of a block */
#define POOL_BLOCKS 65536u
#define PIECE 4096u /* maximum number of blocks that one message evicts */

static void open_store(void) {
        struct store_config c = {.pool_bytes = (uint64_t)POOL_BLOCKS * BLOCK,
                                 .segment_bytes = POOL_BLOCKS / 16 * BLOCK,
                                 .pages = STORE_PAGES_SMALL,
                                 .max_attachments = 256};
        struct domain_config d = {.name = "d", .client_quota = UINT64_MAX};

        ck_assert_int_eq(store_new(&c, &store), 0);
        ck_assert_int_eq(store_domain(store, &d, &domain), 0);
}

static const uint32_t policies[] = {KVD_policy_lru, KVD_policy_priority};

static struct space *make_space_of(uint64_t max_blocks, uint32_t policy) {
        struct space_spec spec = {.geometry = {.layers = 1,
                                               .kv_heads = 1,
                                               .head_dim = 8,
                                               .block_tokens = BT,
                                               .dtype = KVD_dtype_i8,
                                               .vocab = UINT32_MAX},
                                  .name = "s",
                                  .options = {.max_blocks = max_blocks, .policy = policy}};
        struct space *space;
        bool created;

        ck_assert_msg(space_open(domain, &spec, true, &space, &created) == 0, "%s",
                      store_why(store));
        ck_assert_uint_eq(space_index(space)->block_bytes, BLOCK);
        return space;
}

static struct space *make_space(uint64_t max_blocks) {
        return make_space_of(max_blocks, KVD_policy_lru);
}

/* Seals n blocks, each a chain of its own, with consecutive tokens of `tokens`. */
static void seal_leaves(struct attachment *a, const uint32_t *tokens, uint32_t n, kvd_ref *ret) {
        for (uint32_t i = 0; i < n; i++) {
                struct seal_request q = {.n_blocks = 1,
                                         .blocks = &ret[i],
                                         .n_tokens = BT,
                                         .tokens = tokens + (size_t)i * BT};

                ck_assert_int_eq(space_allocate(a, 1, &ret[i]), 1);
                ck_assert_int_eq(space_seal(a, &q, &ret[i]), 0);
        }
}

/* Seals n blocks behind `parent`, with tokens that begin with `token`. */
static void seal_chain(struct attachment *a, kvd_ref parent, uint32_t token, uint32_t n,
                       kvd_ref *ret) {
        for (uint32_t i = 0; i < n; i++) {
                uint32_t tokens[BT] = {token, i};
                struct seal_request q = {.n_blocks = 1,
                                         .blocks = &ret[i],
                                         .n_tokens = BT,
                                         .tokens = tokens,
                                         .parent = i ? ret[i - 1] : parent};

                ck_assert_int_eq(space_allocate(a, 1, &ret[i]), 1);
                ck_assert_int_eq(space_seal(a, &q, &ret[i]), 0);
        }
}

static uint64_t own_time_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- keys of few buckets --------------------------------------------------------------------- */

#define CROWD (4 * PIECE)

/* Tokens of n different blocks, both of whose buckets lie in the first `slots` slots. */
static void crowded_tokens(const struct kvd_index *ix, uint32_t slots, uint32_t n, uint32_t *ret) {
        struct kvd_key root = kvd_key_root(ix, 0, 0), key;
        uint32_t block[BT] = {0};

        for (uint32_t i = 0; i < n; block[0]++) {
                key = kvd_key_block(ix, root, block, BT);
                if (kvd_bucket(ix->table_slots, key, 0) < slots &&
                    kvd_bucket(ix->table_slots, key, 1) < slots)
                        memcpy(ret + (size_t)i++ * BT, block, sizeof block);
        }
}

/* Keeps the least time of all evictions so far: other processes can only slow them down. */
static void evict_cost(struct space *space, const uint32_t *tokens, uint64_t *least) {
        kvd_ref *refs = calloc(CROWD, sizeof *refs);
        struct attachment *a = fixture_attach(space);
        bool more;

        seal_leaves(a, tokens, CROWD, refs);
        for (uint32_t i = 0; i < CROWD / PIECE; i++) {
                uint64_t begin = own_time_ns();

                for (uint32_t left = PIECE; left;)
                        left -= (uint32_t)space_evict(space, left, KVD_ROOT, &more);
                *least = MIN(*least, own_time_ns() - begin);
        }
        check_clean(space);
        attachment_free(a, false);
        free(refs);
}

#define TRIES 10 /* one is enough unless the machine is busy */

/*
 * Clients can read the secret in the index, so they can search for tokens whose keys are neighbours
 * in its table. Evicting 4,096 of 100,000 such blocks once took the daemon two seconds.
 */
START_TEST(crowded_keys_cost_no_more_than_others) {
        struct space *space = make_space(0);
        const struct kvd_index *ix = space_index(space);
        uint32_t *tokens = calloc(CROWD, BT * sizeof *tokens),
                 *alike = calloc(CROWD, BT * sizeof *alike);
        uint64_t ordinary = UINT64_MAX, crowded = UINT64_MAX;
        int tries = TRIES;

        crowded_tokens(ix, ix->table_slots, CROWD, tokens);
        crowded_tokens(ix, CROWD, CROWD, alike);
        do {
                evict_cost(space, tokens, &ordinary);
                evict_cost(space, alike, &crowded);
        } while (crowded >= 4 * ordinary && --tries);
        ck_assert_msg(crowded < 4 * ordinary, "%lu ns for %u crowded blocks, %lu for others",
                      (unsigned long)crowded, PIECE, (unsigned long)ordinary);
        free(alike);
        free(tokens);
}
END_TEST

#define FEW 48u

/* Such a client harms only itself: blocks of its own space are not found. */
START_TEST(blocks_that_their_buckets_cannot_hold_are_missed) {
        struct space *space = make_space(64);
        struct attachment *a = fixture_attach(space);
        uint32_t tokens[FEW * BT];
        kvd_ref refs[FEW];
        bool more;

        crowded_tokens(space_index(space), KVD_BUCKET_SLOTS, FEW, tokens);
        seal_leaves(a, tokens, FEW, refs);
        ck_assert_uint_eq(counter(space, KVD_SPACE_UNINDEXED), FEW - KVD_BUCKET_SLOTS);
        check_clean(space);
        ck_assert_int_eq(space_evict(space, 0, KVD_ROOT, &more), FEW);
        check_clean(space);
}
END_TEST

/* With ordinary keys the buckets suffice: all but a few blocks in a million are found. */
START_TEST(a_full_index_holds_all_its_blocks) {
        struct space *space = make_space(0);
        struct attachment *a = fixture_attach(space);
        uint32_t *tokens = calloc(POOL_BLOCKS, BT * sizeof *tokens);
        kvd_ref *refs = calloc(POOL_BLOCKS, sizeof *refs);

        for (uint32_t i = 0; i < POOL_BLOCKS; i++)
                tokens[i * BT] = i;
        seal_leaves(a, tokens, POOL_BLOCKS, refs);
        ck_assert_uint_eq(usage_of(space).sealed, POOL_BLOCKS);
        ck_assert_uint_le(counter(space, KVD_SPACE_UNINDEXED), 8);
        check_clean(space);
        free(tokens);
        free(refs);
}
END_TEST

/* ---- a forest of pins ------------------------------------------------------------------------ */

#define LEAVES 16384u
#define CLIENTS 240u
#define READS (1u << 13) /* KVD_PIN_READS */

static struct kvd_pin_words *words_of(struct attachment *a) {
        uint8_t *page = mmap(NULL, attachment_pin_bytes(a), PROT_READ | PROT_WRITE, MAP_SHARED,
                             attachment_pin_fd(a), 0);

        ck_assert_ptr_ne(page, MAP_FAILED);
        return (struct kvd_pin_words *)(page + KVD_PINS_OFF);
}

/* A space full of leaves, and 240 clients. The last one pins all leaves; returns its words. */
static struct kvd_pin_words *plant_forest(struct space *space, struct attachment **first,
                                          kvd_ref *refs) {
        uint32_t *tokens = calloc(LEAVES, BT * sizeof *tokens);
        struct attachment *a = NULL;
        struct kvd_pin_words *words;

        for (uint32_t i = 0; i < LEAVES; i++)
                tokens[i * BT] = i;
        *first = fixture_attach(space);
        seal_leaves(*first, tokens, LEAVES, refs);
        free(tokens);
        for (uint32_t i = 1; i < CLIENTS; i++)
                a = fixture_attach(space);
        words = words_of(a);
        for (uint32_t i = 0; i < LEAVES; i++)
                atomic_store(&words[kvd_ref_id(refs[i])].pins, 1);
        return words;
}

/* Retries while the answer is 0, as libkvd does. Returns the number of requests. */
static uint32_t ask_until_answered(struct attachment *a, uint32_t n, kvd_ref *ret, int *answer) {
        uint32_t asked = 0;

        do
                asked++;
        while ((*answer = space_allocate(a, n, ret)) == 0);
        return asked;
}

/*
 * One request once examined 32 leaves for each block that it wanted, and all clients' pins of each
 * leaf twice. Now it stops early and returns 0, and leaves known to be pinned are cheap to skip.
 */
START_TEST(a_forest_of_pins_is_searched_in_pieces) {
        struct space *space = make_space(LEAVES);
        kvd_ref *refs = calloc(LEAVES, sizeof *refs), *more = calloc(PIECE, sizeof *more);
        struct attachment *a;
        struct kvd_pin_words *words = plant_forest(space, &a, refs);
        uint32_t asked;
        int r;

        asked = ask_until_answered(a, PIECE, more, &r);
        ck_assert_int_eq(r, -ENOBUFS);
        ck_assert_uint_ge(asked, LEAVES * CLIENTS / READS / 4);
        ck_assert_uint_le(asked, LEAVES * CLIENTS / READS * 4);
        ck_assert_uint_eq(ask_until_answered(a, 1, more, &r), 1); /* the pins are known now */
        ck_assert_int_eq(r, -ENOBUFS);
        check_clean(space);

        atomic_store(&words[kvd_ref_id(refs[LEAVES / 2])].pins, 0);
        for (asked = 0; asked < 2 * LEAVES && space_allocate(a, 1, more) != 1; asked++)
                ;
        ck_assert_uint_lt(asked, 8); /* although its client did not report the change */
        ck_assert_uint_eq(kvd_ref_id(more[0]), kvd_ref_id(refs[LEAVES / 2]));
        check_clean(space);
        free(refs);
        free(more);
}
END_TEST

/* Blocks are returned as they are found: with many clients, a few per request. */
START_TEST(evictions_among_many_clients_come_in_pieces) {
        struct space *space = make_space(LEAVES);
        kvd_ref *refs = calloc(LEAVES, sizeof *refs), *more = calloc(PIECE, sizeof *more);
        struct attachment *a;
        struct kvd_pin_words *words = plant_forest(space, &a, refs);
        uint32_t got = 0, n = 0;
        bool again = true;

        for (uint32_t i = 0; i < LEAVES; i++)
                atomic_store(&words[kvd_ref_id(refs[i])].pins, i % 2);
        while (got < PIECE) {
                int r = space_allocate(a, PIECE - got, more + got);

                ck_assert_int_ge(r, 0);
                ck_assert_uint_le(r, READS / CLIENTS);
                got += (uint32_t)r;
        }
        check_clean(space);
        for (got = 0; again && n < LEAVES; n++)
                got += (uint32_t)space_evict(space, 0, KVD_ROOT, &again);
        ck_assert_uint_eq(got, LEAVES / 2 - PIECE);
        ck_assert_uint_ge(n, got / (READS / CLIENTS)); /* pieces */
        check_clean(space);
        free(refs);
        free(more);
}
END_TEST

/* Eviction of a chain continues past pinned blocks, and ends. */
START_TEST(evicting_a_chain_skips_its_pinned_leaves) {
        struct space *space = make_space(LEAVES);
        kvd_ref *refs = calloc(LEAVES, sizeof *refs), root = 0;
        struct attachment *a = fixture_attach(space), *holder = NULL;
        uint32_t n = 0;
        int64_t got = 0;
        bool more = true;
        struct kvd_pin_words *words;

        seal_chain(a, KVD_ROOT, 0, 1, &root);
        for (uint32_t i = 1; i < LEAVES - 1; i++)
                seal_chain(a, root, i, 1, &refs[i]);
        for (uint32_t i = 0; i < CLIENTS; i++)
                holder = fixture_attach(space);
        words = words_of(holder);
        for (uint32_t i = 1; i < LEAVES - 1; i += 2)
                atomic_store(&words[kvd_ref_id(refs[i])].pins, 1);
        for (; more && n < LEAVES; n++) {
                int64_t r = space_evict(space, 0, root, &more);

                ck_assert_int_ge(r, 0);
                ck_assert_int_le(r, READS / CLIENTS);
                got += r;
        }
        ck_assert(!more);
        ck_assert_int_eq(got, LEAVES / 2 - 1);
        check_clean(space);
        free(refs);
}
END_TEST

/* ---- groups of blocks that a client uses ------------------------------------------------------ */

#define GROUP 64u

/* A client that has used no group. */
static struct attachment *idle_client(struct space *space) {
        static uint64_t processes = 1;
        struct attachment *a;

        ck_assert_int_eq(attachment_new(space, NULL, processes++, NULL, &a), 0);
        return a;
}

static void fill_space(struct attachment *a, kvd_ref *refs) {
        uint32_t tokens[GROUP * BT] = {0};

        for (uint32_t i = 0; i < GROUP; i++)
                tokens[i * BT] = i;
        seal_leaves(a, tokens, GROUP, refs);
}

/* Where the first page of words begins that has memory. */
static off_t first_words(const struct attachment *a) {
        off_t at = lseek(attachment_pin_fd(a), KVD_PINS_OFF, SEEK_DATA);

        ck_assert(at >= 0 || errno == ENXIO);
        return at < 0 ? (off_t)attachment_pin_bytes(a) : at;
}

/* Eviction once read the words of each client, which gave memory to pages that were never written. */
START_TEST(words_of_idle_clients_are_not_read) {
        struct space *space = make_space(GROUP);
        struct attachment *idle[3], *a;
        kvd_ref refs[GROUP], more[GROUP];

        for (int i = 0; i < 3; i++)
                idle[i] = idle_client(space);
        a = fixture_attach(space);
        fill_space(a, refs);
        ck_assert_int_eq(space_allocate(a, GROUP / 2, more), GROUP / 2);
        for (int i = 0; i < 3; i++)
                ck_assert_int_ge(first_words(idle[i]),
                                 (off_t)kvd_groups_off(space_index(space)->capacity));
        check_clean(space);
}
END_TEST

/* Rounds through the pins read them in pieces, which have many groups. */
START_TEST(rounds_skip_unused_groups) {
        struct space *space = make_space(0);
        struct attachment *a = idle_client(space);
        uint32_t far = 20 * KVD_GROUP_IDS, cursor = 0, ids[8];
        kvd_ref refs[GROUP];

        fill_space(a, refs);
        kvd_group_use(a->groups, 0);
        kvd_group_use(a->groups, far);
        a->words[0].pins = a->words[far].pins = 1;
        do
                attachment_pins(a, &cursor, ids, ARRAY_SIZE(ids));
        while (cursor);
        available_round(space);
        while (available_look(space))
                ;
        ck_assert_int_eq(first_words(a), KVD_PINS_OFF);
        ck_assert_int_eq(lseek(attachment_pin_fd(a), KVD_PINS_OFF + 4096, SEEK_DATA),
                         KVD_PINS_OFF + (off_t)far * 8);
}
END_TEST

/* The daemon remembers who uses a group. A new user's pins and times of use count at once. */
START_TEST(the_first_use_of_a_group_counts) {
        struct space *space = make_space_of(GROUP, policies[_i]);
        struct attachment *a = fixture_attach(space), *pins = idle_client(space),
                          *touches = idle_client(space);
        kvd_ref refs[GROUP], more[2];

        fill_space(a, refs);
        ck_assert_int_eq(space_allocate(a, 1, more), 1);
        ck_assert_uint_eq(kvd_ref_id(more[0]), kvd_ref_id(refs[0]));
        space->clock++;
        for (uint32_t i = GROUP / 2; i < GROUP - 2; i++) {
                kvd_group_use(pins->groups, kvd_ref_id(refs[i]));
                pins->words[kvd_ref_id(refs[i])].pins = 1;
        }
        for (uint32_t i = 1; i < GROUP / 2; i++) {
                kvd_group_use(touches->groups, kvd_ref_id(refs[i]));
                touches->words[kvd_ref_id(refs[i])].touch = (uint32_t)space->clock;
        }
        ck_assert_int_eq(space_allocate(a, 2, more), 2);
        for (uint32_t i = 1; i < GROUP - 2; i++)
                ck_assert(block_current(space, refs[i]));
        check_clean(space);
}
END_TEST

/* A seat has another client then. */
START_TEST(an_ended_client_uses_no_group) {
        struct space *space = make_space(GROUP);
        struct attachment *a = fixture_attach(space), *gone = fixture_attach(space), *next;
        kvd_ref refs[GROUP], more[GROUP];
        uint32_t seat = gone->seat;

        fill_space(a, refs);
        ck_assert_int_eq(space_allocate(a, 1, more), 1);
        attachment_orphan(gone);
        attachment_free(gone, false);
        while (attachment_fold(space))
                ;
        next = idle_client(space);
        ck_assert_uint_eq(next->seat, seat);
        ck_assert_int_eq(space_allocate(a, GROUP / 2, more), GROUP / 2);
        ck_assert_int_ge(first_words(next), (off_t)kvd_groups_off(space_index(space)->capacity));
        check_clean(space);
}
END_TEST

/* ---- the ends of chains ---------------------------------------------------------------------- */

#define LINKS 16u

static uint32_t evict(struct space *space, uint32_t n, uint32_t *reads) {
        return evict_coldest(space, space->memory.arenas, n, reads);
}

/* Each block once took two looks at all clients. */
START_TEST(the_end_of_a_chain_takes_one_look) {
        struct space *space = make_space(GROUP);
        struct attachment *a = fixture_attach(space);
        uint32_t reads = READS;
        kvd_ref refs[LINKS + 1];

        for (uint32_t i = 1; i < CLIENTS; i++)
                idle_client(space);
        seal_chain(a, KVD_ROOT, 0, LINKS + 1, refs);
        ck_assert_uint_eq(evict(space, 1, &reads), 1); /* its client is known from now on */
        reads = READS;
        ck_assert_uint_eq(evict(space, LINKS, &reads), LINKS);
        ck_assert_uint_le(READS - reads, 2 * CLIENTS);
        check_clean(space);
}
END_TEST

/* The pin may be the client's first one in the group, which only the look finds. */
START_TEST(the_end_of_a_chain_goes_up_to_a_pin) {
        struct space *space = make_space(GROUP);
        struct attachment *a = fixture_attach(space), *holder;
        uint32_t reads = READS, pinned = LINKS / 3, gone = LINKS - 1 - pinned;
        kvd_ref refs[LINKS];

        holder = _i ? idle_client(space) : fixture_attach(space);
        seal_chain(a, KVD_ROOT, 0, LINKS, refs);
        kvd_group_use(holder->groups, kvd_ref_id(refs[pinned]));
        holder->words[kvd_ref_id(refs[pinned])].pins = 1;
        ck_assert_uint_eq(evict(space, LINKS, &reads), gone);
        for (uint32_t i = 0; i < LINKS; i++)
                ck_assert_int_eq(block_current(space, refs[i]), i <= pinned);
        check_clean(space);
        holder->words[kvd_ref_id(refs[pinned])].pins = 0;
        ck_assert_uint_eq(evict(space, LINKS, &reads), LINKS - gone);
        check_clean(space);
}
END_TEST

/* A client that pins the second block of a chain while the daemon writes RETIRING into its words. */
struct late_client {
        struct attachment *a;
        const struct kvd_index *ix;
        kvd_ref refs[LINKS];
        _Atomic bool ready, done;
        bool holds;
};

static uint64_t word_of(const struct late_client *late, uint32_t i) {
        return atomic_load(&kvd_index_desc(late->ix, kvd_ref_id(late->refs[i]))->slot);
}

static uint64_t word_made(kvd_ref ref, enum kvd_state state) {
        return kvd_slot_make(state, kvd_ref_generation(ref));
}

static void *pin_late(void *arg) {
        struct late_client *late = arg;
        shm_u32 *pins = &late->a->words[kvd_ref_id(late->refs[1])].pins;
        uint64_t word;

        atomic_store(&late->ready, true);
        while (word_of(late, LINKS - 1) == word_made(late->refs[LINKS - 1], KVD_SEALED))
                ;
        atomic_fetch_add(pins, 1);
        do
                word = word_of(late, 1);
        while (word == word_made(late->refs[1], KVD_RETIRING));
        late->holds = word == word_made(late->refs[1], KVD_SEALED);
        if (!late->holds)
                atomic_fetch_sub(pins, 1);
        atomic_store(&late->done, true);
        return NULL;
}

/* Evicts the chain while the client comes; if it has a pin then, the pin must hold. */
static bool race(struct space *space, struct late_client *late) {
        pthread_t thread;

        late->ready = late->done = false;
        ck_assert_int_eq(pthread_create(&thread, NULL, pin_late, late), 0);
        while (!atomic_load(&late->ready))
                sched_yield();
        while (!atomic_load(&late->done))
                evict(space, LINKS, &(uint32_t){READS});
        pthread_join(thread, NULL);
        evict(space, LINKS, &(uint32_t){READS});
        for (uint32_t i = 0; i < LINKS; i++)
                ck_assert_int_eq(block_current(space, late->refs[i]), late->holds && i < 2);
        late->a->words[kvd_ref_id(late->refs[1])].pins = 0;
        evict(space, LINKS, &(uint32_t){READS});
        return late->holds;
}

#define ROUNDS 3000u
#define ENOUGH 50u /* rounds in which the client had a pin */

/* A pin between the daemon's first look at a block and RETIRING counts. */
START_TEST(the_end_of_a_chain_goes_up_to_a_late_pin) {
        struct space *space = make_space(GROUP);
        struct attachment *a = fixture_attach(space);
        struct late_client late = {.a = fixture_attach(space), .ix = space->ix};

        for (uint32_t n = 0, held = 0; n < ROUNDS && held < ENOUGH; n++) {
                seal_chain(a, KVD_ROOT, n, LINKS, late.refs);
                held += race(space, &late);
        }
        check_clean(space);
}
END_TEST

START_TEST(the_end_of_a_chain_waits_for_colder_leaves) {
        struct space *space = make_space(GROUP);
        struct attachment *a = fixture_attach(space);
        kvd_ref warm[8], cold[4], branch, other;
        uint32_t reads = READS;

        space->clock = 10;
        seal_chain(a, KVD_ROOT, 1, 4, warm);
        seal_chain(a, warm[0], 2, 1, &branch);
        space->clock = 20;
        seal_chain(a, KVD_ROOT, 3, 4, cold);
        space->clock = 30;
        seal_chain(a, warm[3], 4, 4, warm + 4);
        space->clock = 40;
        seal_chain(a, KVD_ROOT, 5, 1, &other);
        a->words[kvd_ref_id(warm[2])].touch = 50;
        space->clock = 60;
        ck_assert_uint_eq(evict(space, 1, &reads), 1);
        ck_assert(!block_current(space, branch));
        ck_assert_uint_eq(evict(space, 5, &reads), 5); /* cold, and one of warm */
        ck_assert(!block_current(space, cold[0]) && !block_current(space, warm[7]));
        ck_assert(block_current(space, warm[6]) && block_current(space, other));
        ck_assert_uint_eq(evict(space, 5, &reads), 5); /* to its third block, and then other */
        ck_assert(!block_current(space, warm[3]) && block_current(space, warm[2]));
        ck_assert(!block_current(space, other));
        ck_assert_uint_eq(evict(space, LINKS, &reads), 3);
        check_clean(space);
}
END_TEST

/* A block's use is its parent's, also if both are looked at together and only one is evicted. */
START_TEST(the_end_of_a_chain_leaves_its_last_use) {
        struct space *space = make_space(GROUP);
        struct attachment *a = fixture_attach(space);
        kvd_ref chain[4], warm, cold;

        space->clock = 10;
        seal_chain(a, KVD_ROOT, 1, 4, chain);
        a->words[kvd_ref_id(chain[1])].touch = 50;
        space->clock = 60;
        seal_chain(a, KVD_ROOT, 2, 1, &warm);
        ck_assert_uint_eq(evict(space, 1, &(uint32_t){READS}), 1); /* its client is known now */
        ck_assert_uint_eq(evict(space, 2, &(uint32_t){READS}), 2);
        ck_assert(!block_current(space, chain[1]) && block_current(space, chain[0]));
        space->clock = 30;
        seal_chain(a, KVD_ROOT, 3, 1, &cold);
        space->clock = 70;
        ck_assert_uint_eq(evict(space, 1, &(uint32_t){READS}), 1);
        ck_assert(!block_current(space, cold) && block_current(space, chain[0]));
        check_clean(space);
}
END_TEST

/* ---- generations: in builds with few bits ---------------------------------------------------- */

#define IDS 64u

/*
 * A block uses up all of its generations, by release and by eviction. No reference is issued twice.
 * When none is left, the space is full.
 */
START_TEST(no_name_of_a_block_comes_twice) {
        struct space *space = make_space(IDS), *other;
        struct space_spec spec = {.name = "other", .geometry = space_index(space)->geometry};
        enum { GENERATIONS = 1u << (KVD_GENERATION_BITS < 12 ? KVD_GENERATION_BITS : 12) };
        static bool seen[IDS][GENERATIONS];
        uint32_t n_names = IDS * (GENERATIONS - 1), tokens[BT] = {0};
        struct attachment *a = fixture_attach(space);
        struct seal_request q = {.n_blocks = 1, .n_tokens = BT, .tokens = tokens};
        bool created, more;
        kvd_ref ref;

        for (uint32_t i = 0; i < n_names; i++) {
                ck_assert_int_eq(space_allocate(a, 1, &ref), 1);
                ck_assert(!seen[kvd_ref_id(ref)][kvd_ref_generation(ref)]);
                seen[kvd_ref_id(ref)][kvd_ref_generation(ref)] = true;
                tokens[0] = i;
                q.blocks = &ref;
                if (i % 2)
                        ck_assert_int_eq(space_seal(a, &q, &ref), 0);
                else
                        ck_assert_uint_eq(space_release(a, &ref, 1), 1);
                if (i % 2)
                        ck_assert_int_eq(space_evict(space, 1, KVD_ROOT, &more), 1);
                if (i % 64 == 0)
                        check_clean(space);
        }
        ck_assert_int_eq(space_allocate(a, 1, &ref), -ENOBUFS);
        ck_assert_uint_eq(counter(space, KVD_SPACE_WORN_OUT), IDS);
        check_clean(space);
        ck_assert_int_eq(space_open(domain, &spec, true, &other, &created), 0);
        ck_assert_int_eq(space_allocate(fixture_attach(other), 1, &ref), 1);
        check_clean(other);
}
END_TEST

SUITE("eviction", FIXTURE(open_store, fixture_close),
      WHEN(KVD_HASH_BITS == 128, TESTS(crowded_keys_cost_no_more_than_others,
                                       blocks_that_their_buckets_cannot_hold_are_missed,
                                       a_full_index_holds_all_its_blocks)),
      TESTS(a_forest_of_pins_is_searched_in_pieces, evictions_among_many_clients_come_in_pieces,
            evicting_a_chain_skips_its_pinned_leaves, words_of_idle_clients_are_not_read,
            rounds_skip_unused_groups, an_ended_client_uses_no_group),
      LOOPS(ARRAY_SIZE(policies), the_first_use_of_a_group_counts),
      TESTS(the_end_of_a_chain_takes_one_look, the_end_of_a_chain_waits_for_colder_leaves,
            the_end_of_a_chain_goes_up_to_a_late_pin, the_end_of_a_chain_leaves_its_last_use),
      LOOPS(2, the_end_of_a_chain_goes_up_to_a_pin),
      WHEN(KVD_GENERATION_BITS <= 12, TESTS(no_name_of_a_block_comes_twice)))
