/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Walks what must always be true of a space between two requests. A call looks at one piece of the
 * blocks, so that the loop goes on; sums over the whole space are taken in the call that starts a
 * walk.
 */

#include "store/check/check.h"

#define PIECE 4096u

void space_check(struct space *space, uint32_t *cursor, struct check_report *report) {
        struct walk w = {.space = space, .report = report};
        uint32_t end = space_ids(space), first = *cursor;

        *report = (struct check_report){0};
        if (first == 0) {
                check_cache(&w);
                check_sequences(&w);
                check_chunks(&w);
                check_pending(&w);
        }
        for (; *cursor < end && *cursor < first + PIECE; (*cursor)++, report->checked++)
                check_block(&w, *cursor);
        if (*cursor >= end)
                *cursor = 0;
}
