/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_H
#define KVD_KERNELS_H

/*
 * libkvd_kernels: the building blocks of KV cache methods, on the CPU. kvd, its workers and kvlm
 * are built from the same code. In Python they are kvd.ops, which also checks its arguments.
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
 *      memshare.h  MemShare: bags of words, distances of blocks                algorithm 1, stages 1 and 2
 *      sketch.h    KVReviver: the count sketch                                 algorithms 1 and 2
 *      hshare.h    HShare: labels, critical tokens, sharing configuration      equation 3, algorithm 1
 *      bicache.h   BiCache: similarity                                         arXiv 2606.07571, sections 4.1 and 4.2
 *      btable.h    BiCache: how many layers to use, given similarities         sections 5.1 and 5.2
 *      attend.h    attention over blocks, and its mass per block and token
 *      cuda/kvd_kernels_cuda.h      KeyDiff on keys in GPU memory
 *
 * Shapes and strides are stated at each function; unless stated otherwise, strides are in elements
 * and sizes in bytes. All memory belongs to the caller, including scratch memory, and no pointer is
 * kept after a call. Functions do not fail unless they return an int that says so: an invalid size,
 * type or index is undefined behaviour, and NaN is handled as stated. Functions hold no state and
 * may run in any number of threads. New versions of this library only add members at the ends of
 * tables.
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
