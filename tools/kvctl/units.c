/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Numbers with the unit that fits them. A number has about three digits: more are noise, and fewer
 * hide a change.
 */

#include "tools/kvctl/units.h"

#include <inttypes.h>
#include <stdio.h>

#include "ipc/base/util.h"

/* Three digits at most: 1.5, 12, 999. A value that would round up to four takes the next unit. */
static void scaled(double value, double step, const char *const *names, size_t n, char *to) {
        bool tenths;
        size_t i = 0;

        while (i + 1 < n && value >= 999.5) {
                value /= step;
                i++;
        }
        tenths = value < 9.95 && (i || value != (double)(uint64_t)value);
        snprintf(to, UNIT_TEXT_MAX, tenths ? "%.1f%s" : "%.0f%s", value, names[i]);
}

static void format_short(double value, char *to) {
        static const char *const names[] = {"", " k", " M", " G", " T"};

        scaled(value, 1000, names, ARRAY_SIZE(names), to);
}

static void format_bytes(double value, char *to) {
        static const char *const names[] = {" B", " KiB", " MiB", " GiB", " TiB", " PiB"};
        size_t i = 0;

        while (i + 1 < ARRAY_SIZE(names) && value >= (i ? 1023.5 : 1024)) {
                value /= 1024;
                i++;
        }
        snprintf(to, UNIT_TEXT_MAX, i && value < 99.95 ? "%.1f%s" : "%.0f%s", value, names[i]);
}

static void format_two(uint64_t seconds, uint64_t big, const char *big_name, uint64_t small,
                       const char *small_name, char *to) {
        snprintf(to, UNIT_TEXT_MAX, "%" PRIu64 " %s %" PRIu64 " %s", seconds / big, big_name,
                 seconds % big / small, small_name);
}

static void format_seconds(double seconds, char *to) {
        uint64_t whole = seconds < 1e15 ? (uint64_t)seconds : UINT64_C(1000000000000000);

        if (seconds < 59.95)
                snprintf(to, UNIT_TEXT_MAX, "%.1f s", seconds);
        else if (whole < 3600)
                format_two(MAX(whole, 60), 60, "min", 1, "s", to);
        else if (whole < 86400)
                format_two(whole, 3600, "h", 60, "min", to);
        else
                format_two(whole, 86400, "d", 3600, "h", to);
}

static void format_us(double us, char *to) {
        if (us < 1000)
                snprintf(to, UNIT_TEXT_MAX, "%.0f us", us);
        else if (us < 9950)
                snprintf(to, UNIT_TEXT_MAX, "%.1f ms", us / 1000);
        else if (us < 999500)
                snprintf(to, UNIT_TEXT_MAX, "%.0f ms", us / 1000);
        else
                format_seconds(us / 1e6, to);
}

static void format_ms(double ms, char *to) {
        if (ms == 0)
                snprintf(to, UNIT_TEXT_MAX, "0 ms");
        else
                format_us(ms * 1000, to);
}

void unit_format(enum unit unit, double value, char to[UNIT_TEXT_MAX]) {
        switch (unit) {
        case UNIT_NONE:
        case UNIT_COUNT: snprintf(to, UNIT_TEXT_MAX, "%.6g", value); break;
        case UNIT_SHORT: format_short(value, to); break;
        case UNIT_BYTES: format_bytes(value, to); break;
        case UNIT_MS: format_ms(value, to); break;
        case UNIT_US: format_us(value, to); break;
        case UNIT_SHARE: snprintf(to, UNIT_TEXT_MAX, "%.1f %%", value * 100); break;
        }
}

void unit_format_u64(enum unit unit, uint64_t value, char to[UNIT_TEXT_MAX]) {
        if (unit == UNIT_NONE || unit == UNIT_COUNT)
                snprintf(to, UNIT_TEXT_MAX, "%" PRIu64, value);
        else
                unit_format(unit, (double)value, to);
}
