/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Copies memory: large pieces past the processor's cache, small ones through it. A small piece is
 * likely to be read again soon, and a large one would only push out what is needed.
 */

#include <string.h>

#include "client/internal.h"
#include "kernels/ops.h"

#define LARGE_BYTES (64u << 10) /* a smaller copy is likely to be read from the cache soon */

/* Picks once only: querying the processor takes microseconds under a hypervisor. */
const struct kvd_ops *client_ops(void) {
        static _Atomic(const struct kvd_ops *) picked;
        const struct kvd_ops *now = atomic_load_explicit(&picked, memory_order_relaxed);

        if (unlikely(!now)) {
                now = kvd_ops_pick(NULL);
                atomic_store_explicit(&picked, now, memory_order_relaxed);
        }
        return now;
}

void kvd_copy(void *to, const void *from, size_t bytes) {
        if (bytes < LARGE_BYTES)
                memcpy(to, from, bytes);
        else
                client_ops()->copy_nt(to, from, bytes);
}
