/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KERNELS_BUFFERS_H
#define KVD_TESTS_KERNELS_BUFFERS_H

/*
 * Memory for kernels under test. A buffer ends where an inaccessible page begins, so that reading
 * or writing one element past the end always faults; the page before it is inaccessible, too.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Called with whole pages before they become buffers, to register them with a GPU. */
extern void (*buffers_prepare)(void *at, size_t bytes);
bool buffer_is_taken(size_t i); /* i: in the order of buffers_prepare calls */

/* zeroed, ends at the guard page; any alignment that size implies */
void *buffer(size_t bytes);
void buffers_free(void); /* frees all buffers */

float *random_floats(size_t n); /* a buffer of numbers in -1 to 1 */
float *copy_floats(const float *from, size_t n);
uint32_t random_u32(void);
void random_seed(uint32_t seed);

void assert_same_bits(const float *a, const float *b, size_t n, const char *what);

#endif
