/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs all methods with the daemon and its clients as threads of one process, for ThreadSanitizer
 * and AddressSanitizer. The clients are the workers of the methods' soak. The pool is smaller than
 * they need; one run has a shared pool, another has arenas.
 *
 *      test-inproc-methods [OPERATIONS] [SEED]
 *
 * Each run ends after OPERATIONS operations, but not before every method was used.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/lib/amount.h"
#include "tests/lib/inproc.h"
#include "tests/client/inproc/one_view.h"
#include "tests/daemon/soak/methods_worker.h"

#define WORKERS 4u
/* Per run. An idle machine takes a second for the sample, under ThreadSanitizer. */
#define OPERATIONS AMOUNT(5000u, 2000u)

/* ---- the spaces ------------------------------------------------------------------------------ */

static void set(kvd_space *space, const char *name, double value) {
        if (kvd_space_set(space, name, value) < 0)
                die("%s: %s", name, kvd_error());
}

static void switch_on(const char *socket) {
        const struct kvd_space_options whole = {.kind = KVD_BIDIRECTIONAL};
        kvd_space *space, *second;
        kvd *handle;

        if (kvd_open(socket, &handle) < 0 ||
            kvd_space_open(handle, "methods", &methods_geometry, NULL, &space) < 0 ||
            kvd_space_open(handle, "whole", &methods_whole_geometry, &whole, &second) < 0)
                die("%s", kvd_error());
        set(space, "memshare", 1);
        set(space, "memshare.align", 0);
        set(space, "memshare.min_step_tokens", 8);
        set(space, "memshare.cross_seq", 1);
        set(space, "keydiff", 1);
        set(space, "kvreviver", 1);
        set(space, "kvreviver.max_load", 50);
        set(space, "hshare", 1);
        set(second, "bicache", 1);
        kvd_space_close(second);
        kvd_space_close(space);
        kvd_close(handle);
}

/* ---- one run --------------------------------------------------------------------------------- */

/* A worker that returns stops all the others. */
static void *work(void *arg) {
        const struct methods_options *o = arg;
        int failed = methods_worker_run(o);

        o->tally->stop = true;
        return (void *)(intptr_t)failed;
}

static bool all_was_used(const struct methods_tally *t) {
        return t->appended && t->changes && t->cooled && t->revived;
}

/* The operations have no timeout here: the test's timeout ends a run that hangs. */
static void wait_for_work(const struct methods_tally *t, uint64_t operations) {
        while (!t->stop && t->operations < operations)
                usleep(1000);
        for (int ms = 0; !t->stop && !all_was_used(t) && ms < PATIENCE_MS; ms++)
                usleep(1000);
}

static void expect_work(const struct methods_tally *t) {
        if (t->bytes_wrong || t->unmarked)
                die("%llu wrong bytes", (unsigned long long)t->bytes_wrong);
        if (!all_was_used(t))
                die("%llu blocks, %llu changes, %llu cooled, %llu revived: proves nothing",
                    (unsigned long long)t->appended, (unsigned long long)t->changes,
                    (unsigned long long)t->cooled, (unsigned long long)t->revived);
}

static void run(uint64_t operations, uint64_t seed, const char *const *settings) {
        struct methods_options options[WORKERS];
        struct methods_tally tally = {0};
        pthread_t threads[WORKERS];
        struct inproc d;
        void *failed;

        inproc_start_with_worker(&d, settings, getenv("KVD"));
        switch_on(d.in.socket);
        for (uint32_t i = 0; i < WORKERS; i++) {
                options[i] = (struct methods_options){.socket = d.in.socket,
                                                      .tally = &tally,
                                                      .seed = seed + i,
                                                      .threads = true};
                pthread_create(&threads[i], NULL, work, &options[i]);
        }
        wait_for_work(&tally, operations);
        tally.stop = true;
        for (uint32_t i = 0; i < WORKERS; i++) {
                pthread_join(threads[i], &failed);
                if (failed)
                        die("a worker failed");
        }
        expect_work(&tally);
        instance_expect_clean(&d.in);
        inproc_stop(&d);
        printf("methods %s: %llu operations, %llu bytes checked, 0 wrong; shared %llu, approximate "
               "%llu, absent %llu\n",
               settings[0], (unsigned long long)tally.operations,
               (unsigned long long)tally.bytes_checked, (unsigned long long)tally.shared_seen,
               (unsigned long long)tally.approx_seen, (unsigned long long)tally.absent_seen);
        fflush(stdout);
}

int main(int argc, char **argv) {
        uint64_t operations = argc > 1 ? strtoull(argv[1], NULL, 10) : OPERATIONS;
        uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
        char users[64];
        const char *const shared[] = {"daemon.pool=4M", NULL};
        const char *const arena[] = {"domain soak.isolation=arena", users, "daemon.pool=4M", NULL};

        if (!getenv("KVD"))
                return 77;
        printf("seed %llu\n", (unsigned long long)seed);
        snprintf(users, sizeof users, "domain soak.users=%u", getuid());
        one_view_install();
        run(operations, seed, shared);
        run(operations, seed + 100, arena);
        return 0;
}
