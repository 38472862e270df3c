/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_DISK_SIMULATED_H
#define KVD_TESTS_STORE_DISK_SIMULATED_H

/*
 * A small disk in memory with a volatile cache, with one file. What was written since the last
 * flush may be there after a power cut, or not, or in pieces of 512 bytes, in any order; and a
 * disk may flip bits, write to another place, or read from one.
 */

#include <stdbool.h>

#include "store/file/disk.h"

#define SIMULATED_HEAD (UINT64_C(128) << 10) /* of which two sectors exist */
#define SIMULATED_SECTORS 64u
#define SIMULATED_PENDING 512u

struct dice {
        uint64_t state;
};

static inline uint64_t roll(struct dice *dice) {
        dice->state ^= dice->state << 13;
        dice->state ^= dice->state >> 7;
        dice->state ^= dice->state << 17;
        return dice->state * UINT64_C(0x2545f4914f6cdd1d) >> 16;
}

static inline bool one_in(struct dice *dice, uint64_t n) {
        return roll(dice) % n == 0;
}

enum simulated_call { SIMULATED_READ = 1, SIMULATED_WRITE = 2, SIMULATED_FLUSH = 4 };

struct simulated {
        struct disk disk;
        uint32_t n_sectors;
        uint8_t (*stable)[DISK_SECTOR]; /* owned */
        uint8_t (*seen)[DISK_SECTOR];   /* owned; with what is in the cache */
        struct pending {
                uint32_t sector, io;
                uint8_t data[DISK_SECTOR];
        } *pending;                     /* owned */
        uint32_t n_pending, n_ios;
        struct disk_io *begun[DISK_DEPTH];
        uint32_t n_begun;
        struct dice *dice;

        uint32_t calls, fail_at;        /* of the kinds that fail; 0: none does */
        unsigned fails;                 /* enum simulated_call */
        bool forever;
        uint32_t dies_at;               /* calls, from which on all fail; 0: none does */
        bool misreads;                  /* the next read may be of another sector */
};

/* extents: of so many bytes */
void simulated_open(struct simulated *s, uint32_t extents, uint64_t extent_bytes,
                    struct dice *dice);
void simulated_close(struct simulated *s);
void simulated_clear(struct simulated *s);

/* What there may be after a power cut. flips: bits; astray: may a write have gone elsewhere? */
void simulated_cut(const struct simulated *s, uint32_t flips, bool astray,
                   struct simulated *image);

#endif
