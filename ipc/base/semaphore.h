/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SEMAPHORE_H
#define KVD_BASE_SEMAPHORE_H

/*
 * Semaphores order work between the GPU streams of a space's clients, so that no CPU thread waits
 * for the GPU. A device space has one semaphore page, a memfd that the daemon makes. Every client
 * of the space maps it writable and registers it with the driver. The daemon reads it with plain
 * loads, and needs no CUDA context to know how far a stream has come.
 *
 *      semaphore page   +---------------------+ 0
 *                       | u64 [SEMAPHORES]    |  row 0: written by the streams of the attachment that has this row
 *                       +---------------------+ SEMAPHORE_ROW_BYTES
 *                       | u64 [SEMAPHORES]    |  row 1
 *                       +---------------------+ ...  ix->semaphore_rows of them
 *
 * Every client of the space can write every semaphore: clients of one domain trust each other's
 * streams, also with isolation = arena.
 *
 * A semaphore's value never decreases, even when another attachment gets its row. A producer's
 * stream writes the next value after the data (cuStreamWriteValue64: a reader that sees the value
 * sees all earlier writes of the stream). A reader's stream waits until the semaphore has at least
 * that value (cuStreamWaitValue64, GEQ).
 *
 *      desc.semaphore         row * SEMAPHORES + its place in the row + 1; 0: the block's data is there
 *      desc.semaphore_value   the value that the semaphore has when the data is there
 *
 * Both are written when the block is sealed, before the slot word. They change at most once after
 * that: the daemon sets desc.semaphore to 0 when it has seen the value. Readers load desc.semaphore
 * first; 0 means that the data is there.
 *
 * If the block has shards on several GPUs, the streams that write the others have a struct
 * kvd_promise each (layout.h). The daemon sets desc.semaphore to 0 when it has seen all values.
 * Readers of one shard wait for all of them, so that all of an engine's ranks agree.
 *
 * If a producer dies before its stream has written the value, the daemon waits until the producer's
 * GPU work cannot run any more (quarantine). Then it marks the blocks whose value was not reached
 * KVD_DESC_POISONED and takes them out of the index. Only after that the highest promised value is
 * written to the semaphore, so that waiting streams continue. A reader checks after each step
 * whether a block of its chain was poisoned (kvd_check_pin), and discards the step in that case.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/util.h"

#define SEMAPHORES 64u /* semaphores of a row: streams of one client that seal or unpin */
#define SEMAPHORE_ROW_BYTES (SEMAPHORES * 8u)

/*
 * If the daemon dies before a producer does, the index that lists the producer's pending blocks
 * cannot be written any more. When the producer dies, the next daemon adds SEMAPHORE_ENDED to each
 * semaphore of its row. The sum is greater than any value, so waiting streams continue, and a
 * reader can still tell which values were reached (semaphore_was_reached).
 */
#define SEMAPHORE_ENDED (UINT64_C(1) << 62)
#define SEMAPHORE_VALUE_MAX (SEMAPHORE_ENDED - 1) /* GEQ compares cyclically */

/* has: a semaphore's value. Did the producer itself reach `value`? */
static inline bool semaphore_was_reached(uint64_t has, uint64_t value) {
        return (has & ~SEMAPHORE_ENDED) >= value;
}

/* Bytes of a page with ix->semaphore_rows rows. */
static inline uint64_t semaphore_page_bytes(uint32_t rows) {
        return ALIGN_UP((uint64_t)rows * SEMAPHORE_ROW_BYTES, 4096);
}

/* The value of desc.semaphore for place `at` of a row. */
static inline uint32_t semaphore_at(uint32_t row, uint32_t at) {
        return row * SEMAPHORES + at + 1;
}

#endif
