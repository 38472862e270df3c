/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_TEXT_H
#define KVD_BASE_TEXT_H

/* Text from outside: characters, names, and lists of words. */

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* ---- characters ------------------------------------------------------------------------------ */

/*
 * Length in bytes of the UTF-8 character at the start of text[0..n); 0 if n is 0 or it is
 * overlong, a surrogate, or beyond U+10FFFF.
 */
size_t kvd_utf8(const char *text, size_t n);
/* a control character that a terminal might interpret: C0, DEL or C1 */
bool kvd_is_control(const char *character, size_t bytes);
/* valid UTF-8 without control characters */
bool kvd_is_plain(const char *text, size_t n);
/* Replaces each byte that is not printable ASCII with a question mark. Returns the text. */
char *kvd_make_plain(char *text);

/* ---- output ---------------------------------------------------------------------------------- */

/* 0, or -errno if some of the output so far could not be written. */
int kvd_flush_output(FILE *to);
int kvd_end_output(FILE *to); /* the same, and closes it */

/*
 * Bytes of the character at the start of text, which is not empty; or of a colour (ESC[...m), whose
 * width is 0.
 */
size_t kvd_text_step(const char *text, size_t n, unsigned *width);
unsigned kvd_text_width(const char *text); /* sum of the widths */

/*
 * Writes in lines of at most width characters (0: no limit), broken at spaces; later lines begin
 * with indent spaces, which do not count.
 */
void kvd_put_wrapped(FILE *to, const char *text, unsigned width, unsigned indent);

/* ---- names ----------------------------------------------------------------------------------- */

/* The characters of names of spaces, domains and layouts; KVD_NAME_LETTERS is for messages. */
#define KVD_NAME_MAX 63
#define KVD_NAME_LETTERS "A-Z a-z 0-9 . _ -"

bool kvd_is_name_letter(char c);
bool kvd_is_name(const char *text, size_t most); /* 1 to most such letters */

/* ---- words, separated by blanks -------------------------------------------------------------- */

/* position of the word in the list; -1: it is not there */
int kvd_word_index(const char *words, const char *word);
/* not NUL-terminated; NULL: the list has fewer words */
const char *kvd_word_at(const char *words, int index, size_t *bytes);

/* ---- suggestions ----------------------------------------------------------------------------- */

/*
 * How many letters of a and b must change until they are equal, a swapped pair counting once; for
 * suggestions.
 */
unsigned kvd_distance(const char *a, const char *b);

struct kvd_nearest {              /* to a word that was probably meant otherwise */
        const char *given, *name; /* name: NULL if none is near */
        unsigned distance;
};

struct kvd_nearest kvd_nearest_to(const char *given);
void kvd_consider(struct kvd_nearest *nearest, const char *name);

#endif
