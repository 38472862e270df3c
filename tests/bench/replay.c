/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Plays requests to its own kvd as an engine would make them: look up the longest prefix, pin it,
 * compute the missing blocks, publish them, unpin. It prints how many blocks each request found, so
 * that replay.py, which knows the right numbers, need not trust kvd's own counters.
 *
 *      in    a line per request: the numbers of its blocks; equal numbers mean equal prefixes
 *      out   a line per request: blocks found; then a line of JSON; then the output of kvctl stat
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/bench/harness.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/temporary.h"

#define MOST 2048u /* blocks of a request */

struct request {
        uint32_t n;
        uint64_t numbers[MOST];
        uint32_t tokens[MOST * BLOCK_TOKENS];
};

struct totals {
        uint64_t requests, blocks, found, wrong;
};

/* 1; 0 at the end; or an error. */
static int read_request(FILE *from, struct request *q) {
        static char line[MOST * 21];
        char *at = line, *end;

        if (!fgets(line, sizeof line, from))
                return 0;
        for (q->n = 0; q->n < MOST; q->n++, at = end) {
                q->numbers[q->n] = strtoull(at, &end, 10);
                if (end == at)
                        return 1;
                block_tokens(q->numbers[q->n], q->tokens + q->n * BLOCK_TOKENS);
        }
        return -E2BIG;
}

/* A block contains its number: another number means that a wrong block was found. */
static uint64_t count_wrong(const struct request *q, const struct kvd_pin *pin,
                            const uint32_t *ids) {
        uint64_t wrong = 0, number;

        for (uint32_t i = 0; i < pin->n_blocks; i++) {
                memcpy(&number, kvd_pin_block(pin, ids[i]), sizeof number);
                wrong += number != q->numbers[i];
        }
        return wrong;
}

static int publish(kvd_space *space, const struct request *q, struct kvd_pin *pin) {
        uint32_t first = pin->n_blocks, n = q->n - first;
        struct kvd_block blocks[MOST];
        int r;

        r = take_blocks(space, n, blocks);
        if (r < 0)
                return r;
        for (uint32_t i = 0; i < n; i++)
                memcpy(blocks[i].data, &q->numbers[first + i], sizeof q->numbers[0]);
        r = kvd_seal(space, pin, n, blocks, q->tokens + first * BLOCK_TOKENS, n * BLOCK_TOKENS);
        if (r < 0)
                kvd_free(space, n, blocks);
        return r;
}

/*
 * If all of a prompt was found, its last block is computed again, because the first token comes
 * from it; the cache has that block already and returns the new one. So every request reaches the
 * daemon, whose clock only advances with requests that it sees.
 */
static int publish_last(kvd_space *space, const struct request *q) {
        struct kvd_pin before = {0};
        uint32_t ids[MOST];
        int64_t r = kvd_lookup(space, 0, q->tokens, (q->n - 1) * BLOCK_TOKENS, ids, MOST, &before);

        if (r >= 0)
                r = publish(space, q, &before);
        kvd_unpin(space, &before);
        return (int)r;
}

static int serve(kvd_space *space, const struct request *q, struct totals *totals) {
        struct kvd_pin pin = {0};
        uint32_t ids[MOST];
        int64_t r = kvd_lookup(space, 0, q->tokens, q->n * BLOCK_TOKENS, ids, MOST, &pin);

        if (r < 0)
                return (int)r;
        printf("%u\n", pin.n_blocks);
        totals->requests++;
        totals->blocks += q->n;
        totals->found += pin.n_blocks;
        totals->wrong += count_wrong(q, &pin, ids);
        r = pin.n_blocks < q->n ? publish(space, q, &pin) : publish_last(space, q);
        kvd_unpin(space, &pin);
        return r < 0 ? (int)r : 0;
}

#define JUNK (UINT64_C(1) << 40) /* numbers that no request has */
#define JUNK_BLOCKS 128u

/*
 * A pool grows while it is used, by some blocks at a time or ahead of need, and a library that gets
 * fewer blocks than it asked for asks again. To avoid that, another client first fills the pool
 * with blocks that are evicted first, so that all memory is there from the beginning.
 */
static int fill_pool(struct kvd_side *side, uint64_t n_blocks) {
        static struct request junk = {.n = JUNK_BLOCKS};
        struct kvd_space_options options = {.max_blocks = n_blocks};
        kvd_space *space = NULL;
        kvd *handle = NULL;
        int r = kvd_open(side->socket, &handle);

        if (r >= 0)
                r = kvd_space_open(handle, "bench", &side->geometry, &options, &space);
        for (uint64_t i = 0; r >= 0 && i < n_blocks + JUNK_BLOCKS; i++) {
                struct kvd_pin pin = {0};

                junk.numbers[i % JUNK_BLOCKS] = JUNK + i;
                block_tokens(JUNK + i, junk.tokens + i % JUNK_BLOCKS * BLOCK_TOKENS);
                if ((i + 1) % JUNK_BLOCKS == 0)
                        r = publish(space, &junk, &pin);
                kvd_unpin(space, &pin);
        }
        space = space ? kvd_space_close(space) : NULL;
        handle = handle ? kvd_close(handle) : NULL;
        return r;
}

static int play(struct kvd_side *side, FILE *from, struct totals *totals) {
        static struct request request;
        int r;

        while ((r = read_request(from, &request)) > 0) {
                r = serve(side->space, &request, totals);
                if (r < 0)
                        break;
        }
        if (r < 0)
                say("request %llu: %s %s\n", (unsigned long long)totals->requests, strerror(-r),
                    kvd_error());
        return r;
}

static int show_counters(const struct kvd_side *side, const char *kvctl) {
        char line[2048];

        snprintf(line, sizeof line, "'%s' --socket '%s' stat bench --json", kvctl, side->socket);
        fflush(stdout);
        return system(line) == 0 ? 0 : -EIO;
}

static int replay(char **argv, const char *dir) {
        uint64_t n_blocks = strtoull(argv[3], NULL, 10), began, owner_ns, own_ns;
        struct totals totals = {0};
        struct kvd_side side;
        int r = kvd_side_start(&side, argv[1], dir, &tiny_geometry, n_blocks, NULL);

        if (r < 0)
                return r;
        r = fill_pool(&side, n_blocks);
        process_settle(&side.daemon);
        owner_ns = process_cpu_ns(&side.daemon);
        began = now_ns();
        if (r >= 0)
                r = play(&side, stdin, &totals);
        own_ns = now_ns() - began;
        owner_ns = process_cpu_ns(&side.daemon) - owner_ns;
        printf("{\"requests\":%llu,\"blocks\":%llu,\"found\":%llu,\"wrong\":%llu,\"seconds\":%.6f,"
               "\"owner_seconds\":%.6f}\n",
               (unsigned long long)totals.requests, (unsigned long long)totals.blocks,
               (unsigned long long)totals.found, (unsigned long long)totals.wrong,
               (double)own_ns / 1e9, (double)owner_ns / 1e9);
        if (r >= 0)
                r = show_counters(&side, argv[2]);
        kvd_side_end(&side);
        return r;
}

int main(int argc, char **argv) {
        if (argc != 4 || atoll(argv[3]) <= 0) {
                say("usage: %s KVD KVCTL BLOCKS <REQUESTS\n", argv[0]);
                return 2;
        }
        return with_temporary(replay, argv) < 0;
}
