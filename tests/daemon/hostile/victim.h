/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_VICTIM_H
#define KVD_TESTS_VICTIM_H

/*
 * A well-behaved client in its own process, which works all the time in the space "victim": it
 * looks up, checks every byte, fills, seals and releases. It may be refused blocks; every other
 * failure is counted.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/kvd.h"
#include "ipc/msg.h"
#include "tests/lib/instance.h"

#define VICTIM_BT 4u
#define VICTIM_BLOCKS 24u

extern const struct kvd_geometry victim_geometry;

struct victim_facts {
        _Atomic uint64_t operations, hits, bytes_checked, bytes_wrong, errors, refusals;
        /* the daemon's own time while an operation waited for its answer */
        struct work_seen work;
        _Atomic bool stop;
};

struct victim {
        pid_t pid;
        struct victim_facts *facts; /* shared */
};

/* user: 0 for this process's own */
void victim_start(struct victim *v, const struct instance *daemon, uid_t user);
void victim_stop(struct victim *v);

/* The request with which others open the victim's space. */
struct kvd_msg victim_space_message(void);

/* Tokens and contents of its chains, for attackers that use its space. */
void victim_tokens(uint32_t chain, uint32_t *ret); /* VICTIM_BLOCKS * VICTIM_BT of them */
bool victim_block_is_right(const uint8_t *data, uint32_t chain, uint32_t nth);
void victim_block_fill(uint8_t *data, uint32_t chain, uint32_t nth);

#endif
