/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_LOG_LINES_H
#define KVD_TESTS_LIB_LOG_LINES_H

/* What daemons write to the log, as a person reads it. */

#include <stdint.h>

/* From here on standard error is a file, of this process and of what it starts; until log_let_go. */
void log_catch(void);
void log_let_go(void);

const char *log_lines(void); /* so far; until the next call */
uint32_t log_count(const char *what); /* how often that is in it */

#endif
