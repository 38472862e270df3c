/* SPDX-License-Identifier: Apache-2.0 */

/* Helpers around jansson. Everything else about JSON is in the library. */

#include "tools/json.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/text.h"
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

json_t *json_bytes(const char *bytes, size_t size) {
        static const char replacement[] = "\xef\xbf\xbd";
        _cleanup_(freep) char *text = malloc(3 * size + 1);
        char *to = text;

        if (!text)
                return NULL;
        for (size_t i = 0, length; i < size; i += MAX(length, 1)) {
                length = kvd_utf8(bytes + i, size - i);
                to = mempcpy(to, length ? bytes + i : replacement,
                             length ? length : sizeof replacement - 1);
        }
        return json_stringn_nocheck(text, (size_t)(to - text));
}
