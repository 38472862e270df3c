/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_SOAK_WORKER_H
#define KVD_TESTS_SOAK_WORKER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/kvd.h"

/* Shared by all workers and their parent. */
struct tally {
        _Atomic uint64_t operations, bytes_checked, bytes_wrong, tokens_found, blocks_sealed,
                duplicates, leases;
        _Atomic uint64_t refusals, deaths, daemon_lost;
        _Atomic bool stop;
};

struct worker_options {
        const char *socket;
        struct tally *tally;
        uint64_t seed;
        bool may_die;        /* kills itself at random moments */
        bool daemon_may_die; /* lost connections are not failures */
        bool threads;        /* other workers are in this process, so it does not kill itself */
};

extern const struct kvd_geometry soak_geometry;

/* Works until tally->stop. Returns 0, or 1 after printing what went wrong. */
int worker_run(const struct worker_options *options);
/* n clients that are only attached, until tally->stop; returns as worker_run */
int worker_idle(const struct worker_options *options, uint32_t n);

#endif
