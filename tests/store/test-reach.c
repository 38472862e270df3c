/* SPDX-License-Identifier: Apache-2.0 */

/* A tier below the pool takes exactly those blocks of a chain that fetches can bring back. */

#include <errno.h>
#include <unistd.h>

#include "ipc/base/key.h"
#include "store/below/bring.h"
#include "store/file/file.h"
#include "store/file/volume.h"
#include "store/file_tier.h"
#include "store/remote/inside.h"
#include "store/remote_tier.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define REACH (KVD_FETCH_TOKENS / BT) /* blocks of a request */
#define BLOCKS (2 * REACH + 10)
#define MOST (KVD_WHOLE_BLOCKS + 1) /* blocks of a prefix that is too long */
#define EXTENT_BYTES ((uint64_t)DISK_SECTOR + FILE_SLOTS * file_slot_bytes(BLOCK_BYTES, 0))
#define EXTENTS 4u

static struct space *space;
static struct attachment *a;
static bool files;
static uint32_t tokens[MOST * BT], written, fetched;

/* ---- tiers that take and bring everything ---------------------------------------------------- */

static void take_disk_question(const struct store_disk_question *q) {
        static const int32_t errors[KVD_DISK_ITEMS];

        if (q->what == STORE_DISK_SUPER) {
                store_disk_told(store, 0);
        } else if (q->what == STORE_DISK_SCAN) {
                store_disk_scanned(store, 0, 0, NULL, 0);
        } else {
                *(q->what == STORE_DISK_READ ? &fetched : &written) += q->n;
                store_disk_moved(store, errors, NULL, q->n);
        }
}

static void take_remote_question(const struct store_remote_question *q) {
        static const int32_t errors[KVD_REMOTE_ITEMS];
        static struct kvd_key names[MOST];
        uint32_t n = q->n, there = written ? q->n_tokens / BT - q->first : 0;

        if (q->what == STORE_REMOTE_FIND) {
                store_remote_found(store, names, 1 + there);
        } else if (q->what == STORE_REMOTE_GET) {
                fetched += n;
                store_remote_got(store, errors, NULL, n);
        } else {
                written += n;
                store_remote_put(store, names, errors, n);
        }
}

/* Answers questions until there are no more. */
static void serve(void) {
        const struct store_remote_question *servers;
        const struct store_disk_question *disk;
        uint32_t quiet = 0;
        bool later;

        while (quiet < 10) {
                idle();
                disk = files ? store_disk_next(store, &later) : NULL;
                servers = files ? NULL : store_remote_next(store, &later);
                if (disk)
                        take_disk_question(disk);
                if (servers)
                        take_remote_question(servers);
                quiet = disk || servers ? 0 : quiet + 1;
        }
}

static void open_file(void) {
        struct store_disk_config config = {.there = true,
                                           .bytes = FILE_HEAD + EXTENTS * EXTENT_BYTES};
        struct file_super supers[FILE_COPIES];

        fixture_super(supers, EXTENTS, EXTENT_BYTES);
        supers[1] = supers[0];
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        store_disk_looked(store, 0, supers, sizeof supers);
        serve();
}

static void begin(bool of_files) {
        files = of_files;
        written = fetched = 0;
        fixture_open(MOST + 64, 0);
        if (files)
                open_file();
        else
                ck_assert_int_eq(store_remote_begin(store, &(struct store_remote_config){0}), 0);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        if (!files)
                store_remote_servers(store, 1, 0, "");
}

static void seal_chain(uint32_t n_tokens, uint32_t first) {
        static kvd_ref refs[MOST];
        uint32_t n = DIV_UP(n_tokens, BT), made = 0;
        struct seal_request q = {.n_blocks = n,
                                 .blocks = refs,
                                 .n_tokens = n_tokens,
                                 .tokens = tokens};

        for (uint32_t i = 0; i < n_tokens; i++)
                tokens[i] = first + i;
        for (int r; made < n; made += (uint32_t)r) {
                r = space_allocate(a, n - made, refs + made);
                ck_assert_int_gt(r, 0);
        }
        if (space_finds_whole(space)) {
                q.root = n_tokens;
                q.prefix_key = kvd_key_prefix(space_index(space), tokens, n_tokens);
        }
        ck_assert_int_eq(space_seal(a, &q, refs), 0);
}

static void evict(void) {
        bool more = true;

        while (more)
                space_evict(space, BLOCKS, KVD_ROOT, &more);
}

/* Repeats the fetch as long as blocks come. */
static void fetch_all(void) {
        const struct fetch_request all = {.n_tokens = BLOCKS * BT, .tokens = tokens};
        struct fetch_request q = all;
        uint32_t before;
        int fd;

        do {
                struct chain_at at = bring_walk(space, &all);

                before = fetched;
                q.behind = at.leaf;
                q.tokens = tokens + at.depth * BT;
                q.n_tokens = MIN((BLOCKS - at.depth) * BT, KVD_FETCH_TOKENS);
                ck_assert_int_ge(space_fetch(a, &q, &fd), 0);
                serve();
        } while (fetched > before);
        ck_assert_int_eq(fd, -1);
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* Of 65,536 tokens, only the first 15,360 used to come back. */
START_TEST(a_chain_of_any_length_comes_back) {
        begin(_i);
        seal_chain(BLOCKS * BT, 1000);
        serve();
        ck_assert_uint_eq(written, BLOCKS);
        evict();
        fetch_all();
        ck_assert_uint_eq(fetched, BLOCKS);
        ck_assert_uint_eq(usage_of(space).sealed, BLOCKS);
        check_clean(space);
        fixture_close();
}
END_TEST

/* A full block of a sequence, with the chain's first tokens. */
static kvd_ref private_block(void) {
        static struct table t;

        table_open(&t, a, 8, true);
        ck_assert_int_eq(table_append(&t, BT, 1000), 0);
        return t.slots[0].ref;
}

/* A client may name any block; only one of the same chain can lead to the tokens behind it. */
START_TEST(tokens_are_fetched_behind_a_block_of_their_chain) {
        struct fetch_request q = {.n_tokens = 3 * BT, .tokens = tokens + 2 * BT};
        kvd_ref second, tail;
        int fd;

        begin(true);
        seal_chain(5 * BT + 1, 1000);
        serve();
        second = bring_walk(space, &(struct fetch_request){.n_tokens = 2 * BT, .tokens = tokens})
                         .leaf;
        tail = second;
        q.behind = second;
        ck_assert_int_eq(space_fetch(a, &q, &fd), 5 * BT);
        ck_assert_int_eq(fd, -1);
        q.salt = 1;
        ck_assert_int_eq(space_fetch(a, &q, &fd), -ESTALE);
        q.salt = 0;
        q.behind = kvd_ref_make(kvd_ref_id(second), kvd_ref_generation(second) + 2);
        ck_assert_int_eq(space_fetch(a, &q, &fd), -ESTALE);
        q.behind = kvd_ref_make(UINT32_MAX - 1, 1);
        ck_assert_int_eq(space_fetch(a, &q, &fd), -ESTALE);
        q.behind = private_block();
        ck_assert_int_eq(space_fetch(a, &q, &fd), -ESTALE);
        ck_assert_int_eq(space_allocate(a, 1, &q.behind), 1);
        ck_assert_int_eq(space_fetch(a, &q, &fd), -ESTALE);
        space_release(a, &q.behind, 1);
        evict();
        q.behind = tail;
        ck_assert_int_eq(space_fetch(a, &q, &fd), -ESTALE);
        check_clean(space);
        fixture_close();
}
END_TEST

#define LONG 70u /* blocks: more than a request of the servers' */

/* Servers refuse blocks of tokens below 20,000. Returns the number of other blocks written. */
static uint32_t refuse_some(void) {
        static struct kvd_key names[KVD_REMOTE_ITEMS];
        static int32_t errors[KVD_REMOTE_ITEMS];
        uint32_t taken = 0;

        for (uint32_t i = 0; i < 300; i++) {
                const struct store_remote_question *q;
                bool later;

                idle();
                store->remote->push_pause_ns = 0;
                q = store_remote_next(store, &later);
                for (uint32_t k = 0; q && k < q->n; k++) {
                        names[k].lo = q->items[k].block;
                        errors[k] = q->items[k].tokens[0] < 20000 ? -EBUSY : 0;
                        taken += !errors[k];
                }
                if (q)
                        store_remote_put(store, names, errors, q->n);
        }
        return taken;
}

START_TEST(a_chain_that_is_refused_does_not_block_others) {
        const struct store_remote_config config = {.depth = _i ? LONG * BT : 0};

        files = false;
        fixture_open(BLOCKS + 64, 0);
        ck_assert_int_eq(store_remote_begin(store, &config), 0);
        space = fixture_space("s", 0);
        a = fixture_attach(space);
        store_remote_servers(store, 1, 0, "");
        seal_chain(LONG * BT, 1000);
        seal_chain(LONG * BT, 50000);
        ck_assert_uint_eq(refuse_some(), LONG);
        fixture_close();
}
END_TEST

/* ---- prefixes whose tokens do not fit in a request ------------------------------------------- */

static struct fetch_request part(uint32_t from, uint32_t to) {
        return (struct fetch_request){.tokens = tokens + from,
                                      .n_tokens = to - from,
                                      .before = from,
                                      .more = to < BLOCKS * BT};
}

static int64_t fetch_part(uint32_t from, uint32_t to, int *fd) {
        struct fetch_request q = part(from, to);
        int64_t r = space_fetch(a, &q, fd);

        check_clean(space); /* the tokens that wait are charged */
        return r;
}

static void begin_whole(bool of_files, uint32_t n_blocks) {
        begin(of_files);
        space = fixture_whole_space("w");
        a = fixture_attach(space);
        seal_chain(n_blocks * BT, 1000);
        serve();
        evict();
}

START_TEST(a_prefix_of_any_length_comes_back) {
        uint32_t half = KVD_FETCH_TOKENS, n = BLOCKS * BT;
        int fd;

        begin_whole(_i, BLOCKS);
        ck_assert_uint_eq(written, BLOCKS);
        ck_assert_int_eq(fetch_part(0, half, &fd), 0);
        ck_assert_int_eq(fd, -1);
        ck_assert_int_eq(fetch_part(half, 2 * half, &fd), 0);
        ck_assert_int_eq(fetch_part(2 * half, n, &fd), _i ? n : 0); /* servers are asked later */
        ck_assert_int_ge(fd, 0);
        serve();
        close(fd);
        ck_assert_uint_eq(fetched, BLOCKS);
        ck_assert_uint_eq(usage_of(space).sealed, BLOCKS);
        ck_assert_int_eq(fetch_part(0, half, &fd), 0);
        ck_assert_int_eq(fetch_part(half, 2 * half, &fd), 0);
        ck_assert_int_eq(fetch_part(2 * half, n, &fd), n);
        ck_assert_int_eq(fd, -1); /* all of it is resident */
        fixture_close();
}
END_TEST

/* Parts that do not fit together are refused, and forgotten. */
START_TEST(parts_of_a_prefix_follow_one_another) {
        uint32_t half = KVD_FETCH_TOKENS, n = BLOCKS * BT;
        struct fetch_request causal = part(0, half);
        struct space *other;
        int fd;

        begin_whole(true, BLOCKS);
        ck_assert_int_eq(fetch_part(half, n, &fd), -ESTALE);
        ck_assert_int_eq(fetch_part(0, half, &fd), 0);
        ck_assert_int_eq(fetch_part(2 * half, n, &fd), -ESTALE);
        ck_assert_int_eq(fetch_part(half, 2 * half, &fd), -ESTALE);
        ck_assert_int_eq(fetch_part(0, half, &fd), 0);
        ck_assert_int_eq(fetch_part(0, half, &fd), 0); /* begins again */
        for (uint32_t at = half; at < KVD_WHOLE_TOKENS - half; at += half) {
                struct fetch_request q = {.tokens = tokens,
                                          .n_tokens = half,
                                          .before = at,
                                          .more = true};

                ck_assert_int_eq(space_fetch(a, &q, &fd), 0);
        }
        causal.before = KVD_WHOLE_TOKENS / half * half;
        ck_assert_int_eq(space_fetch(a, &causal, &fd), -EINVAL); /* too long */
        ck_assert_int_eq(fetch_part(0, half, &fd), 0);
        ck_assert_uint_eq(fetched, 0);
        attachment_free(a, true); /* in the middle of a prefix */
        check_clean(space);
        other = fixture_space("causal", 0);
        a = fixture_attach(other);
        causal.before = 0;
        ck_assert_int_eq(space_fetch(a, &causal, &fd), -EINVAL);
        check_clean(other);
        fixture_close();
}
END_TEST

START_TEST(a_prefix_that_cannot_come_back_is_not_written) {
        begin_whole(_i, KVD_WHOLE_BLOCKS);
        ck_assert_uint_eq(written, KVD_WHOLE_BLOCKS);
        fixture_close();
        begin_whole(_i, KVD_WHOLE_BLOCKS + 1);
        ck_assert_uint_eq(written, 0);
        check_clean(space);
        fixture_close();
}
END_TEST

/* If the last blocks were written, those before them, which servers refused, never were. */
START_TEST(a_prefix_that_servers_took_in_part_is_written_again) {
        static struct kvd_key names[KVD_REMOTE_ITEMS];
        static int32_t errors[KVD_REMOTE_ITEMS];
        const struct store_remote_question *q = NULL;
        bool later;

        begin(false);
        space = fixture_whole_space("w");
        a = fixture_attach(space);
        seal_chain(KVD_REMOTE_ITEMS * BT, 1000);
        for (uint32_t i = 0; i < 100 && !(q && q->what == STORE_REMOTE_PUT); i++) {
                idle();
                q = store_remote_next(store, &later);
                if (q && q->what == STORE_REMOTE_FIND)
                        take_remote_question(q);
        }
        ck_assert_uint_eq(q->n, KVD_REMOTE_ITEMS);
        errors[1] = -EBUSY;
        store_remote_put(store, names, errors, q->n);
        store->remote->push_pause_ns = 0;
        serve();
        ck_assert_uint_eq(written, KVD_REMOTE_ITEMS - 1);
        check_clean(space);
        fixture_close();
}
END_TEST

/* The path of a block is written in several requests; the process that had the second one dies. */
START_TEST(a_request_that_is_lost_does_not_end_a_path) {
        const struct store_disk_question *q = NULL;
        uint32_t asked = 0;
        bool later;

        begin(true);
        store->file->below.depth = 600 * BT; /* only the last block is admitted */
        seal_chain(600 * BT, 1000);
        for (uint32_t i = 0; i < 1000 && asked < 2; i++) {
                idle();
                q = store_disk_next(store, &later);
                asked += q && q->what == STORE_DISK_WRITE;
                if (q && asked < 2)
                        take_disk_question(q);
        }
        ck_assert_uint_eq(asked, 2);
        store_disk_moved(store, NULL, NULL, 0);
        serve();
        ck_assert_uint_eq(written, 600);
        check_clean(space);
        fixture_close();
}
END_TEST

/* Fetches look only for full blocks. */
START_TEST(a_block_that_is_not_full_is_not_written) {
        begin(_i);
        seal_chain(2 * BT + 1, 1000);
        serve();
        ck_assert_uint_eq(written, 2);
        fixture_close();
}
END_TEST

START_TEST(evict_to_file_counts_blocks_that_cannot_come_back) {
        uint64_t no_return;

        begin(true);
        seal_chain(2 * BT + 1, 1000);
        ck_assert_int_eq(space_demote(space), 1);
        serve();
        ck_assert_int_eq(space_demoted(space, &no_return), 0);
        ck_assert_uint_eq(no_return, 1);
        fixture_close();
}
END_TEST

START_TEST(the_reach_is_in_tokens_and_in_blocks) {
        ck_assert_uint_eq(kvd_fetch_most(7), KVD_FETCH_TOKENS / 7 * 7);
        ck_assert(kvd_fetch_takes(KVD_WHOLE_TOKENS, 256));
        ck_assert(!kvd_fetch_takes(KVD_WHOLE_TOKENS + 1, 256));
        ck_assert(kvd_fetch_takes(KVD_WHOLE_BLOCKS, 1));
        ck_assert(!kvd_fetch_takes(KVD_WHOLE_BLOCKS + 1, 1));
}
END_TEST

SUITE("reach",
      LOOPS(2, a_chain_that_is_refused_does_not_block_others, a_chain_of_any_length_comes_back,
            a_block_that_is_not_full_is_not_written, a_prefix_of_any_length_comes_back,
            a_prefix_that_cannot_come_back_is_not_written),
      TESTS(a_request_that_is_lost_does_not_end_a_path, parts_of_a_prefix_follow_one_another,
            a_prefix_that_servers_took_in_part_is_written_again,
            tokens_are_fetched_behind_a_block_of_their_chain,
            evict_to_file_counts_blocks_that_cannot_come_back,
            the_reach_is_in_tokens_and_in_blocks))
