/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon and its clients in one process, for ThreadSanitizer and AddressSanitizer:
 *
 *      workers     the soak's workers, each with its own connection
 *      shared      threads that share one handle, one space and one stock of blocks
 *
 *      test-inproc [OPERATIONS] [SEED]
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/lib/amount.h"
#include "tests/lib/inproc.h"
#include "tests/client/inproc/one_view.h"
#include "tests/lib/oracle.h"
#include "tests/daemon/soak/worker.h"

#define WORKERS 4u
#define SHARERS 4u
#define BT 4u
#define MAX_BLOCKS 24u
/* Per part. An idle machine takes a second for the sample, under ThreadSanitizer. */
#define OPERATIONS AMOUNT(20000u, 5000u)

/* ---- workers --------------------------------------------------------------------------------- */

/* A worker that returns stops all the others. */
static void *worker_main(void *arg) {
        const struct worker_options *o = arg;
        int failed = worker_run(o);

        o->tally->stop = true;
        return (void *)(intptr_t)failed;
}

static void run_workers(uint64_t operations, uint64_t seed, const char *const *settings) {
        struct worker_options options[WORKERS];
        static struct tally tally;
        pthread_t threads[WORKERS];
        struct inproc d;
        void *failed;

        memset(&tally, 0, sizeof tally);
        inproc_start(&d, settings);
        for (uint32_t i = 0; i < WORKERS; i++) {
                options[i] = (struct worker_options){.socket = d.in.socket,
                                                     .tally = &tally,
                                                     .seed = seed + i,
                                                     .threads = true};
                pthread_create(&threads[i], NULL, worker_main, &options[i]);
        }
        while (!tally.stop && tally.operations < operations)
                usleep(1000);
        tally.stop = true;
        for (uint32_t i = 0; i < WORKERS; i++) {
                pthread_join(threads[i], &failed);
                if (failed || tally.bytes_wrong)
                        die("a worker failed, %llu wrong bytes",
                            (unsigned long long)tally.bytes_wrong);
        }
        instance_expect_clean(&d.in);
        inproc_stop(&d);
        printf("workers %s: %llu operations, %llu bytes checked, 0 wrong\n",
               settings ? settings[0] : "", (unsigned long long)tally.operations,
               (unsigned long long)tally.bytes_checked);
}

/* ---- shared handles -------------------------------------------------------------------------- */

struct sharer {
        struct kvd_space *space;
        struct random random;
        _Atomic bool *stop;
        _Atomic uint64_t *lookups; /* shared by all sharers */
        uint64_t hits, sealed;
};

static void make_tokens(uint32_t chain, uint32_t *ret) {
        for (uint32_t i = 0; i < MAX_BLOCKS * BT; i++)
                ret[i] = i / BT < 10 ? i : i + chain * 100;
}

static void expect_right(const struct kvd_pin *pin, const uint32_t *ids, const uint32_t *tokens) {
        for (uint32_t i = 0; i < pin->n_blocks; i++)
                if (oracle_wrong(kvd_pin_block(pin, ids[i]), pin->block_bytes,
                                 oracle_seed(1, tokens, (i + 1) * BT)))
                        die("wrong bytes in block %u", ids[i]);
}

static uint32_t take(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        int r = kvd_alloc(space, n, blocks);

        if (r < 0 && r != -ENOBUFS && r != -EDQUOT)
                die("kvd_alloc: %s", kvd_error());
        return r < 0 ? 0 : (uint32_t)r;
}

static void extend(struct sharer *s, struct kvd_pin *pin, uint32_t *ids, const uint32_t *tokens) {
        uint32_t first = pin->n_blocks, want = 1 + random_below(&s->random, MAX_BLOCKS - first), n;
        struct kvd_block blocks[MAX_BLOCKS];

        n = take(s->space, want, blocks);
        if (n == 0)
                return;
        for (uint32_t i = 0; i < n; i++)
                oracle_fill(blocks[i].data, kvd_block_bytes(&soak_geometry),
                            oracle_seed(1, tokens, (first + i + 1) * BT));
        if (random_below(&s->random, 8) == 0) {
                kvd_free(s->space, n, blocks);
                return;
        }
        if (kvd_seal(s->space, pin, n, blocks, tokens + first * BT, n * BT) != (int)n)
                die("kvd_seal: %s", kvd_error());
        for (uint32_t i = 0; i < n; i++)
                ids[first + i] = blocks[i].id;
        s->sealed += n;
}

static void *sharer_main(void *arg) {
        struct sharer *s = arg;

        while (!*s->stop) {
                uint32_t tokens[MAX_BLOCKS * BT], ids[MAX_BLOCKS],
                        n = 1 + random_below(&s->random, MAX_BLOCKS);
                struct kvd_pin pin = {0};

                make_tokens(random_below(&s->random, 40), tokens);
                atomic_fetch_add_explicit(s->lookups, 1, memory_order_relaxed);
                s->hits += kvd_lookup(s->space, 0, tokens, n * BT, ids, MAX_BLOCKS, &pin) > 0;
                expect_right(&pin, ids, tokens);
                if (pin.n_blocks < MAX_BLOCKS && random_below(&s->random, 2))
                        extend(s, &pin, ids, tokens);
                expect_right(&pin, ids, tokens);
                kvd_unpin(s->space, &pin);
        }
        return NULL;
}

static void run_shared(uint64_t lookups, uint64_t seed) {
        struct kvd_space_options options = {.max_blocks = 256};
        struct sharer sharers[SHARERS];
        pthread_t threads[SHARERS];
        static _Atomic bool stop;
        static _Atomic uint64_t done;
        struct kvd_space *space;
        uint64_t hits = 0;
        struct kvd *handle;
        struct inproc d;

        inproc_start(&d, NULL);
        if (kvd_open(d.in.socket, &handle) < 0 ||
            kvd_space_open(handle, "shared", &soak_geometry, &options, &space) < 0)
                die("%s", kvd_error());
        for (uint32_t i = 0; i < SHARERS; i++) {
                sharers[i] = (struct sharer){.space = space,
                                             .random = {seed * 31 + i},
                                             .stop = &stop,
                                             .lookups = &done};
                pthread_create(&threads[i], NULL, sharer_main, &sharers[i]);
        }
        while (done < lookups)
                usleep(1000);
        stop = true;
        for (uint32_t i = 0; i < SHARERS; i++) {
                pthread_join(threads[i], NULL);
                hits += sharers[i].hits;
        }
        kvd_space_close(space);
        kvd_close(handle);
        instance_expect_clean(&d.in);
        inproc_stop(&d);
        printf("shared: %llu hits, 0 wrong bytes\n", (unsigned long long)hits);
}

int main(int argc, char **argv) {
        uint64_t operations = argc > 1 ? strtoull(argv[1], NULL, 10) : OPERATIONS;
        uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
        char users[64];
        const char *arena[] = {"domain soak.isolation=arena", users, NULL};

        printf("seed %llu\n", (unsigned long long)seed);
        snprintf(users, sizeof users, "domain soak.users=%u", getuid());
        one_view_install();
        run_workers(operations, seed, NULL);
        run_workers(operations, seed + 100, arena);
        run_shared(operations, seed);
        return 0;
}
