/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prints untrusted text on a terminal. Control characters become question marks, and width is
 * counted in characters, not in bytes.
 */

#include "tools/kvctl/text.h"

#include <stdint.h>
#include <string.h>

#include "ipc/base/text.h"
#include "ipc/base/util.h"

void text_put(FILE *to, const char *text, size_t n) {
        for (size_t i = 0; i < n;) {
                size_t length = kvd_utf8(text + i, n - i);

                if (length && !kvd_is_control(text + i, length))
                        fwrite(text + i, 1, length, to);
                else
                        fputc('?', to);
                i += MAX(length, (size_t)1);
        }
}

void text_put_cut(FILE *to, const char *text, size_t n, unsigned width) {
        unsigned used = 0, one;

        for (size_t i = 0, bytes; i < n; i += bytes) {
                bytes = kvd_text_step(text + i, n - i, &one);
                used = text[i] == '\n' ? 0 : used + one;
                if (!one || used <= width)
                        fwrite(text + i, 1, bytes, to);
        }
}
