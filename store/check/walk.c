/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Checks what must be true of a space between any two requests, a piece per call, so that the loop
 * can go on. Invariants of a single block or entry are checked at once. Sums over all of them are
 * gathered on the way (struct audit), and compared at the end if nothing has changed meanwhile.
 */

#include "store/check/check.h"

static bool end(struct walk *w, uint64_t *at) {
        if (w->audit->whole) {
                check_cache_sums(w);
                check_sequence_sums(w);
                check_pending_sums(w);
        }
        if (w->audit->whole)
                check_charges(w);
        w->report->partial = !w->audit->whole;
        return true;
}

static bool (*const phases[])(struct walk *, uint64_t *) = {
        check_totals,    check_blocks, check_table,   check_run_table,
        check_sequences, check_places, check_records, end,
};

/* A cursor has the phase above these bits. */
#define AT_BITS 48u

/*
 * There is one audit: a walk that begins takes it over from an earlier one. If that one continues
 * nevertheless, the sums of neither are compared.
 */
static void resume(struct audit *audit, uint64_t cursor) {
        if (cursor == 0)
                *audit = (struct audit){.whole = true,
                                        .changes = audit->changes,
                                        .began = audit->changes};
        else if (audit->next != cursor || audit->began != audit->changes)
                audit->whole = false;
}

void space_check(struct space *space, uint64_t *cursor, struct check_report *report) {
        struct audit *audit = &space->audit;
        struct walk w = {.space = space, .report = report, .audit = audit};
        uint64_t phase = *cursor >> AT_BITS, at = *cursor & ((UINT64_C(1) << AT_BITS) - 1);

        *report = (struct check_report){0};
        resume(audit, *cursor);
        while (phase < ARRAY_SIZE(phases) && check_may_go_on(&w))
                if (phases[phase](&w, &at)) {
                        phase++;
                        at = 0;
                }
        *cursor = phase < ARRAY_SIZE(phases) ? phase << AT_BITS | at : 0;
        audit->next = *cursor;
}
