/* SPDX-License-Identifier: Apache-2.0 */

/* Code that tests of the file tier share. */

#include "tests/daemon/children/file_tier.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/daemon/children/fetched.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

struct instance in;
struct peer_end *watcher;
char file[128];
const char *pool = "daemon.pool=4M", *file_size = "daemon.file_size=16M";
const char *depth = "daemon.file_depth=0", *timeout = "daemon.file_timeout=1800";
kvd *handle;
kvd_space *space;
bool opaque;
uint32_t max_blocks, kind, n_tokens = BLOCKS * BLOCK_TOKENS;
uint32_t tokens[BLOCKS * BLOCK_TOKENS];

/* ---- a daemon with a file -------------------------------------------------------------------- */

const char *const *settings(void) {
        static char file_setting[160];
        static const char *list[8];

        snprintf(file_setting, sizeof file_setting, "daemon.file=%s", file);
        memcpy(list, SETTINGS(pool, "daemon.segment=1M", file_setting, file_size, depth, timeout),
               7 * sizeof *list);
        return list;
}

struct kvd_msg_tier_info_reply tier_of(uint32_t number) {
        return peer_ok(watcher, MSG(tier_info, .tier = number)).tier_info_reply;
}

struct kvd_msg_tier_info_reply tier(void) {
        return tier_of(0);
}

bool tier_is(const char *state) {
        return kvd_slice_is(tier().state, state);
}

void connect_to_it(void) {
        static const struct kvd_geometry planes = {.layers = 1,
                                                   .kv_heads = 2,
                                                   .head_dim = 64,
                                                   .block_tokens = BLOCK_TOKENS,
                                                   .dtype = KVD_F32,
                                                   .vocab = 1u << 20};
        static const struct kvd_geometry bytes = {.block_bytes = BLOCK_BYTES,
                                                  .block_tokens = BLOCK_TOKENS,
                                                  .layout = "test.v1"};
        const struct kvd_geometry *geometry = opaque ? &bytes : &planes;
        const struct kvd_space_options options = {.max_blocks = max_blocks, .kind = kind};

        ck_assert_msg(kvd_open(in.socket, &handle) == 0, "%s", kvd_error());
        ck_assert_msg(kvd_space_open(handle, "s", geometry, &options, &space) == 0, "%s",
                      kvd_error());
        ck_assert_uint_eq(kvd_block_bytes(geometry), BLOCK_BYTES);
}

void start_again(const char *state) {
        instance_again(&in, settings());
        watcher = peer_attach(in.socket);
        WAIT_UNTIL(tier_is(state));
        connect_to_it();
}

void leave_it(void) {
        space = kvd_space_close(space);
        handle = kvd_close(handle);
        watcher = peer_close(watcher);
}

void start(void) {
        instance_make_dir(&in);
        pool = "daemon.pool=4M";
        file_size = "daemon.file_size=16M";
        depth = "daemon.file_depth=0";
        timeout = "daemon.file_timeout=1800";
        snprintf(file, sizeof file, "/var/tmp/kvd-test-file-%d", getpid());
        unlink(file);
        start_again("on");
        for (uint32_t i = 0; i < ARRAY_SIZE(tokens); i++)
                tokens[i] = 1000 + i;
}

void stop(void) {
        leave_it();
        instance_end_clean(&in);
        unlink(file);
}

void restart(bool kill) {
        leave_it();
        if (kill)
                instance_kill(&in);
        else
                instance_stop(&in);
        start_again("on");
}

/* ---- chains ---------------------------------------------------------------------------------- */

/* Seed of a block's bytes, which in a bidirectional space depend on all tokens of the prefix. */
static uint64_t seed_of(const uint32_t *of, uint32_t block) {
        return kind == KVD_BIDIRECTIONAL ? oracle_seed(SEED + block, of, n_tokens) :
                                           oracle_seed(SEED, of, (block + 1) * BLOCK_TOKENS);
}

void make_chain(const uint32_t *of) {
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};
        uint32_t n = 0;

        while (n < BLOCKS) {
                int r = kvd_alloc(space, BLOCKS - n, blocks + n);

                ck_assert_msg(r > 0, "%s", kvd_error());
                n += (uint32_t)r;
        }
        for (uint32_t i = 0; i < BLOCKS; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, seed_of(of, i));
        ck_assert_msg(kvd_seal(space, &pin, BLOCKS, blocks, of, n_tokens) >= 0, "%s", kvd_error());
        kvd_unpin(space, &pin);
}

/* Returns the number of resident blocks; checks their bytes. */
uint32_t resident(const uint32_t *of) {
        struct kvd_pin pin = {0};
        uint32_t ids[BLOCKS], n_blocks;
        int64_t n;

        kvd_catch_up(space);
        n = kvd_lookup(space, 0, of, n_tokens, ids, BLOCKS, &pin);
        ck_assert_int_ge(n, 0);
        n_blocks = DIV_UP((uint32_t)n, BLOCK_TOKENS);
        for (uint32_t i = 0; i < n_blocks; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, ids[i]), BLOCK_BYTES,
                                               seed_of(of, i)),
                                  0);
        kvd_unpin(space, &pin);
        return n_blocks;
}

/* Waits until the fetch has ended. Returns the number of tokens that kvd_fetch promised. */
int64_t fetch(const uint32_t *of) {
        int fd;
        int64_t n = kvd_fetch(space, 0, 0, of, n_tokens, &fd);

        fetch_ended(n, fd);
        return n;
}

/* Returns the tokens that lower tiers have behind the resident ones, as a lookup reports them. */
uint32_t below_salted(const uint32_t *of, uint64_t salt) {
        struct kvd_pin pin = {.salt = salt};
        uint32_t ids[BLOCKS], n;

        ck_assert_int_ge(kvd_lookup(space, 0, of, n_tokens, ids, BLOCKS, &pin), 0);
        n = pin.n_below;
        kvd_unpin(space, &pin);
        return n;
}

uint32_t below(const uint32_t *of) {
        return below_salted(of, 0);
}

void evict_all(void) {
        struct kvd_msg_evict_reply r;

        do {
                r = peer_ok(watcher, MSG(evict, .space = kvd_slice_of("s"))).evict_reply;
        } while (r.more);
}

void write_chain(void) {
        make_chain(tokens);
        WAIT_UNTIL(tier().records == BLOCKS);
        WAIT_UNTIL(tier().written_bytes >= BLOCKS * (uint64_t)RECORD_BYTES);
}

void rot(const uint32_t *of, uint32_t block) {
        int fd = open(file, O_RDWR | O_CLOEXEC);
        uint8_t byte[4096];
        uint32_t n = 0;

        ck_assert_int_ge(fd, 0);
        for (off_t at = 128 << 10; at < 4 << 20; at += 4096) {
                ck_assert_int_eq(pread(fd, byte, sizeof byte, at), sizeof byte);
                if (oracle_wrong(byte, sizeof byte, seed_of(of, block)))
                        continue;
                byte[77] ^= 1;
                ck_assert_int_eq(pwrite(fd, byte, sizeof byte, at), sizeof byte);
                n++;
        }
        close(fd);
        ck_assert_uint_ge(n, 1); /* replaced records may still be in the file */
}

bool is_erased(void) {
        struct kvd_msg m = peer_call(watcher, MSG(space_delete, .space = kvd_slice_of("s")));

        return m.number == KVD_MSG_error ? m.error.code == ENOENT : !m.space_delete_reply.erasing;
}
