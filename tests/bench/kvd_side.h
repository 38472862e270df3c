/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_KVD_SIDE_H
#define KVD_BENCH_KVD_SIDE_H

/* The benchmark's own kvd, a connection to it, one space, and ways to fill it. */

#include "client/kvd.h"
#include "tests/bench/chains.h"
#include "tests/bench/process.h"

struct kvd_side {
        struct process daemon;
        char socket[512];
        kvd *handle;
        kvd_space *space;
        struct kvd_geometry geometry;
};

/* Blocks of 128 bytes: an index of a million of them, and 128 MiB of pool. */
extern const struct kvd_geometry tiny_geometry;

/* Blocks of that many KiB, 128 or more. */
struct kvd_geometry large_geometry(uint32_t kib);

/*
 * Starts a daemon with its own directory below dir and room for n_blocks blocks, and opens the
 * space. With the option --keep, the keeper is side->daemon; NULL: no option.
 */
int kvd_side_start(struct kvd_side *side, const char *program, const char *dir,
                   const struct kvd_geometry *geometry, uint64_t n_blocks, const char *option);
void kvd_side_end(struct kvd_side *side);

/* Takes exactly n blocks. */
int take_blocks(kvd_space *space, uint32_t n, struct kvd_block *blocks);

/* Stores all chains, then looks each up. -ENOMSG if one is missing. */
int fill_chains(struct kvd_side *side, const struct chains *chains);

#endif
