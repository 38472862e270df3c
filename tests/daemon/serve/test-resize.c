/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Resizing a pool that is in use. A reload grows it as far as its indexes have room, and shrinks it
 * block by block, but takes no pinned block. The bytes of every block that is found or pinned are
 * compared.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "client/kvd.h"
#include "ipc/base/degraded.h"
#include "ipc/base/util.h"
#include "tests/lib/oracle.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define MIB (UINT64_C(1) << 20)
#define BLOCK_TOKENS 16u
#define BLOCK_BYTES 16384u
#define BLOCKS 64u /* of a chain, which fills a segment of 1 MiB */
#define SEED 23u

static struct instance in;
static struct peer_end *watcher;
static kvd *handle;
static kvd_space *space;
static char path[96];

/* ---- a daemon with a configuration that changes ---------------------------------------------- */

static void write_config(const char *pool, const char *rest) {
        FILE *f = fopen(path, "w");

        ck_assert_ptr_nonnull(f);
        fprintf(f, "[daemon]\nbackend = host\npages = small\nsegment = 1M\npool = %s\n%s\n", pool,
                rest);
        fclose(f);
}

static void open_space(void) {
        static const struct kvd_geometry geometry = {.layers = 1,
                                                     .kv_heads = 2,
                                                     .head_dim = 64,
                                                     .block_tokens = BLOCK_TOKENS,
                                                     .dtype = KVD_F32,
                                                     .vocab = 1u << 20};

        ck_assert_msg(kvd_open(in.socket, &handle) == 0, "%s", kvd_error());
        ck_assert_msg(kvd_space_open(handle, "s", &geometry, NULL, &space) == 0, "%s", kvd_error());
        ck_assert_uint_eq(kvd_block_bytes(&geometry), BLOCK_BYTES);
}

static void start_as(bool kept, const char *pool, const char *rest) {
        const char *arguments[] = {"--private", in.dir, "--config", path, kept ? "--keep" : NULL,
                                   NULL};

        instance_make_dir(&in);
        snprintf(path, sizeof path, "%s/kvd.conf", in.dir);
        write_config(pool, rest);
        instance_run(&in, arguments, true);
        watcher = peer_attach(in.socket);
        open_space();
}

static void start(const char *pool, const char *rest) {
        start_as(false, pool, rest);
}

static void stop(void) {
        space = kvd_space_close(space);
        handle = kvd_close(handle);
        watcher = peer_close(watcher);
        instance_end_clean(&in);
}

static void reload(const char *pool, const char *rest) {
        write_config(pool, rest);
        kill(in.pid, SIGHUP);
}

static struct kvd_msg_daemon_info_reply info(void) {
        return peer_ok(watcher, MSG(daemon_info)).daemon_info_reply;
}

static bool needs_restart(void) {
        struct kvd_slice words = info().degraded;
        uint64_t all[KVD_N_DEGRADED];

        ck_assert_uint_eq(words.size, sizeof all);
        memcpy(all, words.data, sizeof all);
        return all[KVD_DEGRADED_restart] > 0;
}

static uint64_t max_blocks(void) {
        return peer_ok(watcher, MSG(space_info)).space_info_reply.max_blocks;
}

/* ---- chains ---------------------------------------------------------------------------------- */

static void tokens_of(uint32_t chain, uint32_t tokens[static BLOCKS * BLOCK_TOKENS]) {
        for (uint32_t i = 0; i < BLOCKS * BLOCK_TOKENS; i++)
                tokens[i] = chain * BLOCKS * BLOCK_TOKENS + i;
}

static void allocate(struct kvd_block *blocks) {
        for (uint32_t n = 0; n < BLOCKS;) {
                int r = kvd_alloc(space, BLOCKS - n, blocks + n);

                ck_assert_msg(r > 0, "%s", kvd_error());
                n += (uint32_t)r;
        }
}

static void fill(uint32_t chains) {
        for (uint32_t c = 0; c < chains; c++) {
                uint32_t tokens[BLOCKS * BLOCK_TOKENS];
                struct kvd_block blocks[BLOCKS];
                struct kvd_pin pin = {0};

                tokens_of(c, tokens);
                allocate(blocks);
                for (uint32_t i = 0; i < BLOCKS; i++)
                        oracle_fill(blocks[i].data, BLOCK_BYTES,
                                    oracle_seed(SEED, tokens, (i + 1) * BLOCK_TOKENS));
                ck_assert_msg(kvd_seal(space, &pin, BLOCKS, blocks, tokens,
                                       BLOCKS * BLOCK_TOKENS) >= 0,
                              "%s", kvd_error());
                kvd_unpin(space, &pin);
        }
}

static void compare(uint32_t chain, uint32_t n, const uint32_t *ids, const struct kvd_pin *pin) {
        uint32_t tokens[BLOCKS * BLOCK_TOKENS];

        tokens_of(chain, tokens);
        for (uint32_t i = 0; i < n; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(pin, ids[i]), BLOCK_BYTES,
                                               oracle_seed(SEED, tokens, (i + 1) * BLOCK_TOKENS)),
                                  0);
}

/* Pins the chain's resident blocks and checks their bytes; returns their number. */
static uint32_t hold(uint32_t chain, uint32_t *ids, struct kvd_pin *pin) {
        uint32_t tokens[BLOCKS * BLOCK_TOKENS];
        int64_t n;

        tokens_of(chain, tokens);
        kvd_catch_up(space);
        n = kvd_lookup(space, 0, tokens, BLOCKS * BLOCK_TOKENS, ids, BLOCKS, pin);
        ck_assert_int_ge(n, 0);
        compare(chain, (uint32_t)(n / BLOCK_TOKENS), ids, pin);
        return (uint32_t)(n / BLOCK_TOKENS);
}

static uint32_t found(uint32_t chains) {
        uint32_t n = 0;

        for (uint32_t c = 0; c < chains; c++) {
                struct kvd_pin pin = {0};
                uint32_t ids[BLOCKS];

                n += hold(c, ids, &pin);
                kvd_unpin(space, &pin);
        }
        return n;
}

/* ---- tests ----------------------------------------------------------------------------------- */

START_TEST(it_grows) {
        start("16M", "pool_most = 64M");
        fill(48);
        ck_assert_uint_le(found(48), 16 * BLOCKS);
        ck_assert_uint_le(info().pool_used, 16 * MIB);
        reload("64M", "pool_most = 64M");
        WAIT_UNTIL(info().pool_bytes == 64 * MIB);
        fill(48);
        ck_assert_uint_eq(found(48), 48 * BLOCKS);
        ck_assert(!needs_restart());
        stop();
}
END_TEST

START_TEST(it_shrinks) {
        start("64M", "");
        fill(48);
        ck_assert_uint_eq(found(48), 48 * BLOCKS);
        reload("16M", "");
        WAIT_UNTIL(info().pool_bytes == 16 * MIB && info().pool_used <= 16 * MIB);
        ck_assert_uint_le(found(48), 16 * BLOCKS);
        fill(8);
        ck_assert_uint_eq(found(8), 8 * BLOCKS);
        ck_assert_uint_le(info().pool_used, 16 * MIB);
        reload("64M", ""); /* the initial size is always possible */
        WAIT_UNTIL(info().pool_bytes == 64 * MIB);
        fill(48);
        ck_assert_uint_eq(found(48), 48 * BLOCKS);
        stop();
}
END_TEST

#define HELD 24u /* chains */

/* Pins the first chains until it is killed, and checks their bytes on request. */
static void holder(int asked, int answers) {
        static uint32_t ids[HELD][BLOCKS];
        struct kvd_pin pins[HELD] = {0};
        char byte = 0;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        open_space();
        for (uint32_t c = 0; c < HELD; c++)
                ck_assert_uint_eq(hold(c, ids[c], &pins[c]), BLOCKS);
        do {
                for (uint32_t c = 0; c < HELD; c++)
                        compare(c, BLOCKS, ids[c], &pins[c]);
        } while (write(answers, &byte, 1) == 1 && read(asked, &byte, 1) == 1);
        _exit(0);
}

/* Pinned blocks stay, and are freed when their holder is killed. */
START_TEST(it_shrinks_around_what_is_held) {
        int asks[2], answers[2];
        char byte = 0;
        pid_t pid;

        ck_assert(pipe(asks) == 0 && pipe(answers) == 0);
        start("64M", "");
        fill(48);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0)
                holder(asks[0], answers[1]);
        close(answers[1]);
        ck_assert_int_eq(read(answers[0], &byte, 1), 1);
        reload("8M", "");
        WAIT_UNTIL(info().pool_bytes == 8 * MIB && info().pool_used <= (HELD + 2) * MIB);
        ck_assert_uint_ge(info().pool_used, HELD * MIB);
        ck_assert_int_eq(write(asks[1], &byte, 1), 1);
        ck_assert_int_eq(read(answers[0], &byte, 1), 1);
        ck_assert_uint_eq(found(HELD), HELD * BLOCKS);
        kill(pid, SIGKILL);
        ck_assert_int_eq(wait_status(pid), 128 + SIGKILL);
        WAIT_UNTIL(info().pool_used <= 8 * MIB);
        fill(4);
        ck_assert_uint_eq(found(4), 4 * BLOCKS);
        stop();
}
END_TEST

/*
 * The indexes have less room than the new size needs. The pool grows up to their limit, and the
 * daemon reports that a restart would give the rest.
 */
START_TEST(more_than_was_planned) {
        start("32M", "pool_most = 48M");
        fill(8);
        reload("64M", "");
        WAIT_UNTIL(needs_restart());
        ck_assert_uint_eq(info().pool_bytes, 48 * MIB);
        ck_assert_uint_eq(found(8), 8 * BLOCKS);
        reload("40M", "pool_most = 48M");
        WAIT_UNTIL(info().pool_bytes == 40 * MIB);
        ck_assert(!needs_restart());
        stop();
}
END_TEST

/* Kills the daemon; its keeper starts the next one, which reads the new configuration. */
static void restart(const char *pool, const char *rest) {
        write_config(pool, rest);
        kill((pid_t)info().pid, SIGKILL);
        watcher = peer_close(watcher);
        watcher = peer_attach(in.socket);
        WAIT_UNTIL(kvd_catch_up(space) >= 0);
}

/* The next daemon drops the blocks that do not fit into its pool, and keeps the others. */
START_TEST(a_restart_with_another_size) {
        uint32_t n;

        start_as(true, "64M", "");
        fill(48);
        restart("16M", "");
        WAIT_UNTIL(info().pool_used <= 16 * MIB);
        ck_assert_uint_ge(found(48), 8 * BLOCKS);
        fill(8);
        ck_assert_uint_eq(found(8), 8 * BLOCKS);
        n = found(48);
        restart("64M", "");
        ck_assert_uint_eq(found(48), n);
        fill(48);
        ck_assert_uint_eq(found(48), 48 * BLOCKS);
        stop();
}
END_TEST

/* Changing a quota or max_blocks resizes the space, too. */
START_TEST(a_quota_that_changes) {
        char large[64], small[64];

        snprintf(large, sizeof large, "[domain d]\nusers = %u\nquota = 32M", getuid());
        snprintf(small, sizeof small, "[domain d]\nusers = %u\nquota = 8M", getuid());
        start("64M", large);
        ck_assert_uint_eq(max_blocks(), 32 * BLOCKS);
        fill(28);
        ck_assert_uint_eq(found(28), 28 * BLOCKS);
        reload("64M", small);
        WAIT_UNTIL(max_blocks() == 8 * BLOCKS && info().pool_used <= 9 * MIB);
        reload("64M", large);
        WAIT_UNTIL(max_blocks() == 32 * BLOCKS);
        fill(28);
        ck_assert_uint_eq(found(28), 28 * BLOCKS);
        peer_ok(watcher, MSG(space_set, .space = kvd_slice_of("s"),
                             .key = kvd_slice_of("max_blocks"), .value = kvd_slice_of("256")));
        WAIT_UNTIL(info().pool_used <= 5 * MIB);
        peer_ok(watcher, MSG(space_set, .space = kvd_slice_of("s"),
                             .key = kvd_slice_of("max_blocks"), .value = kvd_slice_of("0")));
        ck_assert_uint_eq(max_blocks(), 32 * BLOCKS);
        stop();
}
END_TEST

SUITE("resize", TESTS(it_grows, it_shrinks, it_shrinks_around_what_is_held, more_than_was_planned,
                      a_restart_with_another_size, a_quota_that_changes))
