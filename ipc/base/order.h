/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_ORDER_H
#define KVD_BASE_ORDER_H

/*
 * Who has to wait for whom, without a processor waiting for the GPU. A device space has one order page, a memfd that
 * the daemon makes, every client of the space maps writable and registers with the driver, and the daemon reads with
 * plain loads: it needs no CUDA context to know how far a stream has come.
 *
 *      order page   +-------------------------+ 0
 *                   | u64 [ORDER_SLOTS]       |  row 0: written by the streams of the attachment that has this row
 *                   +-------------------------+ ORDER_ROW_BYTES
 *                   | u64 [ORDER_SLOTS]       |  row 1
 *                   +-------------------------+ ...  ix->order_rows of them
 *
 * Every client of the space can write every slot: clients of one domain trust each other's streams, also under
 * isolation = arena.
 *
 * A slot's value only grows, over all attachments that had its row. The writer's stream writes the next value after
 * the data (cuStreamWriteValue64: everything before it on the stream is visible to who sees the value); a reader's
 * stream waits until the slot is at least that value (cuStreamWaitValue64, GEQ).
 *
 *      desc.order_slot    row * ORDER_SLOTS + slot + 1 of the block's data; 0: it is there
 *      desc.order_value   what that slot must reach
 *
 * Both are written at the seal, before the slot word, and never changed but to 0, by the daemon, once it has seen the
 * value; readers load the slot first and take 0 for "it is there".
 *
 * A producer that dies before its write: when its GPU work cannot run any more (daemon: quarantine), the daemon compares
 * what was reached with what was promised, marks the blocks that were not reached KVD_DESC_POISONED, takes them out of
 * the index, and only then writes the highest promised value into the slot itself, so that every stream goes on. A
 * reader asks after his step whether a block of his chain was poisoned (kvd_check_pin), and throws the step away if so.
 */

#include <stdint.h>

#define ORDER_SLOTS 64u                       /* of a row: streams of one client that seal or unpin */
#define ORDER_ROW_BYTES (ORDER_SLOTS * 8u)
#define ORDER_VALUE_MAX (INT64_MAX - 1)       /* GEQ compares cyclically */

static inline uint32_t order_slot_of(uint32_t row, uint32_t slot) {
        return row * ORDER_SLOTS + slot + 1;
}

#endif
