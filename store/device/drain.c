/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tracks which clients have which segments of a GPU mapped. The daemon cannot unmap memory in other
 * processes. So a segment without blocks keeps its chunk until each client that got its descriptor
 * has reported it unmapped, or is gone according to the kernel. The index's drain_epoch moves,
 * clients ask for the segments to unmap (message drain), unmap them, and report that.
 *
 *      mapped   the client got the descriptor, and has not reported the segment unmapped since
 *      told     the client was asked to unmap the segment, and has not replied. Until then no block appears in it, so
 *               that the client can unmap it without checking for new blocks. A segment that no client was asked about
 *               may get blocks again at once, since its chunk is the same.
 */

#include <errno.h>
#include <stdlib.h>

#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "store/device/chunk.h"
#include "store/hooks.h"

static uint32_t n_words(const struct space *space) {
        return DIV_UP(space_index(space)->max_segments, 64);
}

static bool bit(const uint64_t *bits, uint32_t i) {
        return bits[i / 64] >> i % 64 & 1;
}

static void set(uint64_t *bits, uint32_t i, bool to) {
        bits[i / 64] = (bits[i / 64] & ~(UINT64_C(1) << i % 64)) | (uint64_t)to << i % 64;
}

static int enter(struct attachment *a) {
        if (space_index(a->space)->backend != KVD_BACKEND_VMM)
                return 0;
        a->mapped = sys->calloc(2 * n_words(a->space), sizeof *a->mapped);
        a->told = a->mapped ? a->mapped + n_words(a->space) : NULL;
        return a->mapped ? 0 : -ENOMEM;
}

static void put_away(struct attachment *a, uint32_t segment) {
        set(a->mapped, segment, false);
        set(a->told, segment, false);
        device_undrain(a->space, space_segment(a->space, segment));
}

static void leave(struct attachment *a) {
        for (uint32_t i = 0; a->mapped && i < space_index(a->space)->max_segments; i++)
                if (bit(a->mapped, i))
                        put_away(a, i);
}

void drain_handed_out(struct attachment *a, uint32_t segment) {
        if (a->mapped)
                set(a->mapped, segment, true);
}

bool drain_mapped(const struct space *space, uint32_t segment) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));)
                if (bit(a->mapped, segment))
                        return true;
        return false;
}

bool drain_told(const struct space *space, uint32_t segment) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));)
                if (bit(a->told, segment))
                        return true;
        return false;
}

uint32_t attachment_drain(struct attachment *a, const uint32_t *unmapped, uint32_t n,
                          uint32_t *wanted, uint32_t n_wanted) {
        uint32_t n_segments = space_index(a->space)->n_segments, found = 0;

        if (!a->mapped)
                return 0;
        for (uint32_t i = 0; i < n; i++)
                if (unmapped[i] < n_segments && bit(a->mapped, unmapped[i]))
                        put_away(a, unmapped[i]);
        for (uint32_t i = 0; i < n_segments && found < n_wanted; i++) {
                if (!bit(a->mapped, i) || !device_draining(space_segment(a->space, i)))
                        continue;
                set(a->told, i, true);
                wanted[found++] = i;
        }
        return found;
}

static void bury(struct attachment *a) {
        free(a->mapped);
}

const struct hooks drain_hooks = {.attachment_begins = enter,
                                  .attachment_ends = leave,
                                  .attachment_buried = bury};
