/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_JSON_H
#define TOOLS_JSON_H

/* Helpers around jansson. They accept NULL for a missing value. */

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* NULL if it is not JSON, or a name occurs twice in one object */
json_t *json_read(const char *text, size_t size);
/* a string; every byte that is not UTF-8 becomes U+FFFD */
json_t *json_bytes(const char *bytes, size_t size);

bool json_says(const json_t *value, const char *string); /* whether it is this string */
int json_whole(const json_t *value, uint64_t *ret); /* -EINVAL if it is not a whole number >= 0 */

#endif
