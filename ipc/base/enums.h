/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_ENUMS_H
#define KVD_BASE_ENUMS_H

/*
 * The choices for creating a space, and for sessions, each defined once: numbers on the wire, words in flags,
 * settings, tables and JSON, and the equivalent constants of client/kvd.h (client/conn/geometry.c
 * asserts that they are equal).
 *
 *      KVD_WORDS_policy(FIRST, NEXT)    FIRST(policy, number, word, constant of kvd.h), then
 *                                       NEXT(...) for each other one
 *      KVD_policy_lru, ...              the numbers, for internal code
 *      KVD_policy_max                   the largest one: a limit of messages and checks
 *      KVD_LIST(policy)                 "lru, fifo, priority", as a literal
 */

#include <stdint.h>

#define KVD_WORDS_dtype(FIRST, NEXT) \
        FIRST(dtype, 1, f32, KVD_F32) \
        NEXT(dtype, 2, f16, KVD_F16) \
        NEXT(dtype, 3, bf16, KVD_BF16) \
        NEXT(dtype, 4, i8, KVD_I8) \
        NEXT(dtype, 5, q8, KVD_Q8) \
        NEXT(dtype, 6, q4, KVD_Q4) \
        NEXT(dtype, 7, e4m3, KVD_E4M3) \
        NEXT(dtype, 8, e5m2, KVD_E5M2)

/* order of head (h), token (n) and dimension (d) inside a plane */
#define KVD_WORDS_order(FIRST, NEXT) \
        FIRST(order, 1, hnd, KVD_HND) \
        NEXT(order, 2, nhd, KVD_NHD)

/* keys are stored after rotation, before it, or are never rotated */
#define KVD_WORDS_rope(FIRST, NEXT) \
        FIRST(rope, 1, post, KVD_ROPE_POST) \
        NEXT(rope, 2, pre, KVD_ROPE_PRE) \
        NEXT(rope, 3, none, KVD_ROPE_NONE)

#define KVD_WORDS_kind(FIRST, NEXT) \
        FIRST(kind, 1, causal, KVD_CAUSAL) \
        NEXT(kind, 2, bidirectional, KVD_BIDIRECTIONAL)

/* XXH3-128 with the space's secret, or XXH64 of the ids */
#define KVD_WORDS_keys(FIRST, NEXT) \
        FIRST(keys, 1, serve, KVD_KEYS_SERVE) \
        NEXT(keys, 2, paper, KVD_KEYS_PAPER)

/* which block is evicted first: store/cache/leaves.c */
#define KVD_WORDS_policy(FIRST, NEXT) \
        FIRST(policy, 1, lru, KVD_LRU) \
        NEXT(policy, 2, fifo, KVD_FIFO) \
        NEXT(policy, 3, priority, KVD_PRIORITY)

/* how strongly a session's blocks are kept: store/cache/session.c */
#define KVD_WORDS_keep(FIRST, NEXT) \
        FIRST(keep, 1, high, KVD_KEEP_HIGH) \
        NEXT(keep, 2, pinned, KVD_KEEP_PINNED)

#define KVD_ENUMS(ENUM) \
        ENUM(dtype) ENUM(order) ENUM(rope) ENUM(kind) ENUM(keys) ENUM(policy) ENUM(keep)

/* ---- numbers --------------------------------------------------------------------------------- */

#define KVD_NUMBER_(name, number, word, constant) KVD_##name##_##word = number,
#define KVD_ENUM_(name) \
        enum { \
                KVD_WORDS_##name(KVD_NUMBER_, KVD_NUMBER_) KVD_##name##_end, \
                KVD_##name##_max = KVD_##name##_end - 1 \
        };
KVD_ENUMS(KVD_ENUM_)
#undef KVD_ENUM_

/* ---- literals -------------------------------------------------------------------------------- */

#define KVD_TEXT_(name, number, word, constant) #word
#define KVD_COMMA_TEXT_(name, number, word, constant) ", " #word
#define KVD_BAR_TEXT_(name, number, word, constant) "|" #word
#define KVD_NUMBERED_(name, number, word, constant) #number " " #word
#define KVD_COMMA_NUMBERED_(name, number, word, constant) ", " #number " " #word

/* "lru, fifo, priority" */
#define KVD_LIST(name) KVD_WORDS_##name(KVD_TEXT_, KVD_COMMA_TEXT_)
/* "lru|fifo|priority" */
#define KVD_BARS(name) KVD_WORDS_##name(KVD_TEXT_, KVD_BAR_TEXT_)
/* "1 lru, 2 fifo, 3 priority" */
#define KVD_NUMBERED(name) KVD_WORDS_##name(KVD_NUMBERED_, KVD_COMMA_NUMBERED_)

/* ---- words ----------------------------------------------------------------------------------- */

enum kvd_enum {
#define KVD_ENUM_(name) KVD_ENUM_##name,
        KVD_ENUMS(KVD_ENUM_)
#undef KVD_ENUM_
};

const char *kvd_enum_word(enum kvd_enum which, uint32_t number); /* "?" if none */
uint32_t kvd_enum_number(enum kvd_enum which, const char *word); /* 0 if there is no such word */

#endif
