/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_SOAK_METHODS_WORKER_H
#define KVD_TESTS_SOAK_METHODS_WORKER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/kvd_methods.h"

/* Shared by all workers and their parent. */
struct methods_tally {
        /* unmarked: number of approximations without their mark */
        _Atomic uint64_t operations, bytes_checked, bytes_wrong, unmarked;
        _Atomic uint64_t appended, refusals, deaths, lost;
        _Atomic uint64_t shared_seen, approx_seen, packed_seen, absent_seen;
        _Atomic uint64_t changes, cooled, revived, labels, sharings, samples;
        _Atomic bool stop;
};

struct methods_options {
        const char *socket;
        struct methods_tally *tally;
        uint64_t seed;
        bool daemon_may_die;
        bool threads; /* workers are threads of one process: none of them dies */
};

extern const struct kvd_geometry methods_geometry, methods_whole_geometry;

/* Works until tally->stop. Returns 0, or 1 after printing what went wrong. */
int methods_worker_run(const struct methods_options *options);

#endif
