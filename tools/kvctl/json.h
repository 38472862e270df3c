/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_JSON_H
#define KVCTL_JSON_H

/*
 * Writes JSON. A name is given inside an object and NULL inside a list. Text may be invalid UTF-8
 * (a client chooses its own name): every wrong byte becomes U+FFFD.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define JSON_DEPTH_MAX 16

struct json {
        FILE *to;
        unsigned depth;
        /* something was written at this depth, so a comma comes next */
        bool filled[JSON_DEPTH_MAX];
};

#define JSON_INIT(file) {.to = (file)}

void json_open(struct json *json, const char *name, char bracket); /* '{' or '[' */
void json_close(struct json *json, char bracket);                  /* '}' or ']' */
void json_text(struct json *json, const char *name, const char *text, size_t n);
/* a list in one line */
void json_ids(struct json *json, const char *name, const uint32_t *ids, size_t n);
void json_u64(struct json *json, const char *name, uint64_t value);
void json_f64(struct json *json, const char *name, double value); /* null if it is not finite */
void json_bool(struct json *json, const char *name, bool value);
void json_nil(struct json *json, const char *name);

#endif
