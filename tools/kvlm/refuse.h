/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_REFUSE_H
#define KVLM_REFUSE_H

/*
 * An error is a negative errno that is returned, plus a one-line message that is kept here until
 * main prints it.
 */

#include "ipc/base/why.h"

extern struct kvd_why kvlm_why;

#define refuse(...) kvd_refuse(&kvlm_why, __VA_ARGS__) /* stores the line, returns the error */

const char *refusal(void); /* the message for printing, without control characters */

#endif
