/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_DISK_SIMULATED_H
#define KVD_TESTS_STORE_DISK_SIMULATED_H

/*
 * A small disk in memory with a volatile cache and one file. A write since the last flush may be
 * there after a power cut, or not, or only some of its units of 512 bytes, in any order. The disk
 * may also flip bits, write to the wrong place, or read from it.
 */

#include <stdbool.h>

#include "store/file/disk_ops.h"

#define SIMULATED_HEAD (UINT64_C(128) << 10) /* bytes, of which only two sectors exist */
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
        uint8_t (*seen)[DISK_SECTOR];   /* owned; stable and the cache's contents */
        struct pending {
                uint32_t sector, io;
                uint8_t data[DISK_SECTOR];
        } * pending; /* owned */
        uint32_t n_pending, n_ios;
        struct disk_io *begun[DISK_DEPTH];
        uint32_t n_begun;
        struct dice *dice;

        uint32_t calls, fail_at; /* of the kinds in fails; fail_at 0: no call fails */
        unsigned fails;          /* set of enum simulated_call */
        bool forever;            /* later calls fail, too */
        bool misreads;           /* reads may return another sector */
};

void simulated_open(struct simulated *s, uint32_t extents, uint64_t extent_bytes,
                    struct dice *dice);
void simulated_close(struct simulated *s);
void simulated_clear(struct simulated *s);

/* Makes an image of the disk after a power cut. flips: bits; astray: a write is misplaced. */
void simulated_cut(const struct simulated *s, uint32_t flips, bool astray, struct simulated *image);

#endif
