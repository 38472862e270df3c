/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Closing the last descriptor of a file makes the kernel free all its pages, which takes ten
 * milliseconds for an index of a million blocks. Large files go to the function set by
 * store_on_close.
 */

#include "store/core.h"

void store_on_close(struct store *store, void (*called)(void *data, int fd), void *data) {
        store->on_close = (struct on_close){called, data};
}

#define LARGE (UINT64_C(1) << 20) /* smaller files are closed directly */

void store_close_file(struct store *store, struct shared_file *file) {
        bool large = file->bytes >= LARGE && store->on_close.called;
        int last = file->fd;

        if (large)
                file->fd = -1;
        shared_file_close(file);
        if (large)
                store->on_close.called(store->on_close.data, last);
}
