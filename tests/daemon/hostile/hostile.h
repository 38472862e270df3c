/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_HOSTILE_H
#define KVD_TESTS_HOSTILE_H

#include "tests/daemon/hostile/victim.h"
#include "tests/lib/instance.h"

struct hostile {
        struct instance daemon;
        struct victim victim;
        struct conn *conn; /* of the checker */
        uid_t attacker;    /* user in another domain than the victim; 0 if the same */
        uint32_t fds;      /* number of the daemon's descriptors, with victim and checker */
        uint64_t rss_kib;
};

/* An attack runs in its own process, which die() or exit() ends. */
typedef void attack(const struct hostile *h);

struct attack_row {
        const char *name;
        attack *run;
        uint32_t bad_connections; /* the daemon may keep 64 KiB for each */
};

/* Number of the daemon's descriptors, which only root may count. */
uint32_t hostile_fds(const struct hostile *h);
/* Waits until the victim has done this many more operations. */
void hostile_goes_on(const struct hostile *h, uint64_t operations);

extern const struct attack_row frame_attacks[], session_attacks[], block_attacks[],
        memory_attacks[];
extern const struct attack_row method_attacks[], storm_attacks[];

/*
 * Makes the daemon start a worker and do a job of every kind, so that their cost is included before
 * it is measured.
 */
void methods_warm_up(const struct hostile *h);

#endif
