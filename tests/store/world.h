/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_WORLD_H
#define KVD_TESTS_STORE_WORLD_H

/*
 * A store in this process, and two domains whose clients do everything with it at random. Time,
 * random numbers and operations follow from a seed, so that the same seed gives the same answers. A
 * domain's trace is a hash of its answers.
 */

#include <stdbool.h>
#include <stdint.h>

#include "store/store.h"
#include "tests/lib/oracle.h"

#define WORLD_BT 4u
#define WORLD_BYTES 512u /* bytes of a block */
#define WORLD_DEPTH 6u   /* maximum number of blocks of a chain */
#define WORLD_CHAINS 32u
#define WORLD_FILLING 64u

struct chain {
        kvd_ref leaf; /* 0 if none */
        uint32_t n_blocks;
        bool pinned;
        uint32_t tokens[WORLD_DEPTH * WORLD_BT];
};

struct user {
        struct attachment *attachment;
        struct kvd_pin_words *words;
        shm_u64 *groups;
        uint64_t pin_bytes;
        uint32_t n_filling, sequence; /* sequence: 0 if none */
        kvd_ref filling[WORLD_FILLING];
        struct chain chains[WORLD_CHAINS];
};

struct party {
        struct domain *domain;
        struct random random;
        uint64_t trace, drawn, operations, blocks_compared, bytes_wrong;
        struct user users[3];
};

struct world {
        struct store *store;
        struct party parties[2];
        struct party *turn; /* the domain whose operation runs */
};

void world_open(struct world *w, uint64_t seed, uint64_t pool_blocks);
void world_close(struct world *w);

/* One operation of a domain, drawn from its own random numbers, and the idle work after it. */
void world_step(struct world *w, uint32_t party);

/* The space with this number of the domain whose turn it is. Creates it if there is none. */
int world_space(struct world *w, uint32_t number, struct space **ret);

/* Checks every invariant of every space. */
void world_check(struct world *w);

#endif
