/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_KEYS_H
#define KVCTL_KEYS_H

/* Keys of a terminal, which sends some of them as several bytes. */

#include <stddef.h>

enum key {
        KEY_NONE = 0, /* other keys are their character */
        KEY_LEFT = 256,
        KEY_RIGHT,
        KEY_UP,
        KEY_DOWN,
        KEY_PAGE_UP,
        KEY_PAGE_DOWN,
};

/* The first key of n bytes. *used: number of bytes that it has. */
int key_read(const char *bytes, size_t n, size_t *used);

#endif
