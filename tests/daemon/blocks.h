/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_BLOCKS_H
#define KVD_TESTS_DAEMON_BLOCKS_H

/*
 * A libkvd client with one sequence. The bytes of each block follow from its slot, so that every
 * exact entry can be checked at any time. Every failure fails the test.
 */

#include "client/kvd_methods.h"
#include "tests/lib/peer.h"

#define USER_BLOCKS 64u

struct user {
        struct peer_end *peer; /* a second connection, for requests that libkvd does not offer */
        kvd *kvd;
        kvd_space *space;
        kvd_sequence *sequence;
        uint64_t seed;
};

/*
 * Opens space "s" (f32, blocks of 16 KiB) with these settings, such as "kvreviver=on"; NULL
 * terminates the list.
 */
void user_open(struct user *u, const char *socket, const char *const settings[]);
void user_close(struct user *u);
void user_set(struct user *u, const char *setting);

void user_append(struct user *u, uint32_t n); /* fills n blocks; they are checked from then on */
/* Returns the number of resident entries; checks the bytes of those that are exact. */
uint32_t user_resident(struct user *u);
uint32_t user_flags(struct user *u, uint32_t flag); /* returns the number of entries with it */
void user_sync(struct user *u);

/* Asks for entries to leave. Returns how many will; 0 also if the memory for copies is used up now. */
uint32_t user_cool(struct user *u, uint32_t n, const uint32_t *slots, enum kvd_cool how);
/* Spills or revives all entries, and waits until it is done. */
void user_spill(struct user *u);
void user_revive(struct user *u);

struct kvd_msg_daemon_info_reply user_info(struct user *u);
pid_t user_worker(struct user *u);                     /* waits until a worker runs */
uint64_t user_counter(struct user *u, uint32_t which); /* enum kvd_space_counter */
void user_check(struct user *u);                       /* checks the invariants of the space */

#endif
