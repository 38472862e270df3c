/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_HOSTILE_H
#define KVD_TESTS_HOSTILE_H

#include "tests/daemon/hostile/victim.h"
#include "tests/lib/instance.h"

struct hostile {
        struct instance daemon;
        struct victim victim;
        struct conn *conn; /* of the one who checks */
        uid_t attacker;    /* of another domain than the victim; 0: of the same */
        uint32_t fds;      /* of the daemon, with victim and checker */
        uint64_t rss_kib;
};

/* An attack runs in a process of its own, which die() or exit() ends. */
typedef void attack(const struct hostile *h);

struct attack_row {
        const char *name;
        attack *run;
        uint32_t bad_connections; /* the daemon may keep 64 KiB for each */
};

/* Descriptors of the daemon, which only root may count. */
uint32_t hostile_fds(const struct hostile *h);
/* Waits until the victim has done this many more operations. */
void hostile_goes_on(const struct hostile *h, uint64_t operations);

extern const struct attack_row frame_attacks[], session_attacks[], block_attacks[],
        memory_attacks[];
extern const struct attack_row method_attacks[], storm_attacks[];

/*
 * A worker is started, and does a job of every kind that this takes: what it costs is there before
 * it is counted.
 */
void methods_warm_up(const struct hostile *h);

#endif
