/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_METHODS_H
#define KVLM_METHODS_H

/*
 * What a sequence may give up to need less memory or less time, and the two profiles: `paper` is what the papers say,
 * `serve` what holds up in practice (the default). Every parameter has a name and a value in text, so that they can
 * come from a command line or from a space's settings alike.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum evict {
        EVICT_NONE,
        EVICT_KEYDIFF,   /* keys that are like the mean key go */
        EVICT_WINDOW,    /* old tokens go (StreamingLLM) */
        EVICT_RANDOM,
        EVICT_ATTENTION, /* tokens that drew little attention go (H2O, per query that saw them) */
        EVICT_REVIVER,   /* KVReviver: recent, candidate and vague parts */
        EVICT_INT4,      /* all but the recent tokens in 4 bits */
};

enum evict_unit { UNIT_HEAD, UNIT_BLOCK };
enum sketch_keys { SKETCH_UNSIGNED, SKETCH_SIGNED, SKETCH_CENTRED };
enum sketch_hash { SKETCH_UNIFORM, SKETCH_PERMUTATION };
enum sketch_delete { DELETE_EXACT, DELETE_ESTIMATE, DELETE_TOMBSTONE };

enum { LABEL_CHANNELS_MAX = 64 };

struct methods {
        bool paper;
        uint32_t decode_tail; /* last tokens of a prompt that are computed one by one, as if they were generated */

        enum evict evict;
        enum evict_unit unit;
        uint32_t budget;      /* tokens per layer and KV head; 0: budget_share of the prompt */
        float budget_share;
        uint32_t every;       /* prompt tokens between evictions; 0: once, at its end */
        uint32_t slack;       /* tokens above the budget before a decoding sequence evicts again */
        uint32_t sink_blocks; /* first blocks that stay */
        float recent;         /* share of the budget for the newest tokens */
        uint64_t seed;        /* EVICT_RANDOM, and the sketch's salt */

        struct {
                float vague, candidate, recent; /* shares of the budget */
                float replace_rate;
                enum sketch_keys keys;
                enum sketch_hash hash;
                enum sketch_delete delete;
                float max_load;  /* tokens per cell beyond which a sketch is not asked */
                bool spill;      /* exact keys and values wait in memory that is not the cache's */
                uint32_t revive; /* spilled tokens that a query (or a block of a prompt) brings back at most, per
                                    layer and KV head */
        } reviver;

        struct {
                bool on;
                float layer, head, query; /* sharing ratios: the shares that select for themselves */
                uint32_t sinks, recent, middle; /* x, y, z */
                uint32_t dense_layers;
                bool star; /* not greedy with root compression */
                uint32_t channels; /* 0: labels.c chooses */
                uint32_t n_given, given[LABEL_CHANNELS_MAX]; /* channels of all layers and heads; 0: calibrated */
        } hshare;
};

#define METHODS_HELP \
        "Less memory, less time (answers may change; see kvlm(1)):\n" \
        "  --profile NAME       serve (default), or paper: as the methods' papers have it\n" \
        "  --evict WHAT         keep a budget of tokens: keydiff, window, random, attention, reviver or int4\n" \
        "  --budget N|P%        tokens per layer and head, or a share of the prompt\n" \
        "  --evict-unit UNIT    head: each layer and head has its own tokens (default); block: whole blocks\n" \
        "  --evict-every N      prompt tokens between evictions (default 128; 0: at the prompt's end)\n" \
        "  --evict-slack N      generated tokens between evictions\n" \
        "  --evict-seed N       of random, and of the sketch\n" \
        "  --sink-blocks N      first blocks that stay\n" \
        "  --recent-frac F      share of the budget for the newest tokens\n" \
        "  --split V:C:R        reviver: shares of the vague, candidate and recent part (default .1:.45:.45)\n" \
        "  --replace-rate R     reviver: how much better a vague token must be to come back (default 1.1)\n" \
        "  --sketch-keys KEYS   unsigned, signed or centred\n" \
        "  --sketch-hash HASH   uniform or permutation\n" \
        "  --sketch-delete HOW  exact, estimate or tombstone\n" \
        "  --sketch-load L      tokens per cell beyond which the sketch is not asked\n" \
        "  --spill WHAT         reviver, int4: exact keys and values wait in ordinary memory, or none do\n" \
        "  --revive N           so many of them are used at most, per query, layer and head\n" \
        "  --hshare L,H,Q       attend to critical tokens; shares of layers, heads and queries that select them\n" \
        "  --critical X,Y,Z     first, newest and selected tokens\n" \
        "  --labels N           channels of a key that select: how many, or a list\n" \
        "  --dense-layers N     first layers that attend to all tokens\n" \
        "  --share-by HOW       greedy or star\n" \
        "  --decode-tail N      compute a prompt's last tokens one by one, as if they were generated\n"

/* Names of the parameters, without dashes: method_name(i), i < METHOD_NAMES. */
#define METHOD_NAMES 23
const char *method_name(size_t i);

/* values[i] belongs to method_name(i), NULL: the profile's. -EINVAL, with a line: not understood, or nonsense. */
int methods_read(const char *const values[METHOD_NAMES], struct methods *ret);

bool methods_active(const struct methods *); /* anything at all that is not exact and dense */
const char *evict_name(enum evict);

#endif
