/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_JSON_H
#define KVLM_JSON_H

/* JSON is jansson's. This is what kvlm asks of it besides. A value that is not there is NULL. */

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* NULL: not JSON, or a name stands twice in one object */
json_t *json_read(const char *text, size_t size);
/* a string; every byte that is not UTF-8 becomes U+FFFD */
json_t *json_bytes(const char *bytes, size_t size);

bool json_says(const json_t *value, const char *string); /* is it this string? */
int json_whole(const json_t *value, uint64_t *ret);      /* -EINVAL: not a whole number from 0 on */

#endif
