/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/json.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"

json_t *json_read(const char *text, size_t size) {
        return json_loadb(text, size, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL);
}

bool json_says(const json_t *value, const char *string) {
        return json_is_string(value) && strcmp(json_string_value(value), string) == 0;
}

int json_whole(const json_t *value, uint64_t *ret) {
        if (!json_is_integer(value) || json_integer_value(value) < 0)
                return -EINVAL;
        *ret = (uint64_t)json_integer_value(value);
        return 0;
}

/* Length of the valid UTF-8 sequence at the start of bytes, or 0. */
static size_t utf8_length(const unsigned char *bytes, size_t size) {
        size_t length = bytes[0] < 0x80 ? 1 : bytes[0] < 0xc2 ? 0 : bytes[0] < 0xe0 ? 2 : bytes[0] < 0xf0 ? 3 : 4;

        if (length == 0 || length > size || bytes[0] > 0xf4)
                return 0;
        for (size_t i = 1; i < length; i++)
                if ((bytes[i] & 0xc0) != 0x80)
                        return 0;
        if ((bytes[0] == 0xe0 && bytes[1] < 0xa0) || (bytes[0] == 0xed && bytes[1] > 0x9f) ||
            (bytes[0] == 0xf0 && bytes[1] < 0x90) || (bytes[0] == 0xf4 && bytes[1] > 0x8f))
                return 0;
        return length;
}

json_t *json_bytes(const char *bytes, size_t size) {
        static const char replacement[] = "\xef\xbf\xbd";
        _cleanup_(freep) char *text = malloc(3 * size + 1);
        char *to = text;

        if (!text)
                return NULL;
        for (size_t i = 0, length; i < size; i += MAX(length, 1)) {
                length = utf8_length((const unsigned char *)bytes + i, size - i);
                to = mempcpy(to, length ? bytes + i : replacement, length ? length : sizeof replacement - 1);
        }
        return json_stringn_nocheck(text, (size_t)(to - text));
}
