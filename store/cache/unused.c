/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How much of a space others could have is known at any time: the segments in which no block is kept
 * (being filled, private, pending) or held (pinned, or before a pinned block). Blocks say when they
 * become kept; what pins hold is found by rounds (available.c).
 */

#include "store/account.h"
#include "store/cache/inside.h"

/* What others could have of it: of a deleted space everything, of an incomplete one nothing yet. */
void space_count_unused(struct space *space) {
        uint32_t occupied = !space_lives(space)         ? 0 :
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
