/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_METHODS_H
#define KVD_METHODS_H

/*
 * Sequences, and the five methods on them. kvd.h is about blocks that many requests share; this
 * header is about the block table of a single request, and about what the daemon may do with blocks
 * that no other request uses.
 *
 *      open          kvd_sequence_open      make an empty table
 *      grow          kvd_sequence_borrow    add blocks of a prefix that a kvd_pin holds
 *                    kvd_sequence_append    add the caller's blocks: sealed, but in no index
 *      a step ends   kvd_sequence_step      MemShare compares it with earlier steps
 *      safe point    kvd_sequence_sync      apply changes: shared, cooled and revived blocks
 *      a miss        kvd_sequence_revive    request blocks that are not resident
 *                    kvd_sequence_wait      sync, after all requests have completed
 *      too long      kvd_sequence_compact   keep the tokens of highest score
 *      done          kvd_sequence_close     free all of it
 *
 * Rules for all calls:
 *  - The methods read the contents of blocks. A space of opaque blocks refuses them: -EOPNOTSUPP.
 *  - Entries change only in kvd_sequence_sync and kvd_sequence_wait. An entry may then get another
 *    block (and a delta), lose its block (data is NULL: attention must skip its slots), or get one
 *    back.
 *  - A block whose entry has KVD_ENTRY_SHARED, KVD_ENTRY_APPROX or KVD_ENTRY_COMPACT is an
 *    approximation. Keys and values computed from it are approximate as well, and must not be
 *    published with kvd_seal.
 *  - All calls on a sequence must be made by one thread. The rules of kvd.h about errors, fork and
 *    a dead daemon apply. Without its daemon a sequence keeps working on the blocks that it has.
 *    Calls that need the daemon fail with -ECONNRESET or -ECONNREFUSED while no daemon runs, and
 *    with -ESTALE once another daemon has taken its place.
 */

/* For programs that have not included <kvd.h>. */
#ifndef KVD_H
#include "kvd.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- settings of the space ------------------------------------------------------------------- */

/*
 * Reads a setting of a method by the name that "kvctl space set" uses: "keydiff" (0 or 1),
 * "keydiff.budget". Choices are numbers in the order in which kvctl(1) lists them. Reads shared
 * memory only. -EINVAL: no such setting.
 */
int kvd_space_setting(kvd_space *space, const char *name, double *ret);

/*
 * Changes a setting for all users of the space. An engine that stores rotated keys should set
 * "model.rope_theta" and, if only some dimensions of a head are rotated, "model.rope_dims".
 * -EINVAL: no such setting, or an invalid value.
 */
int kvd_space_set(kvd_space *space, const char *name, double value);

/* ---- sequences ------------------------------------------------------------------------------- */

typedef struct kvd_sequence kvd_sequence;

enum kvd_entry_flags {
        KVD_ENTRY_OWN = 1,      /* filled by this sequence */
        KVD_ENTRY_BORROWED = 2, /* from the prefix cache: held by the caller's pin, never changed */
        KVD_ENTRY_SHARED = 4,   /* MemShare: a similar block is used instead */
        KVD_ENTRY_APPROX = 8,   /* KVReviver: reconstructed from the sketch */
        KVD_ENTRY_SPILLED = 16, /* not resident; there is an exact copy */
        KVD_ENTRY_VAGUE = 32,   /* not resident; in the sketch (and perhaps an exact copy) */
        KVD_ENTRY_DROPPED = 64, /* not resident, and cannot be revived */
        /* each layer and head has its own tokens, see kvd_sequence_compact */
        KVD_ENTRY_COMPACT = 128,
};

struct kvd_entry {
        uint8_t *data;       /* the block, read-only; NULL if not resident */
        uint32_t block;      /* id of the block */
        uint32_t generation; /* generation of the block */
        uint32_t position;   /* position of its first token in the sequence */
        uint32_t n_tokens;   /* number of slots in use */
        /* its keys are rotated for positions lower by delta: rotate queries by -delta */
        int32_t delta;
        uint32_t flags;               /* enum kvd_entry_flags */
        uint32_t row, row_generation; /* for kvd_sequence_labels */
};

/*
 * Opens a sequence of at most max_blocks entries, in a causal space. Free it with
 * kvd_sequence_close, which returns NULL. -EUSERS: the space has too many sequences.
 */
int kvd_sequence_open(kvd_space *space, uint32_t max_blocks, kvd_sequence **ret);
kvd_sequence *kvd_sequence_close(kvd_sequence *sequence);

/* Returns the *n entries, first to last, valid until the next call. */
const struct kvd_entry *kvd_sequence_entries(const kvd_sequence *sequence, uint32_t *n);

/*
 * Appends n full blocks of a prefix to the table, with their n * block_tokens tokens. pin must hold
 * the blocks as long as the sequence is open. -ENOSPC: the table is full.
 */
int kvd_sequence_borrow(kvd_sequence *sequence, const struct kvd_pin *pin, uint32_t n,
                        const uint32_t *ids, const uint32_t *tokens);

/*
 * Appends filled blocks to the table. They then belong to the sequence and are read-only; the
 * kvd_block structs are zeroed. Only the last block may be partial. The next block's first position
 * follows its last token, so a step may begin in a new block (MemShare finds repeated steps only if
 * they are aligned alike in their blocks). Returns the number of blocks appended; it is less than n
 * if a later request of a large call failed. On a negative result nothing has changed, except that
 * after -ETIMEDOUT, -ECONNRESET and -EPROTO the blocks can only be freed, as with kvd_seal. On a
 * GPU, the data must have been written before the call, by any stream.
 */
int kvd_sequence_append(kvd_sequence *sequence, uint32_t n, struct kvd_block *blocks,
                        const uint32_t *tokens, uint32_t n_tokens);

/*
 * MemShare: reports that tokens [first, first + n) of the sequence are a complete step. Does
 * nothing if memshare is off.
 */
int kvd_sequence_step(kvd_sequence *sequence, uint32_t first, uint32_t n);

/*
 * Applies the changes that the daemon proposes. Call it while no kernel reads the table. Returns
 * the number of entries changed. If there are no changes, it costs one load from shared memory.
 */
int kvd_sequence_sync(kvd_sequence *sequence);

/*
 * Waits until everything that this sequence requested is complete (blocks that leave or come back,
 * steps to compare, a sharing configuration, labels of appended blocks), or for timeout_ns
 * nanoseconds, and applies changes as kvd_sequence_sync does. Returns the number of entries
 * changed. -ETIMEDOUT: something is not complete; changes that had arrived are applied. -ESTALE,
 * without waiting: the daemon is gone.
 */
int kvd_sequence_wait(kvd_sequence *sequence, uint64_t timeout_ns);

enum kvd_cool { KVD_COOL_SPILL = 1, KVD_COOL_VAGUE = 2, KVD_COOL_DROP = 3 };

/*
 * Offers the sequence's own blocks in slots[0..n) for removal from the pool. The daemon copies them
 * (and adds them to the sketch), and a later sync removes them. Returns how many will be removed:
 * fewer than n if the memory for copies is not enough for all. If it is used up, so that no block
 * can leave: -EDQUOT if the domain's share is, -ENOBUFS if that of all domains is at present.
 */
int kvd_sequence_cool(kvd_sequence *sequence, uint32_t n, const uint32_t *slots, enum kvd_cool how);

enum kvd_revive { KVD_REVIVE_EXACT = 1, KVD_REVIVE_APPROX = 2, KVD_REVIVE_BOTH = 3 };

/*
 * Requests blocks of the entries slots[0..n) that are not resident. They arrive at a later sync;
 * with KVD_REVIVE_BOTH first approximately and then exactly. Returns how many will arrive.
 * -ENODATA: KVD_REVIVE_APPROX was requested, and the sketch is loaded over kvreviver.max_load or
 * does not contain the blocks.
 */
int kvd_sequence_revive(kvd_sequence *sequence, uint32_t n, const uint32_t *slots,
                        enum kvd_revive how);

/*
 * Scores of tokens: floats in the processor's byte order, contiguous from byte to byte through
 * blocks of block_bytes each: [layer of a block][KV head][token]. The caller allocates and fills
 * the blocks (kvd_alloc), and keeps them unchanged until the compaction is complete. On a GPU, the
 * scores must have been written before the call, by any stream.
 */
struct kvd_scores {
        const struct kvd_block *blocks; /* the caller's */
        uint32_t n_blocks;
};

/*
 * Compaction: among the tokens of own resident entries [first, first + n), each layer and KV head
 * keeps the `keep` tokens of highest score. All changes arrive together at a later sync. The
 * range's first entries then hold the kept tokens (KVD_ENTRY_COMPACT, n_tokens slots), in order of
 * position within each head; its other entries are KVD_ENTRY_DROPPED. Slots no longer have a
 * position, because keys keep their rotation. Compact entries may be compacted again. n is at most
 * 1024.
 *
 * scores NULL: KeyDiff (Park et al. 2025, arXiv:2504.15364), if the space's keydiff is on. The
 * score of a token is high if its key is unlike the mean direction of all keys in the sequence's
 * resident entries. Entries that are not resident, approximate, shared or busy are skipped.
 *
 * Else *scores has the score of every token, in the order of the entries, n_tokens of each but none
 * of KVD_ENTRY_DROPPED; keydiff may be off. NaN is less than every number; of equal scores, those of
 * later tokens are kept. The other entries must all be own, resident and idle ones, and not
 * approximate. The blocks are read until
 * kvd_sequence_wait returns, or a sync has changed the entries; free them then, or at once if this
 * call returns 0 or an error. If one is freed or sealed earlier, the entries may stay as they are.
 *
 * Returns how many entries will change; 0 if compaction would gain nothing. -ENOBUFS: no room for
 * the new blocks in addition to the old ones. -EBUSY: the previous compaction is not complete, or,
 * with scores, an entry is busy. -EOPNOTSUPP: keydiff is off, or keys are stored as i8 (both
 * without scores), or before rotation. With scores: -EINVAL: they do not fit into the blocks, or an
 * entry cannot be compacted; -ESTALE: a block is not one that the caller is filling; -E2BIG: the
 * blocks to pack, the packed ones and those of the scores are more than 3840.
 */
int kvd_sequence_compact(kvd_sequence *sequence, uint32_t first, uint32_t n, uint32_t keep,
                         const struct kvd_scores *scores);

/*
 * Reports how this step's attention used an entry. mass is its attention per token, relative to the
 * average of 1; hits is how many of its tokens were selected. Updates moving averages (sums, if
 * kvreviver.profile is paper) in shared memory, without a call to the daemon.
 */
void kvd_sequence_use(kvd_sequence *sequence, uint32_t slot, float mass, float hits);

struct kvd_sequence_stats {
        uint64_t blocks, resident, own, borrowed;
        /* MemShare's affected ratio is shared_tokens / tokens */
        uint64_t shared, shared_tokens, tokens;
        uint64_t bytes_saved; /* bytes of blocks that shared ones replaced */
        uint64_t spilled, vague, approximate, dropped;
        uint64_t revived_exact, revived_approx;
        uint64_t compacted;      /* entries with KVD_ENTRY_COMPACT */
        uint64_t resident_bytes; /* bytes of resident blocks of unshared entries */
        uint64_t label_bytes;    /* bytes of summaries: labels, anchors, norms */
        /* bytes of exact copies and of sketches, as of the last sync */
        uint64_t copy_bytes, sketch_bytes;
};
void kvd_sequence_stats(const kvd_sequence *sequence, struct kvd_sequence_stats *ret);

/* ---- labels and shared selections ------------------------------------------------------------ */

struct kvd_label_shape {
        uint32_t channels; /* number of a key's channels in its label */
        /* bytes per token and KV head: 4-bit numbers, minimum and scale as f16 */
        uint32_t label_bytes;
        uint32_t layer_stride;   /* bytes from layer to layer */
        uint32_t head_stride;    /* bytes from KV head to KV head: block_tokens labels */
        const uint16_t *channel; /* [layers][kv_heads][channels] indices of the channels */
};

/*
 * Returns the labels of an entry's tokens, [layer][kv head][token] with the strides in *shape,
 * whether or not its block is resident; NULL if they have not been made. Valid until the next sync.
 */
const uint8_t *kvd_sequence_labels(const kvd_sequence *sequence, uint32_t slot,
                                   struct kvd_label_shape *shape);

/*
 * Requests a sharing configuration for the sequence, which a worker computes from the tokens that
 * its last prompt queries select. blocks are n blocks of the caller (kvd_alloc) that contain, one
 * after the other, the bits [layers][kv_heads][queries][words], 64 tokens per word; each query
 * selects `selected` tokens. Keep the blocks until kvd_sequence_sharing returns 1 or an error.
 * layers x kv_heads x queries is at most 1048576.
 */
int kvd_sequence_critical(kvd_sequence *sequence, uint32_t n, const struct kvd_block *blocks,
                          uint32_t queries, uint32_t words, uint32_t selected);

/*
 * Reads the sharing configuration. layer[l] is the layer whose selection layer l uses; head[l *
 * kv_heads + h] is the KV head of the same layer whose selection head h uses. Returns 1, or 0 if
 * the configuration is not ready.
 */
int kvd_sequence_sharing(kvd_sequence *sequence, uint8_t *layer, uint8_t *head);

/* ---- reused prefixes of bidirectional models ------------------------------------------------- */

/*
 * Returns how many layers of a shared prefix to reuse unchanged, according to the space's table (at
 * least 1); 0 if there is no table. Reads shared memory only.
 */
int kvd_prefix_depth(kvd_space *space, uint32_t prefix_tokens, uint32_t prompt_tokens,
                     uint32_t generated_tokens);

/* Returns 1 if the deep layers are to be recomputed at step t (counted from 1), otherwise 0. */
int kvd_prefix_refresh(kvd_space *space, uint32_t t);

/*
 * Submits one profile sample at a prefix ratio of r percent. blocks is [layer_groups][2][n]: for
 * each layer group, n blocks with keys and values of the prefix computed alone, then n blocks with
 * those of the prefix computed with the whole input, each of n_tokens tokens. Waits up to a minute
 * for the worker. The blocks remain the caller's.
 */
int kvd_prefix_sample(kvd_space *space, uint32_t r, uint32_t n, const struct kvd_block *blocks,
                      uint32_t n_tokens);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
