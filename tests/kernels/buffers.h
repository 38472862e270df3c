/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_BUFFERS_H
#define KVD_TESTS_KERNELS_BUFFERS_H

/*
 * Memory for kernels under test. A buffer ends where an inaccessible page begins, so that one
 * element read or written past the end is a fault and not luck; the page before it is inaccessible
 * too.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Called with whole pages before they become buffers: for a GPU that must know them. */
extern void (*buffers_prepare)(void *at, size_t bytes);
bool buffer_is_taken(size_t i); /* the i-th that buffers_prepare was called for */

/* zeroed, ends at the guard page; any alignment that size implies */
void *buffer(size_t bytes);
void buffers_free(void);                 /* all of them */

float *random_floats(size_t n);          /* a buffer of numbers in -1 to 1 */
float *copy_floats(const float *from, size_t n);
uint32_t random_u32(void);
void random_seed(uint32_t seed);

void assert_same_bits(const float *a, const float *b, size_t n, const char *what);

#endif
