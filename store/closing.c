/* SPDX-License-Identifier: Apache-2.0 */

/*
 * With its last descriptor the kernel frees all pages of a file, which for an index of a million
 * blocks takes it ten milliseconds. Such a descriptor goes to whoever offered to close it.
 */

#include "store/core.h"

void store_on_close(struct store *store, void (*called)(void *data, int fd), void *data) {
        store->on_close = (struct on_close){called, data};
}

#define LARGE (UINT64_C(1) << 20) /* what is smaller is closed in no time */

void store_close_file(struct store *store, struct shared_file *file) {
        bool large = file->bytes >= LARGE && store->on_close.called;
        int last = file->fd;

        if (large)
                file->fd = -1;
        shared_file_close(file);
        if (large)
                store->on_close.called(store->on_close.data, last);
}
