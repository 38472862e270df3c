/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_JSON_H
#define KVLM_JSON_H

/*
 * A small JSON reader. A document is an array of nodes in the order of the text; a node's children are between it
 * and its next, an object's children are key, value, key, value. Nodes point into the text, which must stay. Node 0
 * is the root; as no member can be the root, 0 also says "not there".
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum json_type { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json_node {
        enum json_type type;
        uint32_t next; /* the node behind this one and everything in it */
        size_t at, size; /* its text; of a string without the quotes */
};

struct json {
        const char *text;
        struct json_node *nodes;
        uint32_t n_nodes, n_room;
};

int json_parse(const char *text, size_t size, struct json *ret); /* -EINVAL: not JSON, or too deep */
void json_release(struct json *);

uint32_t json_find(const struct json *, uint32_t object, const char *key);
bool json_is(const struct json *, uint32_t node, const char *string); /* is it this string? */
int json_u64(const struct json *, uint32_t node, uint64_t *ret); /* a whole number without sign or exponent */
int json_double(const struct json *, uint32_t node, double *ret);
int json_string(const struct json *, uint32_t node, char **ret, size_t *ret_size); /* unescaped, to be freed */

void json_write_string(FILE *, const char *bytes, size_t size); /* quoted; what is not UTF-8 becomes U+FFFD */

#endif
