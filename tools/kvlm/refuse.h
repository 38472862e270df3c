/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_REFUSE_H
#define KVLM_REFUSE_H

/*
 * An error is a negative errno that travels up, and one line in words that waits here until main
 * prints it.
 */

#include "ipc/base/why.h"

extern struct kvd_why kvlm_why;

#define refuse(...) kvd_refuse(&kvlm_why, __VA_ARGS__) /* keeps the line and returns the error */

const char *refusal(void); /* the line, to be printed: without control characters */

#endif
