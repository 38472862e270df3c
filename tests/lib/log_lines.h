/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_LOG_LINES_H
#define KVD_TESTS_LIB_LOG_LINES_H

/* Reads what daemons write to the log, as a person would. */

#include <stdint.h>

/* Redirects standard error of this process, and of those it starts, to a file until log_let_go. */
void log_catch(void);
void log_let_go(void);

const char *log_lines(void);          /* all so far; valid until the next call */
uint32_t log_count(const char *what); /* how often `what` occurs */

#endif
