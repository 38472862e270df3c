/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Keeps count of the memory of a space that others could take: segments in which no block is kept
 * (being filled, private, pending) or held (pinned, or before a pinned block). Kept blocks are
 * counted as they change; rounds through the pins find the held ones (available.c).
 */

#include "store/account.h"
#include "store/cache/inside.h"

/* Others could take everything of a deleted space, and nothing of an incomplete one. */
void space_count_unused(struct space *space) {
        uint32_t occupied = !space_lives(space)        ? 0 :
                            space_is_incomplete(space) ? space->memory.n_with_memory :
                                                         space->memory.n_occupied;

        account_unused(space, (space->memory.n_with_memory - occupied) * space->ix->segment_bytes);
}

void segment_keeps(struct space *space, struct segment *segment, int more, uint32_t n_held) {
        bool kept = segment->n_kept > 0, occupied = kept || segment->n_held;

        segment->n_kept += (uint32_t)more;
        segment->n_held = n_held;
        space->memory.n_kept += (segment->n_kept > 0) - kept;
        if (occupied == (segment->n_kept || segment->n_held))
                return;
        space->memory.n_occupied += occupied ? UINT32_MAX : 1;
        space_count_unused(space);
}
