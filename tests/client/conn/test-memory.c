/* SPDX-License-Identifier: Apache-2.0 */

/*
 * For engines with their own block tables: where blocks lie, that sealed blocks are read-only,
 * fixed addresses, ascending ids, reserved blocks, the number of available blocks, and seals that
 * keep duplicates. Two clients, `ours` and `other`, use one daemon.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/conn/deadline.h"
#include "client/gpu/dlpack.h"
#include "client/kvd.h"
#include "client/kvd_cuda.h"
#include "client/kvd_methods.h"
#include "ipc/base/util.h"
#include "tests/lib/addresses.h"
#include "tests/lib/emulated.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"
#include "tests/lib/sanitized.h"
#include "tests/lib/suite.h"
#include "tests/lib/waits.h"

/* STOCK: number of blocks in the stock after a seal, and minimum number per request */
enum { TOKENS = 4, BLOCKS = 4096, STOCK = BLOCKS / 64, BLOCK_BYTES = 2 * TOKENS * 32 * 4 };

struct client {
        kvd *handle;
        kvd_space *space;
};

static struct instance server;
static struct client ours, other;

static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 1,
                                             .head_dim = 32,
                                             .block_tokens = TOKENS,
                                             .dtype = KVD_F32,
                                             .vocab = 1000000};

static struct client client_open_with(uint32_t flags, uint64_t max_blocks) {
        const struct kvd_space_options options = {.max_blocks = max_blocks, .flags = flags};
        struct client c;

        ck_assert_msg(kvd_open(server.socket, &c.handle) == 0, "%s", kvd_error());
        ck_assert_msg(kvd_space_open(c.handle, "engine", &geometry, &options, &c.space) == 0, "%s",
                      kvd_error());
        return c;
}

static struct client client_open(void) {
        return client_open_with(0, BLOCKS);
}

static void client_close(struct client *c) {
        kvd_space_close(c->space);
        kvd_close(c->handle);
}

static void set_up(void) {
        instance_start(&server, SETTINGS("daemon.pool=16M", "daemon.segment=256K"));
        ours = client_open();
        other = client_open();
}

static void tear_down(void) {
        client_close(&ours);
        client_close(&other);
        instance_end_clean(&server);
}

/* Tokens of chain `number`. No two chains have a block in common. */
static void make_tokens(uint32_t number, uint32_t n, uint32_t *tokens) {
        for (uint32_t i = 0; i < n * TOKENS; i++)
                tokens[i] = i < TOKENS ? number : i;
}

static void take(struct client *c, uint32_t n, struct kvd_block *blocks) {
        ck_assert_msg(kvd_alloc(c->space, n, blocks) == (int)n, "%s", kvd_error());
}

/* Publishes n blocks of a chain, filled by the oracle, and pins them. */
static void publish(struct client *c, uint32_t number, uint32_t n, struct kvd_pin *pin) {
        uint32_t *tokens = calloc(n, TOKENS * sizeof *tokens);
        struct kvd_block *blocks = calloc(n, sizeof *blocks);

        make_tokens(number, n, tokens);
        take(c, n, blocks);
        for (uint32_t i = 0; i < n; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, oracle_seed(1, tokens, (i + 1) * TOKENS));
        ck_assert_msg(kvd_seal(c->space, pin, n, blocks, tokens, n * TOKENS) == (int)n, "%s",
                      kvd_error());
        free(blocks);
        free(tokens);
}

/* Looks up the chain; every byte must be the oracle's. Returns the number of blocks found. */
static uint32_t found(struct client *c, uint32_t number, uint32_t n) {
        uint32_t *tokens = calloc(n, TOKENS * sizeof *tokens), *ids = calloc(n, sizeof *ids),
                 blocks;
        struct kvd_pin pin = {0};

        make_tokens(number, n, tokens);
        ck_assert_int_eq(kvd_catch_up(c->space), 0);
        ck_assert_int_ge(kvd_lookup(c->space, 0, tokens, n * TOKENS, ids, n, &pin), 0);
        for (uint32_t i = 0; i < pin.n_blocks; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, ids[i]), BLOCK_BYTES,
                                               oracle_seed(1, tokens, (i + 1) * TOKENS)),
                                  0);
        blocks = pin.n_blocks;
        kvd_unpin(c->space, &pin);
        free(ids);
        free(tokens);
        return blocks;
}

/* ---- where blocks lie ------------------------------------------------------------------------ */

START_TEST(memory_is_one_range) {
        struct kvd_space_memory before, after;
        struct kvd_block blocks[1000];

        ck_assert_int_eq(kvd_space_memory(ours.space, &before), 0);
        ck_assert_uint_eq(before.block_bytes, BLOCK_BYTES);
        ck_assert_uint_ge(before.blocks, BLOCKS);
        ck_assert_uint_eq(before.mapped, 0);
        take(&ours, 1000, blocks);
        ck_assert_int_eq(kvd_space_memory(ours.space, &after), 0);
        ck_assert_ptr_eq(before.base, after.base);
        ck_assert_uint_eq(before.blocks, after.blocks);
        for (uint32_t i = 0; i < 1000; i++) {
                ck_assert_uint_lt(blocks[i].id, after.mapped);
                ck_assert_ptr_eq(blocks[i].data, after.base + (uint64_t)blocks[i].id * BLOCK_BYTES);
        }
        kvd_free(ours.space, 1000, blocks);
}
END_TEST

/*
 * A scheduler allocates and its worker writes, so the worker must learn of memory of which it has
 * seen no block.
 */
START_TEST(memory_follows_another_process) {
        struct kvd_space_memory mine, its;
        struct kvd_block blocks[1000];

        take(&other, 1000, blocks);
        ck_assert_int_eq(kvd_space_memory(other.space, &its), 0);
        ck_assert_int_eq(kvd_space_memory(ours.space, &mine), 0);
        ck_assert_uint_eq(mine.mapped, its.mapped);
        for (uint32_t i = 0; i < 1000; i++)
                memset(mine.base + (uint64_t)blocks[i].id * BLOCK_BYTES, (int)i, BLOCK_BYTES);
        for (uint32_t i = 0; i < 1000; i++)
                ck_assert_uint_eq(blocks[i].data[BLOCK_BYTES - 1], (uint8_t)i);
        kvd_free(other.space, 1000, blocks);
}
END_TEST

/* ---- sealed blocks are read-only ------------------------------------------------------------- */

enum writer { AUTHOR_BY_BLOCK, AUTHOR_BY_PIN, READER, AUTHOR_OF_DUPLICATE, N_WRITERS };

/* An address in a sealed block of chain 1, in this client's mapping. */
static uint8_t *sealed_address(struct client *c, enum writer how) {
        uint32_t tokens[4 * TOKENS], ids[4];
        struct kvd_block blocks[4];
        struct kvd_pin pin = {0};

        make_tokens(1, 4, tokens);
        if (how == READER) {
                ck_assert_int_eq(kvd_lookup(c->space, 0, tokens, 4 * TOKENS, ids, 4, &pin),
                                 4 * TOKENS);
                return kvd_pin_block(&pin, ids[2]);
        }
        take(c, 4, blocks);
        for (uint32_t i = 0; i < 4; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, oracle_seed(1, tokens, (i + 1) * TOKENS));
        ck_assert_int_eq(kvd_seal(c->space, &pin, 4, blocks, tokens, 4 * TOKENS), 4);
        return how == AUTHOR_BY_PIN ? kvd_pin_block(&pin, blocks[2].id) : blocks[2].data;
}

/* In its own process, which the write must kill. */
static void write_to_sealed(enum writer how) {
        struct client c = client_open();
        volatile uint8_t *at = sealed_address(&c, how);

        signal(SIGSEGV, SIG_DFL);
        at[7] ^= 1;
        _exit(2);
}

static int signal_of_writer(enum writer how) {
        pid_t pid = fork();
        int status;

        ck_assert_int_ge(pid, 0);
        if (pid == 0)
                write_to_sealed(how);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_msg(WIFSIGNALED(status), "a writer ended with %d", WEXITSTATUS(status));
        return WTERMSIG(status);
}

/* Maps more segments than a word has bits. */
START_TEST(memory_of_many_segments_is_mapped) {
        enum { SEGMENTS = 68, IN_ONE = (256 << 10) / BLOCK_BYTES };
        struct kvd_pin pins[SEGMENTS - 1] = {0};

        tear_down();
        instance_start(&server, SETTINGS("daemon.pool=20M", "daemon.segment=256K"));
        ours = client_open_with(0, SEGMENTS * IN_ONE);
        other = client_open_with(0, SEGMENTS * IN_ONE);
        for (uint32_t i = 0; i < SEGMENTS - 1; i++)
                publish(&ours, 1 + i, IN_ONE, &pins[i]);
        for (uint32_t i = 0; i < SEGMENTS - 1; i++)
                ck_assert_uint_eq(found(&other, 1 + i, IN_ONE), IN_ONE);
        for (uint32_t i = 0; i < SEGMENTS - 1; i++)
                kvd_unpin(ours.space, &pins[i]);
}
END_TEST

START_TEST(sealed_blocks_are_read_only) {
        struct kvd_pin pin = {0};

        if (_i == READER || _i == AUTHOR_OF_DUPLICATE)
                publish(&other, 1, 4, &pin);
        ck_assert_int_eq(signal_of_writer((enum writer)_i), SIGSEGV);
        ck_assert_uint_eq(found(&ours, 1, 4), 4); /* unchanged */
        kvd_unpin(other.space, &pin);
}
END_TEST

/* Both ranges are the same memory, but only one of them is writable. */
START_TEST(memory_is_mapped_twice) {
        struct kvd_space_memory memory;
        struct kvd_block block;

        take(&ours, 1, &block);
        ck_assert_int_eq(kvd_space_memory(ours.space, &memory), 0);
        memset(block.data, 0x5a, BLOCK_BYTES);
        ck_assert_ptr_eq(block.data, memory.base + block.id * memory.block_bytes);
        ck_assert_mem_eq(memory.sealed + block.id * memory.block_bytes, block.data, BLOCK_BYTES);
        ck_assert(memory.sealed >= memory.base + memory.blocks * memory.block_bytes);
        kvd_free(ours.space, 1, &block);
}
END_TEST

/* ---- order ----------------------------------------------------------------------------------- */

START_TEST(ids_ascend) {
        struct kvd_block blocks[600], odd[300];

        take(&ours, 600, blocks);
        for (uint32_t i = 0; i < 600; i++)
                ck_assert_uint_eq(blocks[i].id, i);
        for (uint32_t i = 0; i < 300; i++) {
                odd[i] = blocks[(2 * i + 1) * 7 % 600]; /* each once, in no particular order */
                blocks[(2 * i + 1) * 7 % 600] = (struct kvd_block){0};
        }
        kvd_free(ours.space, 300, odd);
        take(&ours, 40, odd);
        for (uint32_t i = 1; i < 40; i++)
                ck_assert_uint_lt(odd[i - 1].id, odd[i].id);
        kvd_free(ours.space, 40, odd);
        for (uint32_t i = 0; i < 600; i++)
                kvd_free(ours.space, 1, &blocks[i]);
}
END_TEST

/* ---- reserve --------------------------------------------------------------------------------- */

/* Takes all blocks that this client can get. */
static uint32_t take_all(struct client *c, struct kvd_block *blocks) {
        uint32_t n = 0;

        for (int r; (r = kvd_alloc(c->space, 1, blocks + n)) > 0;)
                n++;
        return n;
}

START_TEST(reserved_blocks_are_available) {
        static struct kvd_block theirs[2 * BLOCKS], mine[BLOCKS];
        uint32_t n, sealed = 0;
        struct kvd_pin pin[2] = {{0}};

        ck_assert_int_eq(kvd_reserve(ours.space, 300), 300);
        /* both clients are one process, and unsealed blocks count against its limit */
        for (uint32_t i = 0; i < 2; i++, sealed += BLOCKS / 3)
                publish(&other, 1 + i, BLOCKS / 3, &pin[i]);
        n = take_all(&other, theirs);
        ck_assert_uint_eq(sealed + n + 300, BLOCKS); /* the pool is empty, except for the reserve */
        ck_assert_int_eq(kvd_alloc(ours.space, 300, mine), 300);
        ck_assert_int_eq(kvd_alloc(ours.space, 1, mine + 300), -ENOBUFS);
        ck_assert_int_eq(kvd_reserve(ours.space, 300), 0);
        kvd_free(ours.space, 200, mine);
        ck_assert_int_eq(kvd_reserve(ours.space, 300), 200);
        kvd_free(ours.space, 100, mine + 200);
        ck_assert_int_eq(kvd_reserve(ours.space, 300), 300);
        kvd_free(other.space, n, theirs);
        for (uint32_t i = 0; i < 2; i++)
                kvd_unpin(other.space, &pin[i]);
        ck_assert_int_eq(kvd_reserve(ours.space, 0), STOCK); /* what it keeps anyway */
}
END_TEST

/* Blocks taken from the reserve are replaced automatically. */
START_TEST(reserve_is_a_floor) {
        struct kvd_block blocks[300];

        ck_assert_int_eq(kvd_reserve(ours.space, 200), 200);
        for (uint32_t round = 0; round < 10; round++) {
                take(&ours, 10, blocks);
                ck_assert_int_ge(kvd_reserve(ours.space, 200), 200);
                kvd_free(ours.space, 10, blocks);
        }
        take(&ours, 150, blocks);
        take(&ours, 1, blocks + 150); /* the reserve has 50 blocks, or is full again */
        take(&other, 1, blocks + 151);
        ck_assert_int_ge(kvd_reserve(ours.space, 200), 200);
        kvd_free(ours.space, 151, blocks);
        kvd_free(other.space, 1, blocks + 151);
}
END_TEST

/* ---- available blocks ------------------------------------------------------------------------ */

START_TEST(available_is_what_alloc_gives) {
        static struct kvd_block blocks[BLOCKS];
        uint32_t n;

        /* limit of blocks that one client may be filling */
        ck_assert_int_eq(kvd_available(ours.space), BLOCKS / 2);
        take(&ours, 100, blocks);
        ck_assert_int_eq(kvd_available(ours.space), BLOCKS / 2 - 100);
        n = take_all(&ours, blocks + 100);
        ck_assert_uint_eq(n, BLOCKS / 2 - 100);
        ck_assert_int_eq(kvd_available(ours.space), 0);
        kvd_free(ours.space, 100 + n, blocks);
        ck_assert_int_eq(kvd_available(ours.space), BLOCKS / 2);
}
END_TEST

START_TEST(available_counts_pinned_blocks) {
        struct kvd_pin pins[3] = {{0}}, again = {0};
        static uint32_t tokens[1000 * TOKENS], ids[1000];

        for (uint32_t i = 0; i < 3; i++)
                publish(&ours, i, 1000, &pins[i]);
        /* other clients see it at their next poll */
        WAIT_UNTIL(kvd_available(other.space) == BLOCKS - 3000 - STOCK);
        ck_assert_int_le(kvd_available(ours.space), BLOCKS - 3000); /* we see it at once */
        WAIT_UNTIL(kvd_available(ours.space) == BLOCKS - 3000);

        make_tokens(0, 1000, tokens);
        ck_assert_int_eq(kvd_lookup(ours.space, 0, tokens, 500 * TOKENS, ids, 1000, &again),
                         500 * TOKENS);
        ck_assert_int_le(kvd_available(ours.space), BLOCKS - 3000); /* as if others held them */
        WAIT_UNTIL(kvd_available(ours.space) == BLOCKS - 3000);     /* until the daemon looks */
        kvd_unpin(ours.space, &pins[0]);
        WAIT_UNTIL(kvd_available(other.space) == BLOCKS - 2500 - STOCK);
        kvd_unpin(ours.space, &again);
        for (uint32_t i = 1; i < 3; i++)
                kvd_unpin(ours.space, &pins[i]);
        /* without waiting for the daemon to look */
        ck_assert_int_eq(kvd_available(ours.space), BLOCKS / 2);
        WAIT_UNTIL(kvd_available(other.space) == BLOCKS / 2 - STOCK); /* both are one process */
}
END_TEST

/* Blocks that both clients pin count once, and become available when the second one unpins. */
START_TEST(available_counts_shared_blocks_once) {
        static uint32_t tokens[2000 * TOKENS], ids[2000];
        struct kvd_pin mine = {0}, its = {0}, more = {0};

        publish(&ours, 7, 1900, &mine);
        publish(&other, 8, 1900, &more);
        make_tokens(7, 1900, tokens);
        ck_assert_int_eq(kvd_lookup(other.space, 0, tokens, 1900 * TOKENS, ids, 2000, &its),
                         1900 * TOKENS);
        WAIT_UNTIL(kvd_available(ours.space) == BLOCKS - 3800 - STOCK &&
                   kvd_available(other.space) == BLOCKS - 3800 - STOCK);
        kvd_unpin(ours.space, &mine);
        ck_assert_int_eq(kvd_available(ours.space), BLOCKS - 3800 - STOCK);
        kvd_unpin(other.space, &its);
        kvd_unpin(other.space, &more);
        WAIT_UNTIL(kvd_available(ours.space) == BLOCKS / 2 - STOCK); /* both are one process */
}
END_TEST

/* ---- fixed addresses ------------------------------------------------------------------------- */

static void replace_daemon(const char *pool) {
        instance_kill(&server);
        instance_again(&server, SETTINGS(pool, "daemon.segment=256K"));
}

/*
 * The result of kvd_alloc with a new daemon. The old daemon's stock could satisfy it, so this first
 * makes calls that only the daemon can answer. The first of them notice that the old daemon is
 * gone.
 */
static int alloc_result(struct client *c, struct kvd_block *block) {
        kvd_sequence *sequence = NULL;

        for (uint32_t i = 0; i < 10 && kvd_sequence_open(c->space, 1, &sequence) < 0; i++)
                ;
        kvd_sequence_close(sequence);
        return kvd_alloc(c->space, 1, block);
}

static void expect_block_at(const struct kvd_block *block, const struct kvd_space_memory *memory) {
        ck_assert_ptr_eq(block->data, memory->base + (uint64_t)block->id * BLOCK_BYTES);
}

/* Checks a chain's bytes by their addresses alone. */
static void expect_chain(const struct kvd_pin *pin, const uint32_t *ids, uint32_t number,
                         uint32_t n) {
        uint32_t tokens[8 * TOKENS];

        make_tokens(number, n, tokens);
        for (uint32_t i = 0; i < n; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(pin, ids[i]), BLOCK_BYTES,
                                               oracle_seed(1, tokens, (i + 1) * TOKENS)),
                                  0);
}

/*
 * The daemon is killed while the client holds a pin and a block. Until it releases both, their
 * bytes stay, and none of the new daemon's memory is mapped, though other clients use that. Then it
 * is mapped at the same addresses.
 */
START_TEST(fixed_addresses_survive_a_restart) {
        struct client fixed = client_open_with(KVD_SPACE_FIXED, BLOCKS);
        struct kvd_space_memory before, after;
        uint32_t tokens[8 * TOKENS], ids[8];
        struct kvd_pin pin = {0}, new = {0};
        struct DLManagedTensor *all;
        struct kvd_block block, more;

        publish(&fixed, 1, 8, &pin);
        make_tokens(1, 8, tokens);
        ck_assert_int_eq(kvd_lookup(fixed.space, 0, tokens, 8 * TOKENS, ids, 8, &new), 8 * TOKENS);
        kvd_unpin(fixed.space, &new);
        take(&fixed, 1, &block);
        memset(block.data, 0x77, BLOCK_BYTES);
        ck_assert_int_eq(kvd_dlpack_memory(fixed.space, &all), 0);
        ck_assert_int_eq(kvd_space_memory(fixed.space, &before), 0);
        replace_daemon("daemon.pool=16M");
        ck_assert_int_eq(alloc_result(&other, &more), 1);
        kvd_free(other.space, 1, &more);
        publish(&other, 2, 8, &new);

        ck_assert_int_eq(alloc_result(&fixed, &more), -ESTALE);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "release them"));
        make_tokens(2, 8, tokens);
        ck_assert_uint_eq(found(&fixed, 2, 8), 0);
        ck_assert_int_eq(kvd_seal(fixed.space, &pin, 1, &block, tokens, TOKENS), -ESTALE);
        ck_assert_int_eq(kvd_space_memory(fixed.space, &after), 0);
        ck_assert_ptr_eq(after.base, before.base);
        ck_assert_ptr_eq(after.sealed, before.sealed);
        ck_assert_uint_eq(after.blocks, before.blocks);
        ck_assert_uint_eq(after.mapped, 0);
        expect_chain(&pin, ids, 1, 8);
        ck_assert_uint_eq(block.data[BLOCK_BYTES - 1], 0x77);

        kvd_unpin(fixed.space, &pin);
        ck_assert_int_eq(alloc_result(&fixed, &more), -ESTALE); /* the block is still held */
        kvd_free(fixed.space, 1, &block);
        ck_assert_int_eq(alloc_result(&fixed, &more), 1);
        expect_block_at(&more, &before);
        more.data[0] = 0x21;
        ck_assert_uint_eq(((uint8_t *)all->tensor.data)[(uint64_t)more.id * BLOCK_BYTES], 0x21);
        ck_assert_uint_eq(found(&fixed, 2, 8), 8);
        ck_assert_uint_eq(found(&fixed, 1, 8), 0);
        ck_assert_int_eq(kvd_space_memory(fixed.space, &after), 0);
        ck_assert_ptr_eq(after.base, before.base);
        kvd_free(fixed.space, 1, &more);
        kvd_unpin(other.space, &new);
        all->deleter(all);
        client_close(&fixed);
}
END_TEST

/* The daemon is killed again and again, while the caller holds various blocks and pins, or none. */
START_TEST(fixed_addresses_outlive_many_daemons) {
        struct client fixed = client_open_with(KVD_SPACE_FIXED, BLOCKS);
        struct kvd_space_memory first, memory;
        struct random random = {4711};

        ck_assert_int_eq(kvd_space_memory(fixed.space, &first), 0);
        for (uint32_t round = 0; round < 12; round++) {
                uint32_t what = random_below(&random, 4), n = 1 + random_below(&random, 600),
                         deaths = 0;
                struct kvd_block blocks[600] = {{0}}, one;
                struct kvd_pin pin = {0};

                if (what & 1)
                        publish(&fixed, round, n, &pin);
                if (what & 2)
                        take(&fixed, n, blocks);
                for (; deaths <= random_below(&random, 2); deaths++) {
                        replace_daemon("daemon.pool=16M");
                        ck_assert_int_eq(alloc_result(&fixed, &one), what ? -ESTALE : 1);
                        if (!what)
                                kvd_free(fixed.space, 1, &one);
                }
                if (what & 2)
                        memset(blocks[n - 1].data, 1, BLOCK_BYTES);
                kvd_free(fixed.space, n, blocks);
                kvd_unpin(fixed.space, &pin);
                ck_assert_int_eq(alloc_result(&fixed, &one), 1);
                expect_block_at(&one, &first);
                kvd_free(fixed.space, 1, &one);
                publish(&fixed, 1000 + round, 8, &pin);
                ck_assert_uint_eq(found(&fixed, 1000 + round, 8), 8);
                kvd_unpin(fixed.space, &pin);
        }
        ck_assert_int_eq(kvd_space_memory(fixed.space, &memory), 0);
        ck_assert_ptr_eq(first.base, memory.base);
        client_close(&fixed);
}
END_TEST

/* Bytes of files that are mapped in the range of a space's memory, both views included. */
static uint64_t mapped_bytes(const struct kvd_space_memory *memory) {
        uintptr_t from = (uintptr_t)memory->base,
                  to = (uintptr_t)memory->sealed + memory->blocks * memory->block_bytes;
        FILE *f = fopen("/proc/self/maps", "re");
        unsigned long begin, end;
        uint64_t bytes = 0;
        char line[512];

        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f))
                if (strstr(line, "/memfd:") && sscanf(line, "%lx-%lx", &begin, &end) == 2 &&
                    begin >= from && end <= to)
                        bytes += end - begin;
        fclose(f);
        return bytes;
}

/*
 * No memory of the previous daemon stays mapped, not even where the new daemon has no memory yet.
 */
START_TEST(a_dead_daemons_memory_is_unmapped) {
        struct client fixed = client_open_with(KVD_SPACE_FIXED, BLOCKS);
        struct kvd_space_memory memory;
        struct kvd_pin pin = {0};
        struct kvd_block block;

        publish(&fixed, 1, 1500, &pin);
        kvd_unpin(fixed.space, &pin);
        ck_assert_int_eq(kvd_space_memory(fixed.space, &memory), 0);
        ck_assert_uint_ge(mapped_bytes(&memory), UINT64_C(2) * 1500 * BLOCK_BYTES);
        replace_daemon("daemon.pool=16M");
        ck_assert_int_eq(alloc_result(&fixed, &block), 1);
        ck_assert_int_eq(kvd_space_memory(fixed.space, &memory), 0);
        ck_assert_uint_lt(memory.mapped, 1000);
        ck_assert_uint_eq(mapped_bytes(&memory), UINT64_C(2) * memory.mapped * BLOCK_BYTES);
        kvd_free(fixed.space, 1, &block);
        client_close(&fixed);
}
END_TEST

START_TEST(fixed_addresses_do_not_grow) {
        struct client fixed;
        struct kvd_block block;

        client_close(&ours); /* their space has a bound of its own */
        client_close(&other);
        replace_daemon("daemon.pool=16M");
        fixed = client_open_with(KVD_SPACE_FIXED, 0);
        replace_daemon("daemon.pool=64M");
        ck_assert_int_eq(alloc_result(&fixed, &block), -ENOSPC);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "open the space again"));
        client_close(&fixed);
        ours = client_open_with(KVD_SPACE_FIXED, 0);
        take(&ours, 1, &block);
        kvd_free(ours.space, 1, &block);
        other = client_open_with(0, 0);
}
END_TEST

START_TEST(unknown_flags_are_refused) {
        const struct kvd_space_options options = {.flags = 4 * KVD_SPACE_FIXED};
        kvd_space *none;

        ck_assert_int_eq(kvd_space_open(ours.handle, "flags", &geometry, &options, &none), -EINVAL);
}
END_TEST

/* Several processes that name one each would write over each other's bytes. */
START_TEST(host_memory_has_no_shards) {
        struct kvd_space_options options = {.shard = 1};
        kvd_space *none;

        ck_assert_int_eq(kvd_space_open(ours.handle, "shard", &geometry, &options, &none), -EINVAL);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "host memory, which has no shards"));
        options.flags = KVD_SPACE_INDEX_ONLY;
        ck_assert_int_eq(kvd_space_open(ours.handle, "shard", &geometry, &options, &none), -EINVAL);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "shard: 0 with index only"));
}
END_TEST

/* ---- seals that leave blocks alone ----------------------------------------------------------- */

START_TEST(duplicates_are_kept) {
        uint32_t tokens[6 * TOKENS], ids[6], at[4];
        struct kvd_pin first = {0}, pin = {0}, third = {0};
        struct kvd_block blocks[6], before[6];
        struct kvd_counters counters;

        publish(&other, 1, 4, &first);
        make_tokens(1, 6, tokens);
        ck_assert_int_eq(kvd_match(ours.space, 0, tokens, 6 * TOKENS), 4 * TOKENS);
        take(&ours, 6, blocks);
        for (uint32_t i = 0; i < 6; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, oracle_seed(1, tokens, (i + 1) * TOKENS));
        memcpy(before, blocks, sizeof blocks);
        ck_assert_int_eq(kvd_seal_keep(ours.space, &pin, 6, blocks, tokens, 6 * TOKENS, ids), 6);
        ck_assert_mem_eq(blocks, before, 4 * sizeof *blocks);
        ck_assert_int_eq(kvd_lookup(other.space, 0, tokens, 4 * TOKENS, at, 4, &third), 4 * TOKENS);
        ck_assert_mem_eq(at, ids, sizeof at);
        kvd_unpin(other.space, &third);
        for (uint32_t i = 4; i < 6; i++) {
                ck_assert_uint_eq(ids[i], before[i].id);
                ck_assert(!blocks[i].data && !blocks[i].view);
        }
        ck_assert_uint_eq(pin.n_blocks, 6);
        ck_assert_uint_eq(found(&other, 1, 6), 6);
        kvd_counters(ours.space, &counters);
        ck_assert_uint_eq(counters.blocks_sealed, 2);
        ck_assert_uint_eq(counters.blocks_duplicate, 4);

        make_tokens(2, 4, tokens); /* kept duplicates can be filled again */
        for (uint32_t i = 0; i < 4; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, oracle_seed(1, tokens, (i + 1) * TOKENS));
        ck_assert_int_eq(kvd_seal_keep_on(ours.space, &third, 4, blocks, tokens, 4 * TOKENS, ids,
                                          NULL),
                         4);
        ck_assert_uint_eq(found(&other, 2, 4), 4);
        kvd_unpin(ours.space, &third);
        kvd_unpin(ours.space, &pin);
        kvd_unpin(other.space, &first);
}
END_TEST

/* More blocks than fit in one request, all of them already sealed by another client. */
START_TEST(a_long_chain_is_kept_whole) {
        enum { N = BLOCKS / 2 - STOCK - 8 }; /* limit of one process, less the other's stock */
        static struct kvd_block blocks[N];
        static uint32_t tokens[3000 * TOKENS], ids[3000];
        struct kvd_pin first = {0}, pin = {0};

        publish(&other, 3, 1000, &first);
        make_tokens(3, N, tokens);
        take(&ours, N, blocks);
        for (uint32_t i = 0; i < N; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES, oracle_seed(1, tokens, (i + 1) * TOKENS));
        ck_assert_int_eq(kvd_seal_keep(ours.space, &pin, N, blocks, tokens, N * TOKENS, ids), N);
        for (uint32_t i = 0; i < N; i++)
                ck_assert_int_eq(blocks[i].data == NULL, i >= 1000);
        kvd_free(ours.space, N, blocks); /* {0} among them are fine */
        ck_assert_uint_eq(found(&other, 3, N), N);
        kvd_unpin(ours.space, &pin);
        kvd_unpin(other.space, &first);
}
END_TEST

/* ---- leaving --------------------------------------------------------------------------------- */

/* A sanitizer maps memory all the time, so there only the daemon's files count. */
static uint32_t mappings(void) {
        FILE *f = fopen("/proc/self/maps", "re");
        char line[512];
        uint32_t n = 0;

        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof line, f))
                n += !SANITIZED || strstr(line, "/memfd:");
        fclose(f);
        return n;
}

static void come_and_go(uint32_t number) {
        struct client c = client_open();
        struct kvd_pin pin = {0};

        publish(&c, number, 40, &pin);
        kvd_unpin(c.space, &pin);
        ck_assert_uint_eq(found(&c, number, 40), 40);
        client_close(&c);
}

START_TEST(closing_unmaps_everything) {
        uint32_t maps = 0, fds = 0;

        for (uint32_t i = 0; i < 24; i++) {
                if (i == 4) /* by now libc has allocated its buffers */
                        maps = mappings(), fds = fds_of(0);
                come_and_go(100 + i);
        }
        ck_assert_uint_le(mappings(), maps);
        ck_assert_uint_eq(fds_of(0), fds);
}
END_TEST

/* Counts mappings without a file, too. A sanitizer maps memory all the time. */
START_TEST(spaces_that_were_closed_take_no_addresses) {
        long before = 0;

        for (uint32_t i = 0; i < 204; i++) {
                struct client c;

                if (i == 4)
                        before = address_space_pages();
                c = client_open();
                client_close(&c);
        }
        if (!SANITIZED)
                ck_assert_int_le(address_space_pages(), before);
}
END_TEST

/* Does what "kvctl client end" does, to every other client of this process. */
static void end_own(void) {
        struct conn *conn = instance_connect(&server);
        struct kvd_msg_client_info_reply info;
        struct kvd_msg_client_end_reply kept;
        int n = 0;

        for (struct kvd_msg_client_info next = {0};
             conn_call(conn, KVD_MSG_client_info, &next, &info) == 0; next.cursor = info.next) {
                const struct kvd_msg_client_end request = {.client = info.client};

                if ((pid_t)info.pid == getpid() && info.client != conn_peer(conn)->client)
                        n += conn_call(conn, KVD_MSG_client_end, &request, &kept) == 0;
        }
        ck_assert_int_eq(n, 2);
        conn_close(conn);
}

static void connect_anew(struct client *a, struct client *b) {
        uint32_t tokens[8 * TOKENS], new_tokens[TOKENS], ids[8];
        struct kvd_pin pin = {0}, none = {0};
        struct kvd_block blocks[2];

        publish(a, 1, 8, &pin);
        kvd_unpin(a->space, &pin);
        make_tokens(1, 8, tokens);
        make_tokens(2, 1, new_tokens);
        ck_assert_int_eq(kvd_lookup(a->space, 0, tokens, 8 * TOKENS, ids, 8, &pin), 8 * TOKENS);
        take(a, 2, blocks);
        memset(blocks[1].data, 0x77, BLOCK_BYTES);
        end_own();
        ck_assert_int_eq(kvd_seal(a->space, &none, 1, blocks, new_tokens, TOKENS), -ECONNRESET);
        ck_assert_int_eq(kvd_seal(a->space, &none, 1, blocks + 1, new_tokens, TOKENS), -ESTALE);
        ck_assert_uint_eq(found(a, 1, 8), 8);
        ck_assert_uint_eq(found(b, 1, 8), 8);
        publish(b, 3, 1000, &none);
        kvd_unpin(b->space, &none);
        expect_chain(&pin, ids, 1, 8);
        ck_assert_uint_eq(blocks[1].data[BLOCK_BYTES - 1], 0x77);
        kvd_free(a->space, 2, blocks);
        kvd_unpin(a->space, &pin);
        publish(a, 2, 1, &none);
        ck_assert_uint_eq(found(a, 2, 1), 1);
}

/*
 * What the client holds stays until its process ends. The next call that asks the daemon
 * (kvd_catch_up finds out earlier) reports the end. The call after that uses a new connection, and
 * finds the cache unchanged.
 */
START_TEST(an_ended_client_reconnects) {
        pid_t pid = check_fork();

        if (pid == 0) {
                struct client a = client_open(), b = client_open();

                connect_anew(&a, &b);
                _exit(0);
        }
        ck_assert_int_eq(wait_status(pid), 0);
}
END_TEST

/* All blocks but those in the magazine, which keeps at most as many as one request asks for. */
START_TEST(freed_blocks_return_to_the_daemon) {
        static struct kvd_block blocks[1000];
        struct kvd_msg_space_info_reply info;
        struct conn *conn = instance_connect(&server);

        take(&ours, 1000, blocks);
        space_facts(conn, 0, &info);
        ck_assert_uint_ge(info.filling, 1000);
        kvd_free(ours.space, 1000, blocks);
        space_facts(conn, 0, &info);
        ck_assert_uint_lt(info.filling, 500);
        conn_close(conn);
}
END_TEST

static int by_id(const void *a, const void *b) {
        const struct kvd_block *x = a, *y = b;

        return (x->id > y->id) - (x->id < y->id);
}

/* From the magazine, without the stopped daemon. */
START_TEST(freed_blocks_are_reused) {
        struct kvd_block first[40], again[40];

        take(&ours, 40, first);
        memcpy(again, first, sizeof first);
        stop_daemon(&server);
        kvd_free(ours.space, 40, again);
        take(&ours, 40, again);
        continue_daemon(&server);
        qsort(again, 40, sizeof *again, by_id);
        for (uint32_t i = 0; i < 40; i++)
                ck_assert_ptr_eq(again[i].data, first[i].data);
        kvd_free(ours.space, 40, again);
}
END_TEST

/*
 * The reply to a seal contains the next blocks to fill. Allocating them does not need the daemon,
 * which is stopped.
 */
START_TEST(a_seal_fills_the_stock) {
        struct kvd_block blocks[STOCK];
        struct kvd_pin pin = {0};

        publish(&ours, 1, STOCK - 10, &pin);
        stop_daemon(&server);
        ck_assert_int_eq(kvd_alloc(ours.space, STOCK, blocks), STOCK);
        continue_daemon(&server);
        for (uint32_t i = 0; i < STOCK; i++)
                memset(blocks[i].data, 0x55, BLOCK_BYTES);
        kvd_free(ours.space, STOCK, blocks);
        kvd_unpin(ours.space, &pin);
        ck_assert_uint_eq(found(&ours, 1, STOCK - 10), STOCK - 10);
}
END_TEST

/*
 * The daemon does not answer a seal in time. Its late reply, a refusal of the tokens, is not read.
 * The blocks can only be freed, which returns them to the daemon.
 */
START_TEST(blocks_in_doubt_return) {
        uint32_t tokens[8 * TOKENS], filling;
        struct kvd_msg_space_info_reply info;
        struct conn *conn = instance_connect(&server);
        struct kvd_block blocks[8];
        struct kvd_pin pin = {0};

        take(&ours, 8, blocks);
        space_facts(conn, 0, &info);
        filling = (uint32_t)info.filling;
        make_tokens(1, 8, tokens);
        tokens[0] = geometry.vocab;
        stop_daemon_and_time(&server);
        deadline_ms = 300;
        ck_assert_int_eq(kvd_seal(ours.space, &pin, 8, blocks, tokens, 8 * TOKENS), -ETIMEDOUT);
        deadline_ms = PATIENCE_MS;
        continue_daemon(&server);
        ck_assert_ptr_null(blocks[7].data);
        ck_assert_int_eq(kvd_seal(ours.space, &pin, 8, blocks, tokens, 8 * TOKENS), -ESTALE);
        kvd_free(ours.space, 8, blocks);
        space_facts(conn, 0, &info);
        ck_assert_uint_eq(info.filling, filling - 8);
        conn_close(conn);
}
END_TEST

/* Fresh blocks in a late reply, for which no call waits any more, return to the daemon, too. */
START_TEST(blocks_in_a_late_reply_return) {
        struct conn *conn = instance_connect(&server);
        struct kvd_msg_space_info_reply info;
        uint32_t tokens[40 * TOKENS];
        struct kvd_block blocks[40];
        struct kvd_pin pin = {0};

        take(&ours, 40, blocks);
        make_tokens(1, 40, tokens);
        stop_daemon_and_time(&server);
        deadline_ms = 300;
        ck_assert_int_eq(kvd_seal(ours.space, &pin, 40, blocks, tokens, 40 * TOKENS), -ETIMEDOUT);
        deadline_ms = PATIENCE_MS;
        continue_daemon(&server);
        kvd_free(ours.space, 40, blocks);
        ck_assert_int_eq(kvd_reserve(ours.space, STOCK), STOCK); /* reads the late reply */
        WAIT_UNTIL((space_facts(conn, 0, &info), info.filling == STOCK));
        ck_assert_uint_eq(info.sealed, 40);
        conn_close(conn);
}
END_TEST

SUITE("memory", FIXTURE(set_up, tear_down),
      TESTS(memory_is_one_range, memory_follows_another_process, memory_of_many_segments_is_mapped),
      LOOPS(N_WRITERS, sealed_blocks_are_read_only),
      TESTS(memory_is_mapped_twice, ids_ascend, reserved_blocks_are_available, reserve_is_a_floor,
            available_is_what_alloc_gives, available_counts_pinned_blocks,
            available_counts_shared_blocks_once, fixed_addresses_survive_a_restart,
            fixed_addresses_outlive_many_daemons, a_dead_daemons_memory_is_unmapped,
            fixed_addresses_do_not_grow, unknown_flags_are_refused, host_memory_has_no_shards,
            duplicates_are_kept, a_long_chain_is_kept_whole, closing_unmaps_everything,
            an_ended_client_reconnects, freed_blocks_return_to_the_daemon, freed_blocks_are_reused,
            a_seal_fills_the_stock, blocks_in_doubt_return, blocks_in_a_late_reply_return),
      WHEN(!emulated("qemu's own mappings are counted"),
           TESTS(spaces_that_were_closed_take_no_addresses)))
