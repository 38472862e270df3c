/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_H
#define KVD_KERNELS_H

/*
 * libkvd_kernels: what the methods of a KV cache consist of, on the processor. kvd, its workers and
 * kvlm are built of the same code. Python has it as kvd.ops, which checks what it is given.
 *
 *      const struct kvd_ops *ops = kvd_ops_pick(NULL);         // the fastest that this processor runs
 *
 *      ops->keydiff->anchor(sums, counts, &keys, 0, n, scratch);
 *      ops->keydiff->score(scores, n, &keys, 0, n, sums, scratch);
 *      kept = ops->block->topk(indices, scores, n, budget, true, numbers);
 *
 *      header      method                                                      paper
 *      ops.h       the table, element types, what is bit-exact
 *      block.h     the k best, compaction
 *      keydiff.h   KeyDiff: anchors, scores, scores of blocks                  arXiv 2504.15364, equations 8 and 10
 *      memshare.h  MemShare: bags of words, distances of blocks                section 3, equations 1 and 2
 *      sketch.h    KVReviver: the count sketch                                 section 4.1
 *      hshare.h    HShare: labels, critical tokens, sharing configuration      equation 3, algorithm 1
 *      bicache.h   BiCache: similarity                                         section 3
 *      btable.h    BiCache: from similarities to layers that are used
 *      attend.h    attention over blocks, and who draws it
 *      cuda/kvd_kernels_cuda.h      KeyDiff on keys in the memory of a GPU
 *
 * Shapes and strides are at each function; strides count elements and sizes bytes unless it says
 * otherwise. All memory is the caller's, scratch memory included, and none is kept. Functions do
 * not fail: a size, type or index that a comment does not allow is undefined, and NaN goes where
 * its comment says. They hold no state and may run in any number of threads. Versions of this
 * library only add members at the ends of tables.
 */

#include "kernels/attend.h"
#include "kernels/bicache.h"
#include "kernels/block.h"
#include "kernels/btable.h"
#include "kernels/hshare.h"
#include "kernels/keydiff.h"
#include "kernels/memshare.h"
#include "kernels/ops.h"
#include "kernels/sketch.h"

#endif
