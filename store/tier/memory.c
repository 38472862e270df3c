/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This tier keeps exact copies in host memory, in one memfd for each space. A place has memory from
 * when a worker writes it until it is erased (a hole is punched). The memory of all spaces,
 * including their sketches, is limited by spill_bytes. If there are files, there are additional
 * places for the copies that these can hold, since a copy keeps its place when it moves to a file.
 */

#include <fcntl.h>
#include <linux/falloc.h>

#include "ipc/base/shared_file.h"
#include "ipc/base/summary.h"
#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/cache/cache.h"
#include "store/tier/tier.h"

/* a place costs address space and a few bytes, but memory only while it is used */
#define COPIES_PER_BLOCK 8u

/* Each place has a row of the summaries, in a file or not, and all rows are charged in advance. */
#define ROWS_PART 16u /* 1/16 of the overhead limit is for rows of copies in files */

static uint64_t count_below(const struct store *store, const struct kvd_index *ix) {
        uint64_t rows = store->account.limit[KVD_COST_overhead] / ROWS_PART;

        return store->config.spill_bytes ? MIN(store->account.copies_below / ix->block_bytes,
                                               rows / kvd_summary_of(ix).row_bytes) :
                                           0;
}

static uint64_t count(const struct space *space, const struct kvd_index *ix, uint64_t max_blocks) {
        const struct store *store = space_store(space);

        return MIN(max_blocks * COPIES_PER_BLOCK,
                   store->config.spill_bytes / ix->block_bytes + count_below(store, ix));
}

/* ---- budget ---------------------------------------------------------------------------------- */

static bool fits(const struct space *space, uint64_t bytes) {
        return bytes <= account_room(space_domain(space), KVD_COST_spill);
}

bool spill_charge(struct space *space, uint64_t bytes) {
        if (!fits(space, bytes))
                return false;
        account_add(space, KVD_COST_spill, bytes);
        tiers_of(space)->spill_bytes += bytes;
        return true;
}

void spill_discharge(struct space *space, uint64_t bytes) {
        account_discharge(space, KVD_COST_spill, bytes);
        tiers_of(space)->spill_bytes -= bytes;
}

static bool has_room(const struct space *space) {
        return fits(space, space_block_bytes(space));
}

static void charge(struct space *space, int64_t copies) {
        if (copies > 0)
                spill_charge(space, (uint64_t)copies * space_block_bytes(space));
        else
                spill_discharge(space, (uint64_t)-copies * space_block_bytes(space));
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int open_memory(struct space *space, uint64_t bytes) {
        struct shared_file file;
        int r = shared_file_new("kvd-spill", bytes, 0, &file);

        return r < 0 ? r : file.fd;
}

static void erase(int fd, uint64_t from, uint64_t bytes) {
        if (fd >= 0)
                sys->fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from,
                               (off_t)bytes);
}

const struct tier tier_memory = {.what = "memory",
                                 .count = count,
                                 .has_room = has_room,
                                 .charge = charge,
                                 .open = open_memory,
                                 .erase = erase};
