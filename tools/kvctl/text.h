/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_TEXT_H
#define KVCTL_TEXT_H

/* Prints untrusted text (a client chooses its own name) safely, and makes it fit. */

#include <stddef.h>
#include <stdio.h>

/*
 * Writes "?" for what a terminal might obey (control characters) or cannot show (bytes that are not
 * UTF-8).
 */
void text_put(FILE *to, const char *text, size_t n);

/* Writes n bytes with each line cut at width characters; colours (ESC[...m) take no room. */
void text_put_cut(FILE *to, const char *text, size_t n, unsigned width);

#endif
