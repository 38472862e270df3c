/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Edge cases of calls: calls in a forked child are all refused and do no harm; a lease that another
 * client holds; a stock that grows; sequences that cannot be opened.
 */

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/deadline.h"
#include "client/kvd.h"
#include "client/kvd_attend.h"
#include "client/kvd_cuda.h"
#include "client/kvd_methods.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/emulated.h"
#include "tests/lib/instance.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/suite.h"

enum { TOKENS = 4, BLOCKS = 4096 };

static struct instance server;
static kvd *handle;
static kvd_space *space, *whole, *keyed;

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 32,
                                             .block_tokens = TOKENS,
                                             .dtype = KVD_F32,
                                             .vocab = 1000};
static const struct kvd_geometry opaque = {.block_tokens = TOKENS,
                                           .block_bytes = 1024,
                                           .layout = "objects"};
static const uint32_t tokens[2 * TOKENS];

static void set_up(void) {
        const struct kvd_space_options of_whole = {.kind = KVD_BIDIRECTIONAL};

        instance_start(&server, SETTINGS("daemon.pool=16M", "daemon.segment=256K"));
        ck_assert_int_eq(kvd_open(server.socket, &handle), 0);
        ck_assert_int_eq(kvd_space_open(handle, "s", &geometry, NULL, &space), 0);
        ck_assert_int_eq(kvd_space_open(handle, "whole", &geometry, &of_whole, &whole), 0);
        ck_assert_int_eq(kvd_space_open(handle, "keyed", &opaque, NULL, &keyed), 0);
}

static void tear_down(void) {
        keyed = kvd_space_close(keyed);
        whole = kvd_space_close(whole);
        space = kvd_space_close(space);
        handle = kvd_close(handle);
        instance_end_clean(&server);
}

/* ---- a daemon that is away -------------------------------------------------------------------- */

static int frozen_ns(uint64_t *ns) {
        *ns = 1;
        return 0;
}

/* After a failure it waits, but not once another call has met the next daemon. */
START_TEST(a_client_that_has_attached_catches_up) {
        struct kvd_sys frozen = *sys;
        const struct kvd_sys *before = sys;
        struct kvd_block block;

        instance_kill(&server);
        frozen.clock_ns = frozen_ns;
        sys = &frozen;
        while (kvd_catch_up(space) == 0)
                ; /* the connection looks open until the kernel has torn down the daemon's io_uring */
        ck_assert_int_eq(kvd_catch_up(space), -EAGAIN);
        sys = before;
        instance_again(&server, SETTINGS("daemon.pool=16M", "daemon.segment=256K"));
        sys = &frozen;
        ck_assert_int_eq(kvd_catch_up(space), -EAGAIN);
        ck_assert_int_eq(kvd_alloc(space, 1, &block), 1);
        ck_assert_int_eq(kvd_catch_up(space), 0);
        kvd_free(space, 1, &block);
        sys = before;
}
END_TEST

/* ---- forked children ------------------------------------------------------------------------- */

/* What a caller may hold when it forks. */
struct held {
        kvd_sequence *sequence;
        kvd_follow *follow;
        struct kvd_block blocks[2], more, own; /* own: the sequence's */
        struct kvd_pin pin;
};

static void pass_stored(void *arg, const struct kvd_stored *block) {
        (void)arg;
        (void)block;
}

static const struct kvd_follow_ops pass = {.stored = pass_stored};

static void take_everything(struct held *h) {
        *h = (struct held){.sequence = NULL};
        ck_assert_int_eq(kvd_follow_begin(space, &pass, NULL, &h->follow), 0);
        ck_assert_int_eq(kvd_sequence_open(space, 4, &h->sequence), 0);
        ck_assert_int_eq(kvd_alloc(space, 2, h->blocks), 2);
        ck_assert_int_eq(kvd_alloc(space, 1, &h->more), 1);
        ck_assert_int_eq(kvd_alloc(space, 1, &h->own), 1);
        ck_assert_int_eq(kvd_sequence_append(h->sequence, 1, &h->own, tokens, TOKENS), 1);
        ck_assert_int_eq(kvd_seal(space, &h->pin, 2, h->blocks, tokens, 2 * TOKENS), 2);
}

static void give_everything_back(struct held *h) {
        kvd_unpin(space, &h->pin);
        kvd_free(space, 1, &h->more);
        kvd_sequence_close(h->sequence);
        kvd_follow_end(h->follow);
}

/* Returns how many of these calls were not refused as a child's, and prints each. */
static int calls_that_go_on(struct held *h) {
        const struct kvd_table table = {h->more.view, &h->more.id, 1, 0, 1};
        const struct kvd_heads heads = {.heads = 1, .scale = 1};
        const struct kvd_seen seen = {.sequence = h->sequence};
        struct kvd_pin pins[2] = {{0}};
        struct kvd_space_memory memory;
        struct DLManagedTensor *tensor;
        struct kvd_layer_view layer;
        struct kvd_place place;
        kvd_sequence *sequence;
        struct kvd_block block;
        static float floats[64];
        struct kvd_sequence_stats stats;
        uint8_t bytes[8];
        uint32_t ids[2], slot = 0;
        kvd_space *other;
        kvd_follow *follow;
        int fd, n = 0;

#define REFUSED(call) \
        (call) == -ECHILD ? (void)0 : (void)(n++, fprintf(stderr, "in a child: %s\n", #call))
        REFUSED(kvd_join(handle, (const uint8_t[16]){1}));
        REFUSED(kvd_space_open(handle, "other", &geometry, NULL, &other));
        REFUSED(kvd_space_memory(space, &memory));
        REFUSED(kvd_space_place(space, &place));
        REFUSED(kvd_alloc(space, 1, &block));
        REFUSED(kvd_reserve(space, 8));
        REFUSED(kvd_available(space));
        REFUSED(kvd_lookup(space, 0, tokens, TOKENS, ids, 2, pins));
        REFUSED(kvd_fetch(space, 0, 0, tokens, TOKENS, &fd));
        REFUSED(kvd_catch_up(space));
        REFUSED(kvd_seal(space, pins, 1, &h->more, tokens, TOKENS));
        REFUSED(kvd_seal_on(space, pins, 1, &h->more, tokens, TOKENS, NULL));
        REFUSED(kvd_lookup_keys(keyed, "0123456789abcdef", 1, 1, ids, pins));
        REFUSED(kvd_seal_key(keyed, "0123456789abcdef", 1, &h->more, pins));
        REFUSED(kvd_post_key(keyed, 0, "0123456789abcdef", 1, &h->more));
        REFUSED(kvd_fetch_key(keyed, 0, "0123456789abcdef", 1, &fd));
        REFUSED(kvd_lease(whole, tokens, TOKENS, 0));
        REFUSED(kvd_lease_end(whole, tokens, TOKENS));
        REFUSED(kvd_session(space, "agent", KVD_KEEP_HIGH, 60, pins, 1));
        REFUSED(kvd_session_end(space, "agent"));
        REFUSED(kvd_follow_begin(space, &pass, NULL, &follow));
        REFUSED(kvd_follow_step(h->follow));
        REFUSED(kvd_space_set(space, "keydiff", 1));
        REFUSED(kvd_sequence_open(space, 1, &sequence));
        REFUSED(kvd_sequence_append(h->sequence, 1, &h->more, tokens, TOKENS));
        REFUSED(kvd_sequence_borrow(h->sequence, &h->pin, 1, ids, tokens));
        REFUSED(kvd_sequence_step(h->sequence, 0, 1));
        REFUSED(kvd_sequence_sync(h->sequence));
        REFUSED(kvd_sequence_wait(h->sequence, 0));
        REFUSED(kvd_sequence_cool(h->sequence, 1, &slot, KVD_COOL_VAGUE));
        REFUSED(kvd_sequence_revive(h->sequence, 1, &slot, KVD_REVIVE_EXACT));
        REFUSED(kvd_sequence_compact(h->sequence, 0, 1, 1, NULL));
        REFUSED(kvd_sequence_compact(h->sequence, 0, 1, 1, &(struct kvd_scores){&h->more, 1}));
        REFUSED(kvd_sequence_critical(h->sequence, 1, &h->more, 1, 1, 1));
        REFUSED(kvd_sequence_sharing(h->sequence, bytes, bytes));
        kvd_sequence_use(h->sequence, 0, 1, 1);
        kvd_sequence_stats(h->sequence, &stats);
        n += stats.resident != 1 || stats.resident_bytes != 0;
        REFUSED(kvd_prefix_depth(space, 1, 1, 0));
        REFUSED(kvd_post(space, &h->pin, 1, &h->more, tokens, TOKENS));
        REFUSED(kvd_flush(space));
        REFUSED(kvd_match(space, 0, tokens, TOKENS));
        REFUSED(kvd_prefix_sample(space, 1, 1, &h->more, TOKENS));
        REFUSED(kvd_paged_write(space, 0, &table, floats, floats, 32));
        REFUSED(kvd_paged_attention(space, 0, &table, &heads, floats, 32, floats, 32));
        REFUSED(kvd_sequence_attention(&seen, 0, &table, &heads, floats, 32, floats, 32));
        REFUSED(kvd_wait_on(space, &h->pin, NULL));
        REFUSED(kvd_check_pin(space, &h->pin));
        REFUSED(kvd_layer_view(space, 0, &layer));
        REFUSED(kvd_dlpack_block(space, &h->pin, 0, &tensor));
        REFUSED(kvd_dlpack_memory(space, &tensor));
#undef REFUSED
        return n;
}

/* The child releases everything, too, and what the parent holds is unchanged. */
START_TEST(a_forked_child_is_refused_everywhere) {
        struct held h;
        uint32_t ids[2];
        pid_t pid;

        take_everything(&h);
        pid = check_fork();
        if (pid == 0) {
                int n = calls_that_go_on(&h);

                give_everything_back(&h);
                kvd_settle(space);
                _exit(n);
        }
        ck_assert_int_eq(wait_status(pid), 0);
        kvd_unpin(space, &h.pin);
        ck_assert_int_eq(kvd_lookup(space, 0, tokens, 2 * TOKENS, ids, 2, &h.pin), 2 * TOKENS);
        memset(h.more.data, 1, kvd_block_bytes(&geometry));
        give_everything_back(&h);
}
END_TEST

/* ---- time ------------------------------------------------------------------------------------ */

/* Earlier calls of this thread used up all the time that a call has. */
START_TEST(each_call_has_its_own_timeout) {
        uint32_t slot = 0, own_tokens[1] = {0};
        uint8_t bytes[8];
        struct held h;
        int fd;

        take_everything(&h);
#define HAS_TIME(call) \
        do { \
                deadline_of_call = 1; \
                ck_assert_int_ne((call), -ETIMEDOUT); \
        } while (0)
        HAS_TIME(kvd_reserve(space, 8));
        HAS_TIME(kvd_available(space));
        HAS_TIME(kvd_fetch(space, 0, 0, tokens, TOKENS, &fd));
        HAS_TIME(kvd_lease(whole, tokens, TOKENS, 0));
        HAS_TIME(kvd_lease_end(whole, tokens, TOKENS));
        HAS_TIME(kvd_flush(space));
        HAS_TIME(kvd_follow_step(h.follow));
        HAS_TIME(kvd_prefix_depth(space, 1, 1, 0));
        HAS_TIME(kvd_space_set(space, "memshare", 1));
        HAS_TIME(kvd_sequence_step(h.sequence, 0, 1));
        HAS_TIME(kvd_sequence_sync(h.sequence));
        HAS_TIME(kvd_sequence_cool(h.sequence, 1, &slot, KVD_COOL_VAGUE));
        HAS_TIME(kvd_sequence_revive(h.sequence, 1, &slot, KVD_REVIVE_EXACT));
        HAS_TIME(kvd_sequence_compact(h.sequence, 0, 1, 1, NULL));
        HAS_TIME(kvd_sequence_compact(h.sequence, 0, 1, 1, &(struct kvd_scores){&h.more, 1}));
        HAS_TIME(kvd_sequence_critical(h.sequence, 1, &h.more, 1, 1, 1));
        HAS_TIME(kvd_sequence_sharing(h.sequence, bytes, bytes));
        HAS_TIME(kvd_sequence_borrow(h.sequence, &h.pin, 1, own_tokens, tokens));
#undef HAS_TIME
        memset(h.more.data, 1, kvd_block_bytes(&geometry));
        give_everything_back(&h);
}
END_TEST

/* ---- leases ---------------------------------------------------------------------------------- */

static void *wait_for_the_lease(void *arg) {
        return (void *)(intptr_t)kvd_lease(arg, tokens, TOKENS, 60000);
}

/* A waiting client gets the lease when it ends, long before the timeout. */
START_TEST(a_client_waits_for_a_lease) {
        const struct kvd_space_options of_whole = {.kind = KVD_BIDIRECTIONAL};
        kvd_space *other;
        kvd *second;
        pthread_t thread;
        void *got;

        ck_assert_int_eq(kvd_open(server.socket, &second), 0);
        ck_assert_int_eq(kvd_space_open(second, "whole", &geometry, &of_whole, &other), 0);
        ck_assert_int_eq(kvd_lease(whole, tokens, TOKENS, 0), 1);
        ck_assert_int_eq(kvd_lease(other, tokens, TOKENS, 0), -EBUSY);
        ck_assert_int_eq(pthread_create(&thread, NULL, wait_for_the_lease, other), 0);
        usleep(100000); /* it waits by then, or this test proves nothing */
        ck_assert_int_eq(kvd_lease_end(whole, tokens, TOKENS), 0);
        ck_assert_int_eq(pthread_join(thread, &got), 0);
        ck_assert_int_eq((int)(intptr_t)got, 1);
        ck_assert_int_eq(kvd_lease(whole, tokens, TOKENS, 0), -EBUSY);
        ck_assert_int_eq(kvd_lease_end(other, tokens, TOKENS), 0);
        kvd_space_close(other);
        kvd_close(second);
}
END_TEST

/* ---- the stock ------------------------------------------------------------------------------- */

START_TEST(a_stock_that_grows_loses_nothing) {
        static struct kvd_block blocks[2000];
        static uint8_t seen[1 << 16];

        ck_assert_int_eq(kvd_reserve(space, 100), 100);
        ck_assert_int_eq(kvd_reserve(space, 2000), 2000);
        ck_assert_int_eq(kvd_alloc(space, 2000, blocks), 2000);
        for (uint32_t i = 0; i < 2000; i++) {
                ck_assert_uint_lt(blocks[i].id, sizeof seen);
                ck_assert_uint_eq(seen[blocks[i].id]++, 0);
                ck_assert_uint_ne(blocks[i].generation, 0);
                memset(blocks[i].data, 1, 16);
        }
        kvd_free(space, 2000, blocks);
}
END_TEST

/* ---- sequences ------------------------------------------------------------------------------- */

START_TEST(impossible_sequences_are_refused) {
        kvd_sequence *sequence, *all[2000];
        uint32_t n = 0;
        int r = 0;

        ck_assert_int_eq(kvd_sequence_open(space, 0, &sequence), -EINVAL);
        ck_assert_int_eq(kvd_sequence_open(whole, 1, &sequence), -EINVAL);
        if (!SANITIZED) /* AddressSanitizer kills a process that allocates this much */
                ck_assert_int_lt(kvd_sequence_open(space, UINT32_MAX, &sequence), 0);
        while (n < ARRAY_SIZE(all) && r == 0) {
                r = kvd_sequence_open(space, 1 << 16, &all[n]);
                n += r == 0;
        }
        ck_assert_msg(r < 0, "%u sequences of 65,536 blocks", n);
        while (n)
                kvd_sequence_close(all[--n]);
}
END_TEST

/* Only existing blocks can be borrowed, and the pin holds them. */
START_TEST(missing_prefixes_are_not_borrowed) {
        const uint32_t nowhere[] = {UINT32_MAX};
        struct kvd_pin pin = {0}, none = {0};
        struct kvd_block blocks[2];
        kvd_sequence *sequence;
        uint32_t ids[2], n;

        ck_assert_int_eq(kvd_alloc(space, 2, blocks), 2);
        memset(blocks[0].data, 1, 16);
        memset(blocks[1].data, 1, 16);
        ck_assert_int_eq(kvd_seal(space, &pin, 2, blocks, tokens, 2 * TOKENS), 2);
        kvd_unpin(space, &pin);
        ck_assert_int_eq(kvd_lookup(space, 0, tokens, 2 * TOKENS, ids, 2, &pin), 2 * TOKENS);
        ck_assert_int_eq(kvd_sequence_open(space, 4, &sequence), 0);
        ck_assert_int_eq(kvd_sequence_borrow(sequence, &pin, 1, nowhere, tokens), -EINVAL);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "there is no block"));
        ck_assert_int_eq(kvd_sequence_borrow(sequence, &none, 2, ids, tokens), -ESTALE);
        ck_assert_int_eq(kvd_sequence_borrow(sequence, &pin, 2, ids, tokens), 0);
        kvd_sequence_entries(sequence, &n);
        ck_assert_uint_eq(n, 2);
        kvd_sequence_close(sequence);
        kvd_unpin(space, &pin);
}
END_TEST

/* ---- vocabularies ---------------------------------------------------------------------------- */

enum { CHAIN = 40 }; /* blocks: two runs, and a tail */

static const struct words {
        uint32_t vocabulary, block_tokens;
} words_of[] = {{0, TOKENS},      {2, TOKENS},      {1000, TOKENS},   {65536, TOKENS},
                {65537, TOKENS},  {200000, TOKENS}, {262208, TOKENS}, {5000000, TOKENS},
                {UINT32_MAX, 16}, {200000, 16},     {128256, 5},      {0, 256},
                {65536, 256},     {5000000, 256}};

static kvd_space *space_of_words(const struct words *of) {
        struct kvd_geometry words = opaque;
        kvd_space *ret;

        words.vocab = of->vocabulary;
        words.block_tokens = of->block_tokens;
        ck_assert_int_eq(kvd_space_open(handle, "words", &words, NULL, &ret), 0);
        return ret;
}

static void seal_chain(kvd_space *words, const uint32_t *chain, uint32_t n, uint32_t *ids) {
        struct kvd_block blocks[CHAIN];
        struct kvd_pin pin = {0};

        ck_assert_int_eq(kvd_alloc(words, CHAIN, blocks), CHAIN);
        for (uint32_t i = 0; i < CHAIN; i++)
                memset(blocks[i].data, 1, opaque.block_bytes);
        ck_assert_int_eq(kvd_seal(words, &pin, CHAIN, blocks, chain, n), CHAIN);
        for (uint32_t i = 0; i < CHAIN; i++)
                ids[i] = blocks[i].id;
        kvd_unpin(words, &pin);
}

/* Number of blocks of the chain that are found. They must be its first blocks. */
static uint32_t blocks_found(kvd_space *words, const uint32_t *chain, uint32_t n,
                             const uint32_t *ids) {
        struct kvd_pin pin = {0};
        uint32_t found[CHAIN];
        int64_t tokens_found = kvd_lookup(words, 0, chain, n, found, CHAIN, &pin);
        uint32_t blocks = (uint32_t)tokens_found / (n / CHAIN);

        ck_assert_int_eq(tokens_found, (int64_t)blocks * (n / CHAIN));
        ck_assert_mem_eq(found, ids, blocks * sizeof *ids);
        kvd_unpin(words, &pin);
        return blocks;
}

/*
 * Only the blocks before the changed token are found, whichever bit is changed. Runs store a token
 * in no more bits than it needs.
 */
START_TEST(every_bit_of_a_token_counts) {
        const struct words *of = &words_of[_i];
        uint32_t n = CHAIN * of->block_tokens, ids[CHAIN], *chain = calloc(n, sizeof *chain);
        kvd_space *words = space_of_words(of);

        for (uint32_t i = 0; i < n; i++)
                chain[i] = of->vocabulary ? (i * 2654435761u) % of->vocabulary : i * 2654435761u;
        seal_chain(words, chain, n, ids);
        for (uint32_t i = 0; i < n; i += n / 12 + 1)
                for (uint32_t bit = 0; bit < 32; bit++) {
                        chain[i] ^= 1u << bit;
                        ck_assert_uint_eq(blocks_found(words, chain, n, ids), i / of->block_tokens);
                        chain[i] ^= 1u << bit;
                }
        ck_assert_uint_eq(blocks_found(words, chain, n, ids), CHAIN);
        kvd_space_close(words);
        free(chain);
}
END_TEST

SUITE("calls", FIXTURE(set_up, tear_down),
      WHEN(!emulated("MADV_WIPEONFORK has no effect"), TESTS(a_forked_child_is_refused_everywhere)),
      TESTS(a_client_that_has_attached_catches_up, each_call_has_its_own_timeout,
            a_client_waits_for_a_lease, a_stock_that_grows_loses_nothing,
            impossible_sequences_are_refused, missing_prefixes_are_not_borrowed),
      LOOPS(14, every_bit_of_a_token_counts))
