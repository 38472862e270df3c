/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Another client evicts everything again and again, in a space with 230 attachments, so that each
 * scan of the pins takes long. A process must still find the blocks that it holds.
 */

#include <pthread.h>
#include <stdatomic.h>

#include "client/kvd.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

enum { TOKENS = 4, HANDLES = 5, ATTACHMENTS = 46, LOOKUPS = 20000, STORMS = 200 };

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 32,
                                             .block_tokens = TOKENS,
                                             .dtype = KVD_F32,
                                             .vocab = 1000000};

static struct instance server;
static kvd *handles[HANDLES];
static kvd_space *spaces[HANDLES][ATTACHMENTS];
static atomic_bool over;
static atomic_uint storms;

static void set_up(void) {
        instance_start(&server, SETTINGS("daemon.pool=16M", "daemon.segment=256K"));
        for (int i = 0; i < HANDLES; i++) {
                ck_assert_msg(kvd_open(server.socket, &handles[i]) == 0, "%s", kvd_error());
                for (int k = 0; k < ATTACHMENTS; k++)
                        ck_assert_msg(kvd_space_open(handles[i], "engine", &geometry, NULL,
                                                     &spaces[i][k]) == 0,
                                      "%s", kvd_error());
        }
}

static void tear_down(void) {
        for (int i = 0; i < HANDLES; i++) {
                for (int k = 0; k < ATTACHMENTS; k++)
                        kvd_space_close(spaces[i][k]);
                kvd_close(handles[i]);
        }
        instance_end_clean(&server);
}

static void *storm(void *arg) {
        struct peer_end *p = peer_attach(server.socket);
        struct kvd_msg evict = {.number = KVD_MSG_evict,
                                .evict = {.space = kvd_slice_of("engine")}};

        for (; !atomic_load(&over); atomic_fetch_add(&storms, 1))
                peer_ok(p, evict);
        peer_close(p);
        return NULL;
}

/* Seals a chain of n blocks, and keeps it pinned. */
static void hold(kvd_space *space, uint32_t *tokens, uint32_t n, struct kvd_pin *pin) {
        struct kvd_block blocks[64];

        for (uint32_t i = 0; i < n * TOKENS; i++)
                tokens[i] = 1000 * n + i;
        ck_assert_int_eq(kvd_alloc(space, n, blocks), n);
        ck_assert_msg(kvd_seal(space, pin, n, blocks, tokens, n * TOKENS) == (int)n, "%s",
                      kvd_error());
}

static uint32_t count_misses(kvd_space *space, const uint32_t *tokens, uint32_t n) {
        struct kvd_pin pin = {0};
        uint32_t ids[64];
        bool missed = kvd_lookup(space, 0, tokens, n * TOKENS, ids, n, &pin) != n * TOKENS;

        kvd_unpin(space, &pin);
        return missed;
}

/* The tail is found by single blocks, the long chain by its runs. */
START_TEST(pinned_blocks_are_found_while_others_evict) {
        kvd_space *space = spaces[HANDLES - 1][ATTACHMENTS - 1];
        uint32_t tail[3 * TOKENS], chain[32 * TOKENS], misses = 0, n = 0;
        struct kvd_pin held_tail = {0}, held_chain = {0};
        pthread_t thread;

        hold(space, tail, 3, &held_tail);
        hold(space, chain, 32, &held_chain);
        ck_assert_int_eq(pthread_create(&thread, NULL, storm, NULL), 0);
        while (n < LOOKUPS || atomic_load(&storms) < STORMS) {
                misses += count_misses(space, tail, 3) + count_misses(space, chain, 32);
                n++;
        }
        atomic_store(&over, true);
        pthread_join(thread, NULL);
        ck_assert_msg(misses == 0, "%u of %u lookups missed", misses, 2 * n);
        kvd_unpin(space, &held_tail);
        kvd_unpin(space, &held_chain);
}
END_TEST

SUITE("storm", FIXTURE(set_up, tear_down), TESTS(pinned_blocks_are_found_while_others_evict))
