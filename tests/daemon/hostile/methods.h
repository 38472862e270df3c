/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_HOSTILE_METHODS_H
#define KVD_TESTS_HOSTILE_METHODS_H

/*
 * An attacker with sequences, which sends its own frames in a space with every method on. A refusal
 * ends the test.
 */

#include "tests/daemon/hostile/hostile.h"
#include "tests/daemon/hostile/raw.h"

struct asker {
        int fd;
        const char *name; /* of the space */
        uint32_t space;   /* handle */
};

struct asker methods_open(const char *socket, const char *name);
void methods_set(const struct asker *a, const char *key, const char *value);
struct kvd_msg methods_ask(const struct asker *a, struct kvd_msg request);

uint32_t methods_sequence(const struct asker *a, uint32_t max_blocks);
struct kvd_msg methods_append_message(const struct asker *a, uint32_t sequence, const kvd_ref *refs,
                                      uint32_t n,
                                      const uint32_t *tokens); /* own blocks, all full */
/* Returns how many entries will leave; 0 also if the memory for copies is used up. */
uint32_t methods_cool(const struct asker *a, uint32_t sequence, uint32_t how, const uint32_t *slots,
                      uint32_t n);
/* n: at most 64. Returns the number of blocks appended. */
uint32_t methods_append(const struct asker *a, uint32_t sequence, uint32_t n);

/*
 * Sends random requests of all kinds, settings included, about sequences in the space of that name,
 * and checks the invariants.
 */
void methods_storm(const char *socket, const char *space, uint64_t seed, uint32_t requests);

/*
 * Gives every proposal this answer, until none is pending or none has come for ms milliseconds.
 * Returns the number of proposals.
 */
uint32_t methods_sync(const struct asker *a, uint32_t sequence, uint32_t answer, uint32_t ms);

#endif
