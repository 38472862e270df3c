/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_LOG_H
#define KVD_DAEMON_BASE_LOG_H

/*
 * One line per event to stderr. A reader that is too slow loses lines; it never holds up the
 * daemon.
 */

#include <stdbool.h>
#include <stdint.h>
#include <syslog.h>

#include "ipc/base/util.h"

/*
 * Lines above this level (LOG_ERR, LOG_WARNING, LOG_INFO, LOG_DEBUG) are left out. Default:
 * LOG_INFO.
 */
void log_set_level(int level);

_printf_(2, 3) void log_line(int level, const char *format, ...);

#define log_error(...) log_line(LOG_ERR, __VA_ARGS__)
#define log_warning(...) log_line(LOG_WARNING, __VA_ARGS__)
#define log_info(...) log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)

/* For events that a hostile peer can cause at will: ten lines in ten seconds per call site. */
struct log_limit {
        uint64_t since_ns;
        uint32_t lines;
};
bool log_allow(struct log_limit *limit);

/* For a state that lasts: one line a minute from each call site. */
bool log_allow_rarely(struct log_limit *limit);

#define log_limited(level, ...) \
        do { \
                static struct log_limit limit_; \
                if (log_allow(&limit_)) \
                        log_line(level, __VA_ARGS__); \
        } while (0)

#define log_rarely(level, ...) \
        do { \
                static struct log_limit limit_; \
                if (log_allow_rarely(&limit_)) \
                        log_line(level, __VA_ARGS__); \
        } while (0)

#endif
