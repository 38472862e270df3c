/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A line is written to stderr if that does not block, and is lost otherwise: a reader that is too
 * slow must not stop the daemon. Lines that a client can cause are limited in number.
 */

#include "daemon/base/log.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "ipc/base/sys.h"

#define LIMIT_LINES 10u
#define LIMIT_NS UINT64_C(10000000000)
#define RARELY_NS UINT64_C(60000000000)

static int max_level = LOG_INFO;

void log_set_level(int level) {
        max_level = level;
}

/* The journal parses a level at the start of a line; people expect a name there. */
static const char *line_prefix(int level, char prefix[8]) {
        if (!getenv("JOURNAL_STREAM"))
                return "kvd: ";
        snprintf(prefix, 8, "<%d>", level);
        return prefix;
}

/* A pipe or socket that poll calls writable takes a line this short without blocking. */
static void write_line(const char *line, size_t n) {
        struct pollfd stderr_poll = {STDERR_FILENO, POLLOUT, 0};

        if (sys->poll(&stderr_poll, 1, 0) != 1 || !(stderr_poll.revents & POLLOUT) ||
            write(STDERR_FILENO, line, n) < 0)
                degraded_note(log_lost);
}

void log_line(int level, const char *format, ...) {
        char line[512], prefix[8];
        int n, m;
        va_list args;

        if (level > max_level)
                return;
        n = snprintf(line, sizeof line, "%s", line_prefix(level, prefix));
        va_start(args, format);
        m = vsnprintf(line + n, sizeof line - (size_t)n, format, args);
        va_end(args);
        if (m < 0)
                return;
        n = MIN(n + m, (int)sizeof line - 1);
        line[n] = '\n';
        write_line(line, (size_t)n + 1);
}

bool log_allow(struct log_limit *limit) {
        uint64_t now = sys_now_ns();

        if (now - limit->since_ns > LIMIT_NS) {
                if (limit->lines > LIMIT_LINES)
                        log_warning("%u lines like the next one were left out",
                                    limit->lines - LIMIT_LINES);
                *limit = (struct log_limit){.since_ns = now};
        }
        return limit->lines++ < LIMIT_LINES;
}

bool log_allow_rarely(struct log_limit *limit) {
        uint64_t now = sys_now_ns();

        if (limit->since_ns && now - limit->since_ns < RARELY_NS)
                return false;
        limit->since_ns = now;
        return true;
}
