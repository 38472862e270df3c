/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_TEXT_H
#define KVD_BASE_TEXT_H

/* Text from somebody else: characters, names, and words out of a list. */

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* ---- characters ------------------------------------------------------------------------------ */

/*
 * Bytes of the UTF-8 character at text[0..n); 0: there is none, or it is overlong, a surrogate, or
 * beyond U+10FFFF.
 */
size_t kvd_utf8(const char *text, size_t n);
/* C0, DEL or C1: what a terminal might obey */
bool kvd_is_control(const char *character, size_t bytes);
/* all of it UTF-8, without control characters */
bool kvd_is_plain(const char *text, size_t n);
/* Replaces whatever is not printable ASCII by a question mark. Returns the text. */
char *kvd_make_plain(char *text);

/* ---- output ---------------------------------------------------------------------------------- */

/* 0, or -errno: not all that was printed so far has arrived. */
int kvd_flush_output(FILE *to);
int kvd_end_output(FILE *to); /* the same, and closes it */

/* ---- names ----------------------------------------------------------------------------------- */

/* Spaces, domains and layouts are called by these letters; a message says so in the words below. */
#define KVD_NAME_MAX 63
#define KVD_NAME_LETTERS "A-Z a-z 0-9 . _ -"

bool kvd_is_name_letter(char c);
bool kvd_is_name(const char *text, size_t most); /* of 1 to most letters */

/* ---- words, separated by blanks -------------------------------------------------------------- */

/* -1: it is not in the list */
int kvd_word_index(const char *words, const char *word);
/* NULL: there are fewer; not terminated */
const char *kvd_word_at(const char *words, int index, size_t *bytes);

#endif
