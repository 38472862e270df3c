/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_UNITS_H
#define KVCTL_UNITS_H

/*
 * Numbers as people read them. JSON has the plain number, in the unit that the field's name says.
 */

#include <stddef.h>
#include <stdint.h>

enum unit {
        UNIT_NONE,  /* text, or a number that is a name: 4711 */
        UNIT_COUNT, /* exact: 1234567 */
        UNIT_SHORT, /* for narrow columns: 1.2 M */
        UNIT_BYTES, /* 1.5 GiB */
        UNIT_MS,    /* a duration given in milliseconds: 12 ms, 3.4 s, 5 min 3 s, 2 h 5 min */
        UNIT_US,    /* the same, given in microseconds */
        UNIT_SHARE, /* 0 to 1, shown as 87.5 % */
};

#define UNIT_TEXT_MAX 32

/*
 * Writes value, given in the unit's base, as a NUL-terminated text of at most UNIT_TEXT_MAX bytes.
 */
void unit_format(enum unit unit, double value, char to[UNIT_TEXT_MAX]);

/* Exact for every uint64_t in UNIT_NONE and UNIT_COUNT. */
void unit_format_u64(enum unit unit, uint64_t value, char to[UNIT_TEXT_MAX]);

#endif
