/* SPDX-License-Identifier: Apache-2.0 */

/* Writes JSON directly, without building a tree. Names and texts are made valid UTF-8. */

#include "tools/kvctl/json.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "ipc/base/text.h"
#include "ipc/base/util.h"

static size_t put_character(FILE *to, const char *text, size_t n) {
        static const char short_from[] = "\"\\\b\f\n\r\t", short_to[] = "\"\\bfnrt";
        size_t length = kvd_utf8(text, n);
        const char *found = *text ? strchr(short_from, *text) : NULL;

        if (!length)
                fputs("\xef\xbf\xbd", to); /* U+FFFD */
        else if (found)
                fprintf(to, "\\%c", short_to[found - short_from]);
        else if ((uint8_t)*text < 0x20 || *text == 0x7f)
                fprintf(to, "\\u%04x", (unsigned)*text);
        else
                fwrite(text, 1, length, to);
        return MAX(length, (size_t)1);
}

static void put_string(FILE *to, const char *text, size_t n) {
        fputc('"', to);
        for (size_t i = 0; i < n;)
                i += put_character(to, text + i, n - i);
        fputc('"', to);
}

/* Comma, line break and name of the next value. */
static void begin(struct json *json, const char *name) {
        if (json->depth) {
                fputs(json->filled[json->depth - 1] ? ",\n" : "\n", json->to);
                fprintf(json->to, "%*s", (int)(2 * json->depth), "");
                json->filled[json->depth - 1] = true;
        }
        if (name) {
                put_string(json->to, name, strlen(name));
                fputs(": ", json->to);
        }
}

void json_open(struct json *json, const char *name, char bracket) {
        assert(json->depth < JSON_DEPTH_MAX);
        begin(json, name);
        fputc(bracket, json->to);
        json->filled[json->depth++] = false;
}

void json_close(struct json *json, char bracket) {
        assert(json->depth > 0);
        json->depth--;
        if (json->filled[json->depth])
                fprintf(json->to, "\n%*s", (int)(2 * json->depth), "");
        fputc(bracket, json->to);
        if (!json->depth)
                fputc('\n', json->to);
}

void json_text(struct json *json, const char *name, const char *text, size_t n) {
        begin(json, name);
        put_string(json->to, text, n);
}

void json_ids(struct json *json, const char *name, const uint32_t *ids, size_t n) {
        begin(json, name);
        fputc('[', json->to);
        for (size_t i = 0; i < n; i++)
                fprintf(json->to, "%s%" PRIu32, i ? ", " : "", ids[i]);
        fputc(']', json->to);
}

void json_u64(struct json *json, const char *name, uint64_t value) {
        begin(json, name);
        fprintf(json->to, "%" PRIu64, value);
}

void json_f64(struct json *json, const char *name, double value) {
        begin(json, name);
        if (isfinite(value))
                fprintf(json->to, "%.9g", value);
        else
                fputs("null", json->to);
}

void json_bool(struct json *json, const char *name, bool value) {
        begin(json, name);
        fputs(value ? "true" : "false", json->to);
}

void json_nil(struct json *json, const char *name) {
        begin(json, name);
        fputs("null", json->to);
}
