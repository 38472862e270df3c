/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decodes keys. A terminal writes all bytes of a key at once, so a sequence is never cut. Unknown
 * sequences are skipped whole.
 */

#include "tools/kvctl/keys.h"

#define ESCAPE '\033'

static int of_letter(char letter) {
        switch (letter) {
        case 'A': return KEY_UP;
        case 'B': return KEY_DOWN;
        case 'C': return KEY_RIGHT;
        case 'D': return KEY_LEFT;
        default: return KEY_NONE;
        }
}

/* ESC [ parameters letter, or ESC O letter. */
static int read_sequence(const char *bytes, size_t n, size_t *used) {
        size_t i = 2;

        while (bytes[1] == '[' && i < n && bytes[i] >= 0x20 && bytes[i] < 0x40)
                i++;
        *used = i < n ? i + 1 : n;
        if (i == n)
                return KEY_NONE;
        if (bytes[i] == '~')
                return bytes[2] == '5' ? KEY_PAGE_UP : bytes[2] == '6' ? KEY_PAGE_DOWN : KEY_NONE;
        return of_letter(bytes[i]);
}

int key_read(const char *bytes, size_t n, size_t *used) {
        *used = n ? 1 : 0;
        if (n > 2 && bytes[0] == ESCAPE && (bytes[1] == '[' || bytes[1] == 'O'))
                return read_sequence(bytes, n, used);
        return n && bytes[0] != ESCAPE ? (unsigned char)bytes[0] : KEY_NONE;
}
