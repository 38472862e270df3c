/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One domain floods the servers or the file with fetches. Fetches of another domain are still
 * accepted and served; so are those of a second client of the same domain.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "store/file/volume.h"
#include "store/file_tier.h"
#include "store/remote_tier.h"
#include "tests/lib/suite.h"
#include "tests/store/fixture.h"

#define CONNECTIONS 6u
#define EACH 40u  /* fetches per connection */
#define BLOCKS 3u /* blocks per chain */
#define EXTENT_BYTES ((uint64_t)DISK_SECTOR + 64 * file_slot_bytes(BLOCK_BYTES, 0))

static struct space *spaces[2]; /* 0: the greedy domain's, 1: the victim's */
static struct attachment *greedy[CONNECTIONS], *victim, *colleague;
static bool files;

/* ---- tiers, which the test plays ------------------------------------------------------------- */

static void open_file(void) {
        struct store_disk_config config = {.there = true, .bytes = FILE_HEAD + EXTENT_BYTES};
        struct file_super supers[FILE_COPIES];

        fixture_super(supers, 1, EXTENT_BYTES);
        supers[1] = supers[0];
        ck_assert_int_eq(store_disk_begin(store, &config), 0);
        store_disk_looked(store, 0, supers, sizeof supers);
}

/* The next read or write of the file, or NULL. Answers superblocks and scans. */
static const struct store_disk_question *asked_of_file(void) {
        const struct store_disk_question *q = NULL;

        for (uint32_t i = 0; i < 1000; i++) {
                idle();
                q = store_disk_next(store, &(bool){false});
                if (q && q->what == STORE_DISK_SUPER)
                        store_disk_told(store, 0);
                else if (q && q->what == STORE_DISK_SCAN)
                        store_disk_scanned(store, 0, 0, NULL, 0);
                else if (q)
                        return q;
        }
        return NULL;
}

static void file_answers(const struct store_disk_question *q, int error) {
        int32_t errors[KVD_DISK_ITEMS];

        for (uint32_t i = 0; i < q->n; i++)
                errors[i] = error;
        store_disk_moved(store, errors, NULL, q->n);
}

/* Answers one question: nothing found. Returns the fetch's space, or NULL if there was none. */
static struct space *serve_one(void) {
        const struct store_remote_question *q;
        struct space *space;

        if (files) {
                const struct store_disk_question *asked = asked_of_file();

                space = asked ? asked->space : NULL;
                if (asked)
                        store_disk_moved(store, NULL, NULL, 0);
                return space;
        }
        q = store_remote_next(store, &(bool){false});
        space = q ? q->space : NULL;
        if (q)
                store_remote_found(store, NULL, 0);
        return space;
}

/* ---- two domains ----------------------------------------------------------------------------- */

static uint32_t tokens[BLOCKS * BT];

static void seal_chain(struct attachment *a) {
        kvd_ref refs[BLOCKS];
        struct seal_request q = {.n_blocks = BLOCKS,
                                 .blocks = refs,
                                 .n_tokens = BLOCKS * BT,
                                 .tokens = tokens};

        ck_assert_int_eq(space_allocate(a, BLOCKS, refs), (int)BLOCKS);
        ck_assert_int_eq(space_seal(a, &q, refs), 0);
}

/* Makes a chain that is in the file, and not in the pool. */
static void write_chain(struct space *space, struct attachment *a) {
        const struct store_disk_question *asked;
        bool more = true;

        seal_chain(a);
        ck_assert_int_eq(space_demote(space), 1);
        asked = asked_of_file();
        ck_assert(asked && asked->what == STORE_DISK_WRITE && asked->n == BLOCKS);
        file_answers(asked, 0);
        while (more)
                space_evict(space, BLOCKS, KVD_ROOT, &more);
}

static void open_domain(uint32_t i, const char *name) {
        const struct domain_config config = {.name = "",
                                             .guarantee = i * 32 * BLOCK_BYTES,
                                             .client_quota = UINT64_MAX};
        struct domain_config named = config;

        snprintf(named.name, sizeof named.name, "%s", name);
        ck_assert_int_eq(store_domain(store, &named, &domain), 0);
        spaces[i] = fixture_space("s", 0);
}

static void begin(bool of_files) {
        files = of_files;
        fixture_open(64, 0);
        for (uint32_t i = 0; i < BLOCKS * BT; i++)
                tokens[i] = 1000 + i;
        if (files)
                open_file();
        else
                ck_assert_int_eq(store_remote_begin(store, &(struct store_remote_config){0}), 0);
        if (files)
                ck_assert_ptr_null(asked_of_file());
        open_domain(0, "greedy");
        open_domain(1, "victim");
        for (uint32_t i = 0; i < CONNECTIONS; i++)
                greedy[i] = fixture_attach(spaces[0]);
        colleague = fixture_attach(spaces[0]);
        victim = fixture_attach(spaces[1]);
        if (files)
                write_chain(spaces[0], greedy[0]);
        if (files)
                write_chain(spaces[1], victim);
        else
                store_remote_servers(store, 1, 0, "");
}

static int64_t fetch(struct attachment *a, uint32_t number) {
        struct fetch_request q = {.n_tokens = BLOCKS * BT, .tokens = tokens};
        uint32_t unknown[BLOCKS * BT];
        int64_t r;
        int fd;

        memcpy(unknown, tokens, sizeof unknown);
        unknown[0] += number; /* a chain that exists nowhere */
        if (!files)
                q.tokens = unknown;
        r = space_fetch(a, &q, &fd);
        ck_assert_int_eq(fd >= 0, r >= 0);
        return r;
}

static void end(void) {
        for (uint32_t i = 0; i < 2; i++)
                check_clean(spaces[i]);
        fixture_close();
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* Six connections once made the fetches of another domain fail. */
START_TEST(a_flood_of_fetches_leaves_others_their_places) {
        uint32_t served = 0;

        begin(_i);
        for (uint32_t i = 0; i < CONNECTIONS * EACH; i++)
                ck_assert_int_ge(fetch(greedy[i % CONNECTIONS], i), 0);
        for (uint32_t i = 0; i < EACH; i++)
                ck_assert_int_ge(fetch(victim, i), 0);
        for (uint32_t i = 0; i < 2; i++)
                check_clean(spaces[i]);
        for (uint32_t i = 0; i < 2 * EACH; i++)
                served += serve_one() == spaces[1];
        ck_assert_uint_ge(served, EACH - 1);
        end();
}
END_TEST

/* A single client could once take all places of its domain. */
START_TEST(a_client_leaves_places_to_its_domain) {
        uint32_t n = 0;
        int64_t r;

        begin(_i);
        while ((r = fetch(greedy[0], n)) >= 0)
                ck_assert_uint_lt(++n, 100000);
        ck_assert_int_eq(r, -EBUSY);
        ck_assert_ptr_nonnull(strstr(store_why(store), "of domain 'greedy' wait already"));
        for (uint32_t i = 0; i < EACH; i++)
                ck_assert_int_ge(fetch(colleague, i), 0);
        for (uint32_t i = 0; i < EACH; i++)
                ck_assert_int_ge(fetch(victim, i), 0);
        end();
}
END_TEST

/* There are 512 places. A client may ask while it has fewer fetches than there are places left. */
START_TEST(all_places_are_given_and_no_more) {
        uint32_t others = (uint32_t)_i / 2, n = 0;

        begin(_i % 2);
        for (uint32_t i = 0; i < others; i++)
                ck_assert_int_ge(fetch(colleague, i), 0);
        while (fetch(greedy[0], n) >= 0)
                ck_assert_uint_lt(++n, 512);
        ck_assert_uint_eq(n, (512 - others + 1) / 2);
        end();
}
END_TEST

static uint64_t waiting(void) {
        struct store_remote_info servers;
        struct store_disk_info disk;

        store_remote_get_info(store, &servers);
        store_disk_get_info(store, &disk);
        return files ? disk.queue : servers.queue;
}

/* A client that asks last is served second. */
START_TEST(clients_of_a_domain_take_turns) {
        uint64_t before;

        begin(_i);
        for (uint32_t i = 0; i < EACH; i++)
                fetch(greedy[0], i);
        fetch(colleague, 0);
        before = waiting();
        ck_assert_uint_eq(before, EACH + 1);
        for (uint32_t i = 0; i < 2; i++)
                ck_assert_ptr_eq(serve_one(), spaces[0]);
        attachment_free(colleague, false); /* its fetches no longer wait */
        ck_assert_uint_eq(waiting(), before - 2);
        end();
}
END_TEST

/* A client that asks after others' turns gets half of the next ones, not all that it missed. */
START_TEST(who_asks_later_makes_up_for_no_turns) {
        begin(_i);
        for (uint32_t i = 0; i < EACH; i++)
                fetch(greedy[0], i);
        for (uint32_t i = 0; i < EACH / 2; i++)
                serve_one();
        for (uint32_t i = 0; i < EACH / 2; i++)
                fetch(colleague, i);
        for (uint32_t i = 0; i < EACH / 2; i++)
                serve_one();
        ck_assert_uint_eq(waiting(), EACH / 2);
        attachment_free(colleague, false);
        ck_assert_uint_eq(waiting(), EACH / 4);
        end();
}
END_TEST

/* Is the next question a write of that space's chain? Answers other questions. */
static bool is_written_next(const struct space *space) {
        if (!files) {
                const struct store_remote_question *q = store_remote_next(store, &(bool){false});

                ck_assert_ptr_nonnull(q);
                if (q->what == STORE_REMOTE_FIND)
                        store_remote_found(store, NULL, 0);
                return q->what == STORE_REMOTE_PUT && q->space == space;
        } else {
                const struct store_disk_question *q = asked_of_file();

                ck_assert_ptr_nonnull(q);
                if (q->what == STORE_DISK_READ)
                        store_disk_moved(store, NULL, NULL, 0);
                return q->what == STORE_DISK_WRITE && q->space == space;
        }
}

/* Once, no block was written while fetches waited. */
START_TEST(blocks_are_written_during_a_flood_of_fetches) {
        uint32_t questions = 0;

        begin(_i);
        for (uint32_t i = 0; i < 2 * EACH; i++)
                fetch(greedy[i % CONNECTIONS], i);
        tokens[0]++;
        seal_chain(victim);
        idle();
        while (!is_written_next(spaces[1]))
                ck_assert_uint_lt(++questions, EACH);
        ck_assert_uint_ge(waiting(), EACH);
        end();
}
END_TEST

SUITE("fetch-turns",
      LOOPS(2, a_flood_of_fetches_leaves_others_their_places, a_client_leaves_places_to_its_domain,
            clients_of_a_domain_take_turns, who_asks_later_makes_up_for_no_turns,
            blocks_are_written_during_a_flood_of_fetches),
      LOOPS(6, all_places_are_given_and_no_more))
