/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_ATTEND_H
#define KVD_ATTEND_H

/*
 * Attention over blocks in place, for engines without a paged kernel of their own. For spaces whose
 * blocks are planes. In host memory it runs on the calling thread, makes no system call, and
 * allocates memory only while its scratch buffer still grows. On a GPU it runs in a stream
 * (kvd_batch, at the end of this file).
 *
 *      for each layer
 *              kvd_paged_write        store keys and values of new tokens in blocks being filled
 *              kvd_paged_attention    attend from the new tokens to all positions up to their own
 *
 * Inputs and outputs are float; stored values are rounded to the space's dtype, to nearest even, or
 * quantised (enum kvd_dtype). Blocks of KVD_I8 are refused: their scales are unknown. A result depends, bit for bit, only on the query and on the keys and values that it sees: not on
 * the number of tokens in a call, the location of blocks, or the processor.
 */

/* For programs that have not included <kvd.h>. */
#ifndef KVD_H
#include "kvd.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/*
 * A sequence's blocks in order of position: position p is slot p % block_tokens of block
 * blocks[p / block_tokens]. All blocks belong to one layer group and one daemon, and are pinned or
 * being filled by the caller. view is that of the pin (kvd_pin.view) or of any of the blocks
 * (kvd_block.view); if these differ, the daemon was replaced in between. If another process of the
 * engine holds the blocks, it is that of the memory which has them (kvd_space_memory.view).
 */
struct kvd_table {
        const void *view;
        const uint32_t *blocks; /* [n_blocks] block ids */
        uint32_t n_blocks;
        uint32_t first; /* position of the first new token */
        uint32_t n;     /* number of new tokens: positions [first, first + n) */
};

/*
 * Stores the keys and values of the new tokens for one layer (numbered in the whole model). k and v
 * are [n][kv_heads][head_dim] floats, with ld floats from one token to the next. -EINVAL: a block
 * is not being filled (sealed blocks are never written), the table is too short for the positions,
 * or the space has no such planes in host memory.
 */
int kvd_paged_write(kvd_space *space, uint32_t layer, const struct kvd_table *table, const float *k,
                    const float *v, size_t ld);

/*
 * Keys and values of the newest positions as floats, as they were before they were stored: of the
 * last n positions up to the last new token's, [n][kv_heads][head_dim] each, with ld floats from
 * one token to the next. A new token at position p sees them from position p / span * span on, as
 * far as they are given. Of the positions before, it sees what is stored.
 *
 * With few bits, rounding costs most in the newest tokens, which get most of the attention. KIVI
 * (Liu et al. 2024, arXiv:2402.02750) keeps a residual of exact tokens for this reason. Also give
 * the tokens of a span that are before the new ones: then a result does not depend on the number of
 * tokens in a call.
 */
struct kvd_exact {
        const float *k, *v;
        size_t ld;
        uint32_t n;    /* >= 1 */
        uint32_t span; /* tokens, >= 1 */
};

/*
 * How a layer attends. Weights are softmax(scale * q . k). Query head h uses KV head
 * h / (heads / kv_heads). Members that are 0 are off.
 */
struct kvd_heads {
        uint32_t heads;  /* query heads, a multiple of kv_heads */
        uint32_t window; /* sliding window: a token sees the last window positions up to its own */
        float scale;     /* > 0; it and cap are finite */
        float cap;       /* soft cap: scores are cap * tanh(scale * q . k / cap) */
        /* attention sinks: [heads] scores that take weight and have no value */
        const float *sinks;
        const struct kvd_exact *exact; /* of this layer */
};

/*
 * Computes causal attention: new token i sees positions 0 to first + i, or the last window of them.
 * They must have been written. q and out are [n][heads][head_dim] floats, with ldq and ldo floats
 * from one token to the next. -EINVAL: as above, or a member of heads is out of range, or keys are
 * stored before rotation (KVD_ROPE_PRE). -ENOMEM: no memory for scores.
 */
int kvd_paged_attention(kvd_space *space, uint32_t layer, const struct kvd_table *table,
                        const struct kvd_heads *heads, const float *q, size_t ldq, float *out,
                        size_t ldo);

/*
 * What new tokens see of a sequence (kvd_methods.h), which the methods may have changed: the tokens
 * of its resident entries, as kvd_sequence_entries lists them. Members that are NULL are off.
 */
struct kvd_seen {
        struct kvd_sequence *sequence;
        /*
         * [head_dim / 2] of the rotary embedding: radians per position by which elements i and
         * i + head_dim / 2 of a key are rotated. For entries with a delta.
         */
        const float *frequencies;
        /*
         * [kv_heads] lists of n_chosen[head] slots, ascending: only these are seen (HShare). Slot s
         * is token s % block_tokens of entry s / block_tokens. Slots that hold no token are ignored.
         */
        const uint32_t *const *chosen;
        const uint32_t *n_chosen;
        /*
         * [entries] attention mass is added here, summed over the query heads and new tokens of a
         * call, each of which gives 1 to all that it sees, less what its sink takes
         */
        float *mass;
};

/*
 * Does the same as kvd_paged_attention, but new tokens see the sequence first, and then the table's
 * positions 0 to first + i: those behind the last entry, which kvd_sequence_append may later add to
 * it. Keys are those of their own positions; slots of compacted entries have none. Exact keys and
 * values may reach into the last entries, which count block_tokens positions each: those before an
 * entry that is compacted, not full or has a delta are not seen. -EINVAL: also
 * an entry has a delta, and frequencies is NULL; or the space has several layer groups; or there is
 * a sliding window, and an entry is compacted or not full. -ESTALE: the table and the sequence
 * belong to different daemons.
 */
int kvd_sequence_attention(const struct kvd_seen *seen, uint32_t layer,
                           const struct kvd_table *table, const struct kvd_heads *heads,
                           const float *q, size_t ldq, float *out, size_t ldo);

/* ---- what decoded tokens need of a sequence --------------------------------------------------- */

/*
 * A reader decides what a sequence's tokens see of it, as the space's settings say when the reader
 * is made.
 *
 *  - hshare: a decoded token sees the first tokens, the newest ones, and some that its query
 *    selects. Similar layers, heads and queries share a selection (HShare, ICLR 2025, sections 4.2
 *    and 4.3); a worker decides which are similar from what the prompt's last queries select.
 *    Once an entry is compacted, only queries do: a slot is another token in each layer and head.
 *  - kvreviver: a share of the blocks stays in the pool: the first, the newest, and those that
 *    queries need most. The others leave when decoding begins, with an exact copy (or are only in
 *    a sketch, if kvreviver.spill is off). A query waits for a missing block that it needs.
 *
 * Both estimate what a query needs from the labels of keys, which remain when a block leaves.
 *
 *      each pass          kvd_reader_begin
 *        each layer       kvd_reader_attention
 *                         (kvd_sequence_append, kvd_sequence_compact)
 *                         kvd_reader_end
 *      prompt complete    kvd_reader_decode
 */
typedef struct kvd_reader kvd_reader;

struct kvd_reader_options {
        uint32_t heads; /* query heads, a multiple of kv_heads */
        float scale;    /* of scores, as in struct kvd_heads */
        /* as in struct kvd_seen; copied */
        const float *frequencies;
        uint64_t timeout_ns; /* maximum time to wait for blocks */
};

struct kvd_reader_stats {
        uint64_t selections;    /* selections of a layer and head */
        uint64_t misses;        /* blocks that queries missed */
        uint64_t late;          /* number of timeouts */
        uint64_t most_resident; /* maximum number of resident blocks since decoding began */
        uint64_t select_ns, fetch_ns;
};

/*
 * Makes a reader of a sequence, which it must not outlive. Free it with kvd_reader_free, which
 * returns NULL. All calls must be made by the thread that uses the sequence. -EINVAL: the space has
 * several layer groups, or an option is out of range. -ENOMEM
 */
int kvd_reader_new(struct kvd_sequence *sequence, const struct kvd_reader_options *options,
                   kvd_reader **ret);
kvd_reader *kvd_reader_free(kvd_reader *reader);

/*
 * Begins a pass of n new tokens. behind: number of tokens behind the sequence's last entry, with
 * the new ones.
 */
void kvd_reader_begin(kvd_reader *reader, uint32_t behind, uint32_t n);

/*
 * Does the same as kvd_sequence_attention for what the queries need. It may apply changes to the
 * sequence, as kvd_sequence_wait does. Errors are those of kvd_sequence_attention and, if blocks
 * that have an exact copy are needed and do not come, -ETIMEDOUT, -ENOBUFS (there is no room for
 * them), and what kvd_sequence_revive returns without the daemon; it may be called again then.
 */
int kvd_reader_attention(kvd_reader *reader, uint32_t layer, const struct kvd_table *table,
                         const struct kvd_heads *heads, const float *q, size_t ldq, float *out,
                         size_t ldo);

/*
 * Does the same without attention, for a pass of the prompt whose attention the engine computes
 * itself. Of its queries the last 32 matter: a pass of only these may be described instead. -EINVAL
 */
int kvd_reader_look(kvd_reader *reader, uint32_t layer, const float *q, size_t ldq);

/*
 * Ends a pass. Once decoding has begun, it reports the use of entries (kvd_sequence_use) and lets
 * blocks leave. Returns how many entries may have changed.
 */
int kvd_reader_end(kvd_reader *reader);

/*
 * Begins decoding: to be called once, after the pass that completes the prompt. behind: number of
 * tokens that are now behind the last entry. May wait, and apply changes. Returns how many entries
 * may have changed, or -ENOMEM.
 */
int kvd_reader_decode(kvd_reader *reader, uint32_t behind);

/*
 * Selects what one query needs most of the sequence, for engines that bring their own attention:
 *
 *  - KVD_SELECT_TOKENS: slots of tokens (see struct kvd_seen), by the labels of keys: the channels
 *    of largest weight, at 4 bits. These are the critical tokens of HShare (ICLR 2025, equation 1),
 *    with the labels of DoubleSparse (arXiv:2408.07092). A reader's attention selects alike.
 *  - KVD_SELECT_BLOCKS: entries, by the share of the attention that these labels give their tokens.
 *  - KVD_SELECT_BOUNDS: entries, by the largest score that any of their keys can have, from the
 *    least and the largest value of each dimension (Quest, ICML 2024, algorithm 1): the sum over d
 *    of max(q[d] * least[d], q[d] * most[d]). Needs no method and no daemon, and memory of
 *    2 * head_dim floats for each layer, KV head and entry.
 */
enum kvd_select { KVD_SELECT_TOKENS = 1, KVD_SELECT_BLOCKS = 2, KVD_SELECT_BOUNDS = 3 };

/*
 * q is [heads][head_dim] floats, rotated for the query's position. The query heads of a KV head
 * select together: by the sum of softmax(scale * score) over them. to is [kv_heads][n] and n_to
 * [kv_heads], both the caller's: to[h * n] and following get n_to[h] <= n numbers of slots or
 * entries, ascending; of equal ones the first. Fewer than n only if there are no more.
 *
 * The entries are those of the last kvd_reader_begin. By labels, entries are included that are not
 * resident but can be revived; those that have no labels yet come first. By bounds, entries are
 * excluded that were not resident at any selection of the layer. First and newest tokens, which
 * most engines always attend to, are neither excluded nor preferred, and tokens behind the last
 * entry are not among them. Nothing is fetched, and sharing between layers and heads is not followed.
 *
 * Returns 0. -EINVAL: no such layer, n is 0, or bounds of blocks on a GPU or of another type than
 * f32, f16 and bf16. -EOPNOTSUPP: by labels, and neither hshare nor kvreviver was on when the
 * reader was made. -ENOMEM
 */
int kvd_reader_select(kvd_reader *reader, uint32_t layer, enum kvd_select what, const float *q,
                      uint32_t n, uint32_t *to, uint32_t *n_to);

void kvd_reader_stats(const kvd_reader *reader, struct kvd_reader_stats *ret);

/* ---- on a GPU: a batch of requests ------------------------------------------------------------ */

/*
 * Attention in place in a space on a GPU, for the requests of a step together. It does for each what
 * kvd_sequence_attention or kvd_reader_attention does on the processor, with the same masses within
 * the tolerance of the arithmetic (sums in fp32). Without sliding windows, soft caps, sinks and
 * exact rows, and a reader has one round: blocks for which there is no room are not seen.
 *
 *      each step          kvd_reader_begin     of each reader
 *                         kvd_batch_begin      what the requests see: copied to the GPU
 *        each layer       kvd_batch_attention
 *                         kvd_batch_end
 *                         kvd_reader_end       of each reader
 *
 * Kernels run in the order of the stream (kvd_cuda.h), after the kernels of the engine that have
 * written the new tokens' keys and values. Calls do not wait for them, with these exceptions:
 * kvd_batch_begin waits for the copies of the step before; a layer whose queries a reader looks at,
 * for the queries; kvd_batch_end, for masses; and all, if memory on the GPU must grow. What the
 * requests name (blocks, sequences) must stay as it is until kvd_batch_end has returned and the
 * stream has passed: apply changes (kvd_sequence_sync, kvd_sequence_wait, kvd_reader_decode) after
 * that. A stream that is being captured is refused: -EBUSY.
 */
typedef struct kvd_batch kvd_batch;

struct kvd_batch_options {
        uint32_t heads;           /* query heads, a multiple of kv_heads */
        uint32_t dtype;           /* of queries and results: KVD_F32, KVD_F16 or KVD_BF16 */
        float scale;              /* of scores, as in struct kvd_heads */
        const float *frequencies; /* as in struct kvd_seen; copied */
};

struct kvd_request {
        struct kvd_table table;        /* its new tokens, n >= 1, and the blocks they are in */
        struct kvd_sequence *sequence; /* what they see before the table; NULL: nothing */
        kvd_reader *reader;            /* of that sequence; NULL: all that is resident is seen */
        /* [entries] without a reader, as in struct kvd_seen; added when the step ends */
        float *mass;
};

/*
 * Makes a batch for a space on a GPU, which must not be closed before it. Free it with
 * kvd_batch_free, which waits for its kernels and returns NULL. A batch is used by one thread at a
 * time, and by one stream unless the caller orders streams. -EINVAL: the space is not on a GPU, has
 * several layer groups, opaque blocks or dtype i8, or an option is out of range. -ENOSYS: this build
 * has no kernels. -ENOEXEC: none for this GPU. -ENOMEM
 */
int kvd_batch_new(kvd_space *space, const struct kvd_batch_options *options, kvd_batch **ret);
kvd_batch *kvd_batch_free(kvd_batch *batch);

/*
 * Begins a step of n requests. What they name stays the caller's; a sequence that has a reader is in
 * one of them only. Requests of one token are faster if they come first. -EINVAL: a table or its
 * blocks, as for kvd_sequence_attention; or an entry has a delta, and there are no frequencies.
 * -ESTALE: tables and sequences belong to different daemons. After an error no step has begun.
 */
int kvd_batch_begin(kvd_batch *batch, uint32_t n, const struct kvd_request *requests, void *stream);

/*
 * Attends from all new tokens of the step, those of the first request first. q and out are device
 * addresses of [tokens][heads][head_dim] numbers, with ldq and ldo numbers from one token to the
 * next. Errors: those of kvd_reader_attention, of any reader; it may be called again then. After
 * -EINVAL because a sequence has changed, the step is over.
 */
int kvd_batch_attention(kvd_batch *batch, uint32_t layer, const void *q, size_t ldq, void *out,
                        size_t ldo, void *stream);

/*
 * Ends the step, and adds the masses, which are lost if it fails, or if another step begins without
 * it. 0; -EBUSY, -ECHILD, or an error of the driver: -EIO
 */
int kvd_batch_end(kvd_batch *batch, void *stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
