/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_WORDS_H
#define KVCTL_WORDS_H

/* The enums of client/kvd.h by name: the names of flags, tables and JSON. */

#include <stdint.h>

/* NULL-terminated; index 0 is the number 1. */
extern const char *const words_dtype[], *const words_order[], *const words_rope[], *const words_kind[],
        *const words_keys[], *const words_policy[];

const char *word_of(const char *const *words, uint32_t number); /* "?" if there is none */
uint32_t word_number(const char *const *words, const char *word); /* 0 if there is none */

#endif
