/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/note.h"

#include <stdarg.h>
#include <stdio.h>

static char line[512] = "unknown error";

int note(int error, const char *format, ...) {
        va_list args;

        va_start(args, format);
        vsnprintf(line, sizeof line, format, args);
        va_end(args);
        for (char *c = line; *c; c++) /* names come from files: one line stays one line */
                if ((unsigned char)*c < ' ' || *c == 0x7f)
                        *c = '?';
        return error;
}

const char *note_line(void) {
        return line;
}
