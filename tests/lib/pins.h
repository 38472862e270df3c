/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_PINS_H
#define KVD_TESTS_PINS_H

#include <string.h>

#include "ipc/base/layout.h"

/* Lets a test write any words of a pin page, as a client could that has used all groups of blocks. */
static inline void pins_everywhere(struct kvd_pinpage *page) {
        uint64_t from = kvd_groups_off(page->capacity), to = kvd_posts_off(page->capacity);

        memset((uint8_t *)page + from, 0xff, to - from);
}

#endif
