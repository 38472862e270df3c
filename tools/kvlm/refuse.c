/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Messages may quote names from files. When a message is printed, control characters are replaced,
 * so that it stays on one line and cannot control a terminal.
 */

#include "tools/kvlm/refuse.h"

struct kvd_why kvlm_why = {"unknown error"};

const char *refusal(void) {
        for (char *c = kvlm_why.line; *c; c++)
                if ((unsigned char)*c < ' ' || *c == 0x7f)
                        *c = '?';
        return kvlm_why.line;
}
