/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SEMAPHORE_H
#define KVD_BASE_SEMAPHORE_H

/*
 * The order of work on a GPU: who waits for whom, without a processor that waits for the GPU. A
 * device space has one semaphore page, a memfd that the daemon makes, every client of the space
 * maps writable and registers with the driver, and the daemon reads with plain loads: it needs no
 * CUDA context to know how far a stream has come.
 *
 *      semaphore page   +---------------------+ 0
 *                       | u64 [SEMAPHORES]    |  row 0: written by the streams of the attachment that has this row
 *                       +---------------------+ SEMAPHORE_ROW_BYTES
 *                       | u64 [SEMAPHORES]    |  row 1
 *                       +---------------------+ ...  ix->semaphore_rows of them
 *
 * Every client of the space can write every semaphore: clients of one domain trust each other's
 * streams, also under isolation = arena.
 *
 * A semaphore's value only grows, over all attachments that had its row. The writer's stream writes
 * the next value after the data (cuStreamWriteValue64: whoever sees the value sees everything
 * before it on the stream); a reader's stream waits until the semaphore has at least that value
 * (cuStreamWaitValue64, GEQ).
 *
 *      desc.semaphore         row * SEMAPHORES + its place in the row + 1; 0: the block's data is there
 *      desc.semaphore_value   the value that it must reach
 *
 * Both are written at the seal, before the slot word. They change once more at most: the daemon
 * sets desc.semaphore to 0 when it has seen the value. Readers load the semaphore first and take 0
 * for "it is there".
 *
 * If a producer dies before its write, the daemon waits until its GPU work cannot run any more
 * (quarantine). Then it compares what was reached with what was promised, marks the blocks that
 * were not reached KVD_DESC_POISONED, takes them out of the index, and only then writes the highest
 * promised value into the semaphore itself, so that every stream goes on. A reader asks after each
 * step whether a block of its chain was poisoned (kvd_check_pin), and throws the step away if so.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/util.h"

#define SEMAPHORES 64u /* of a row: streams of one client that seal or unpin */
#define SEMAPHORE_ROW_BYTES (SEMAPHORES * 8u)

/*
 * If the daemon dies before a producer does, nobody can write the index that says which of its blocks
 * wait. So the daemon after it writes into each semaphore of the dead one's row what was reached plus
 * SEMAPHORE_ENDED: more than any value, so everybody goes on, and whoever asks for a value above the
 * rest knows that it was never reached (semaphore_was_reached).
 */
#define SEMAPHORE_ENDED (UINT64_C(1) << 62)
#define SEMAPHORE_VALUE_MAX (SEMAPHORE_ENDED - 1) /* GEQ compares cyclically */

/* A semaphore has this: if it says that a value was passed, did its writer do that? */
static inline bool semaphore_was_reached(uint64_t has, uint64_t value) {
        return (has & ~SEMAPHORE_ENDED) >= value;
}

/* The whole page, of ix->semaphore_rows. */
static inline uint64_t semaphore_page_bytes(uint32_t rows) {
        return ALIGN_UP((uint64_t)rows * SEMAPHORE_ROW_BYTES, 4096);
}

/* As in descriptors. */
static inline uint32_t semaphore_at(uint32_t row, uint32_t at) {
        return row * SEMAPHORES + at + 1;
}

#endif
