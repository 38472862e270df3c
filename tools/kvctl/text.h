/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_TEXT_H
#define KVCTL_TEXT_H

/* Prints untrusted text (a client chooses its own name) safely, and makes it fit. */

#include <stddef.h>
#include <stdio.h>

unsigned text_width(const char *text); /* characters; colours (ESC[...m) take no room */

/*
 * Writes "?" for what a terminal might obey (control characters) or cannot show (bytes that are not
 * UTF-8).
 */
void text_put(FILE *to, const char *text, size_t n);

/*
 * Writes in lines of at most width characters (0: no limit), broken at spaces; later lines begin
 * with indent spaces, which do not count.
 */
void text_put_wrapped(FILE *to, const char *text, unsigned width, unsigned indent);

/* Writes n bytes with each line cut at width characters. */
void text_put_cut(FILE *to, const char *text, size_t n, unsigned width);

/*
 * How many letters of a and b must change until they are equal, a swapped pair counting once; for
 * suggestions.
 */
unsigned text_distance(const char *a, const char *b);

#endif
