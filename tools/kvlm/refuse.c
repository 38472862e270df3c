/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What is said about a failure quotes names out of files. Where it is printed, one line stays one
 * line, and a terminal finds nothing to obey in it.
 */

#include "tools/kvlm/refuse.h"

struct kvd_why kvlm_why = {"unknown error"};

const char *refusal(void) {
        for (char *c = kvlm_why.line; *c; c++)
                if ((unsigned char)*c < ' ' || *c == 0x7f)
                        *c = '?';
        return kvlm_why.line;
}
