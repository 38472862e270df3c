/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_NOTE_H
#define KVLM_NOTE_H

/* An error is a negative errno that travels up, and one line in words that waits here until main prints it. */

#include "ipc/base/util.h"

int note(int error, const char *format, ...) _printf_(2, 3); /* notes the line and returns the error */
const char *note_line(void);

#endif
