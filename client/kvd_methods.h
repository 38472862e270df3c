/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_METHODS_H
#define KVD_METHODS_H

/*
 * libkvd's second half: sequences, and the five methods on them. kvd.h is about what many requests
 * share; this is about one request's own table, and about what may become of blocks that nobody
 * else uses.
 *
 *      open          kvd_sequence_open      a table of so many blocks
 *      grow          kvd_sequence_borrow    blocks of a prefix that a kvd_pin holds
 *                    kvd_sequence_append    blocks of one's own: sealed, but in no index, for nobody else to find
 *      a step ends   kvd_sequence_step      MemShare compares it with earlier ones
 *      safe point    kvd_sequence_sync      takes over what the daemon proposes: shared, cooled and revived blocks
 *      a miss        kvd_sequence_revive    brings back what is not resident
 *                    kvd_sequence_wait      sync, when all that was asked for is there
 *      too long      kvd_sequence_compact   KeyDiff: fewer blocks, with the tokens that point where few others do
 *      done          kvd_sequence_close     everything goes back
 *
 * Caveats:
 *  - The methods look into blocks: in a space of opaque ones all of this is refused, with
 *    -EOPNOTSUPP.
 *  - Nothing changes between two calls of kvd_sequence_sync. In it, entries may get another block
 *    (and a delta), lose theirs (data is NULL: attention must leave the slots out), or get one
 *    back.
 *  - A block whose entry has KVD_ENTRY_SHARED, KVD_ENTRY_APPROX or KVD_ENTRY_COMPACT is an
 *    approximation. What is computed with it is one, too, and must not be published with kvd_seal.
 *  - All calls of one sequence are one thread's. The rules of kvd.h about errors, fork and a dead
 *    daemon hold: without its daemon a sequence keeps working on the blocks that it has, and every
 *    call but close returns -ESTALE.
 */

/* Installed, <kvd.h> is included before this. */
#ifndef KVD_H
#include "kvd.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- settings of the space ------------------------------------------------------------------- */

/*
 * A method's setting by its name, as "kvctl space set" takes it: "keydiff" (0 or 1),
 * "keydiff.budget". Choices are numbers in the order that kvctl(1) lists them. -EINVAL: no such
 * setting. Reads shared memory only.
 */
int kvd_space_setting(kvd_space *space, const char *name, double *ret);

/*
 * Changes one, for every user of the space. An engine that rotates keys after all tells how:
 * "model.rope_theta" and, if not all dimensions of a head are rotated, "model.rope_dims". -EINVAL:
 * no such setting, or not a value of it.
 */
int kvd_space_set(kvd_space *space, const char *name, double value);

/* ---- sequences ------------------------------------------------------------------------------- */

typedef struct kvd_sequence kvd_sequence;

enum kvd_entry_flags {
        KVD_ENTRY_OWN = 1,      /* filled by this sequence */
        KVD_ENTRY_BORROWED = 2, /* of the prefix cache: held by the caller's pin, never changed */
        KVD_ENTRY_SHARED = 4,   /* MemShare: a similar block stands in */
        KVD_ENTRY_APPROX = 8,   /* KVReviver: contents came from the sketch */
        KVD_ENTRY_SPILLED = 16, /* not resident: there is an exact copy */
        /* not resident: it is in the sketch (and there may be an exact copy) */
        KVD_ENTRY_VAGUE = 32,
        KVD_ENTRY_DROPPED = 64, /* not resident, and nothing can bring it back */
        /* KeyDiff: each layer and head has tokens of its own: kvd_sequence_compact */
        KVD_ENTRY_COMPACT = 128,
};

struct kvd_entry {
        uint8_t *data;       /* the block, read-only; NULL: not resident */
        uint32_t block;      /* its id */
        uint32_t generation;
        uint32_t position;   /* of its first token in the sequence */
        uint32_t n_tokens;   /* slots in use */
        /* its keys were rotated for positions so much lower: rotate queries by -delta */
        int32_t delta;
        uint32_t flags;      /* enum kvd_entry_flags */
        uint32_t row, row_generation; /* for kvd_sequence_labels */
};

/*
 * A table of at most max_blocks entries. -EUSERS: the space has too many sequences. Freed by
 * kvd_sequence_close.
 */
int kvd_sequence_open(kvd_space *space, uint32_t max_blocks, kvd_sequence **ret);
kvd_sequence *kvd_sequence_close(kvd_sequence *sequence);

/* The entries, first to last; valid until the next call. */
const struct kvd_entry *kvd_sequence_entries(const kvd_sequence *sequence, uint32_t *n);

/*
 * Puts blocks ids[0..n) of a prefix behind the table, whose tokens are given. pin must hold them as
 * long as the sequence is open. All blocks full.
 */
int kvd_sequence_borrow(kvd_sequence *sequence, const struct kvd_pin *pin, uint32_t n,
                        const uint32_t *ids, const uint32_t *tokens);

/*
 * Puts filled blocks behind the table: they are the sequence's from then on, read-only, and the
 * kvd_block structs are emptied. Only the last one may be part filled, and the next block's first
 * position follows its last token: a step may begin in a fresh block (MemShare finds repeated steps
 * only where they lie alike in their blocks). On a negative result nothing has changed, except that
 * after -ETIMEDOUT, -ECONNRESET and -EPROTO the blocks can only be freed, as with kvd_seal. On a
 * GPU: their data is there already, whoever's stream wrote it.
 */
int kvd_sequence_append(kvd_sequence *sequence, uint32_t n, struct kvd_block *blocks,
                        const uint32_t *tokens, uint32_t n_tokens);

/*
 * MemShare: tokens [first, first + n) of the sequence are a step that is complete. Does nothing if
 * memshare is off.
 */
int kvd_sequence_step(kvd_sequence *sequence, uint32_t first, uint32_t n);

/*
 * Takes over what the daemon proposes, at a point where no kernel reads the table. Returns how many
 * entries changed. Cheap if there is nothing: one load from shared memory.
 */
int kvd_sequence_sync(kvd_sequence *sequence);

/*
 * Waits until nothing that this sequence asked for is under way (blocks that leave or come back,
 * steps that are compared, a sharing configuration, labels of what was appended), or for
 * timeout_ns, and takes over what came of it as kvd_sequence_sync does. Returns how many entries
 * changed. -ETIMEDOUT: something is under way still; what arrived is taken over all the same.
 * -ESTALE, at once: the daemon is gone.
 */
int kvd_sequence_wait(kvd_sequence *sequence, uint64_t timeout_ns);

enum kvd_cool { KVD_COOL_SPILL = 1, KVD_COOL_VAGUE = 2, KVD_COOL_DROP = 3 };

/*
 * Offers own blocks to leave the pool: they are copied (and put into the sketch), and leave at a
 * later sync.
 */
int kvd_sequence_cool(kvd_sequence *sequence, uint32_t n, const uint32_t *slots, enum kvd_cool how);

enum kvd_revive { KVD_REVIVE_EXACT = 1, KVD_REVIVE_APPROX = 2, KVD_REVIVE_BOTH = 3 };

/*
 * Asks for entries that are not resident; they arrive at a later sync, with BOTH first
 * approximately and then exactly. -ENODATA: APPROX alone was asked for, and the sketch is loaded
 * over kvreviver.max_load, or has not got the blocks.
 */
int kvd_sequence_revive(kvd_sequence *sequence, uint32_t n, const uint32_t *slots,
                        enum kvd_revive how);

/*
 * KeyDiff (Park et al. 2025, arXiv:2504.15364): of the tokens in own resident entries [first, first
 * + n), each layer and KV head keeps the `keep` tokens of highest score: those whose keys are least
 * like the mean direction of all keys in the sequence's resident entries. They arrive together, at
 * a later sync, in the range's first entries (KVD_ENTRY_COMPACT, n_tokens slots), in order of
 * position within each head; the range's other entries are KVD_ENTRY_DROPPED then. Slots no longer
 * have a position: keys carry their rotation. Entries that are not resident, approximate, shared or
 * busy with something else are left alone; compact ones may be compacted again. At most 1024
 * entries at once.
 *
 * Returns how many entries will change; 0: nothing would be gained. -ENOBUFS: there is no room for
 * the new blocks beside the old ones. -EBUSY: the one before is under way still. -EOPNOTSUPP:
 * keydiff is off; or keys are stored before rotation, or as 8 bits.
 */
int kvd_sequence_compact(kvd_sequence *sequence, uint32_t first, uint32_t n, uint32_t keep);

/*
 * What this step's attention says of an entry: mass is its share of the attention per token, 1 the
 * average; hits how many of its tokens were selected per step. Kept as moving averages in shared
 * memory; no call to the daemon.
 */
void kvd_sequence_use(kvd_sequence *sequence, uint32_t slot, float mass, float hits);

struct kvd_sequence_stats {
        uint64_t blocks, resident, own, borrowed;
        /* MemShare's affected ratio is shared_tokens / tokens */
        uint64_t shared, shared_tokens, tokens;
        uint64_t bytes_saved;                   /* of blocks that shared ones replaced */
        uint64_t spilled, vague, approximate, dropped;
        uint64_t revived_exact, revived_approx;
        uint64_t compacted;                     /* entries with KVD_ENTRY_COMPACT */
        /* of blocks in the pool that it uses; one that stands in counts once */
        uint64_t resident_bytes;
        /* of its blocks' summaries: labels, anchors, norms */
        uint64_t label_bytes;
        /* of exact copies and sketches, as the daemon said at the last sync */
        uint64_t copy_bytes, sketch_bytes;
};
void kvd_sequence_stats(const kvd_sequence *sequence, struct kvd_sequence_stats *ret);

/* ---- HShare ---------------------------------------------------------------------------------- */

struct kvd_label_shape {
        uint32_t channels;      /* of a key in its label */
        /* of one token and KV head: 4-bit numbers, minimum and scale as f16 */
        uint32_t label_bytes;
        uint32_t layer_stride;  /* bytes from layer to layer */
        uint32_t head_stride;   /* bytes from KV head to KV head: block_tokens labels */
        const uint16_t *channel; /* [layers][kv_heads][channels] */
};

/*
 * The labels of an entry's tokens, [layer][kv head][token] as shape says; NULL: not (yet) made. For
 * resident and other blocks alike. Valid until the next sync.
 */
const uint8_t *kvd_sequence_labels(const kvd_sequence *sequence, uint32_t slot,
                                   struct kvd_label_shape *shape);

/*
 * The sharing configuration of a sequence, made by the worker from what its last prompt queries
 * select: bits is [layers][kv_heads][queries][words] of 64 tokens each, in blocks of the caller
 * (kvd_alloc), one after the other, which it keeps until kvd_sequence_sharing answers; layers x
 * kv_heads x queries are at most 1048576.
 */
int kvd_sequence_critical(kvd_sequence *sequence, uint32_t n, const struct kvd_block *blocks,
                          uint32_t queries, uint32_t words, uint32_t selected);

/*
 * layer[l]: the layer whose selection l uses; head[l * kv_heads + h]: the KV head, of the same
 * layer, that h uses. Returns 1, or 0 if it is not made yet.
 */
int kvd_sequence_sharing(kvd_sequence *sequence, uint8_t *layer, uint8_t *head);

/* ---- BiCache --------------------------------------------------------------------------------- */

/*
 * How many layers of a shared prefix to use as they are, by the space's table (at least 1); 0:
 * there is no table yet. Reads shared memory only.
 */
int kvd_prefix_depth(kvd_space *space, uint32_t prefix_tokens, uint32_t prompt_tokens,
                     uint32_t generated_tokens);

/* Whether the deep layers are computed anew at step t (from 1). */
int kvd_prefix_refresh(kvd_space *space, uint32_t t);

/*
 * One profile sample at a prefix ratio of r percent: for each layer group, n blocks of the caller
 * with keys and values of the prefix alone, and n with those of the whole input, of n_tokens
 * tokens: [group][alone, whole][n]. Waits for the worker; the blocks stay the caller's.
 */
int kvd_prefix_sample(kvd_space *space, uint32_t r, uint32_t n, const struct kvd_block *blocks,
                      uint32_t n_tokens);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
