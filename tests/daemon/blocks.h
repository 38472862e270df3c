/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_BLOCKS_H
#define KVD_TESTS_DAEMON_BLOCKS_H

/*
 * A client of libkvd with one sequence, whose blocks' bytes follow from their places, so that every
 * exact entry can be checked at any time. Every failure fails the test.
 */

#include "client/kvd_methods.h"
#include "tests/lib/peer.h"

#define USER_BLOCKS 64u

struct user {
        struct peer_end *peer; /* of the same daemon, for what libkvd does not show */
        kvd *kvd;
        kvd_space *space;
        kvd_sequence *sequence;
        uint64_t seed;
};

/*
 * Opens space "s", of blocks of 16 KiB (f32), with these settings: "kvreviver=on", NULL behind the
 * last.
 */
void user_open(struct user *u, const char *socket, const char *const settings[]);
void user_close(struct user *u);
void user_set(struct user *u, const char *setting);

void user_append(struct user *u, uint32_t n); /* n blocks, filled and checked from then on */
/* entries that are; checks the bytes of those that are exact */
uint32_t user_resident(struct user *u);
uint32_t user_flags(struct user *u, uint32_t flag); /* entries that have it */
void user_sync(struct user *u);

/* All entries: asks that they leave, or come; waits until they have. */
void user_spill(struct user *u);
void user_revive(struct user *u);

struct kvd_msg_daemon_info_reply user_info(struct user *u);
pid_t user_worker(struct user *u); /* waits until there is one */
uint64_t user_counter(struct user *u, uint32_t which); /* enum kvd_space_counter */
void user_check(struct user *u);   /* walks the invariants of the space */

#endif
