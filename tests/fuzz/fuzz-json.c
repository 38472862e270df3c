/* SPDX-License-Identifier: Apache-2.0 */

/* kvlm's JSON reader: any bytes give a tree whose nodes lie inside the text, or are refused. */

#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "tools/kvlm/json.h"

static void walk(const struct json *json, size_t size) {
        for (uint32_t i = 0; i < json->n_nodes; i++) {
                const struct json_node *node = &json->nodes[i];
                size_t string_size;
                char *string;
                double d;
                uint64_t u;

                MUST(node->at <= size && node->size <= size - node->at && node->next > i && node->next <= json->n_nodes);
                if (node->type == JSON_STRING && json_string(json, i, &string, &string_size) == 0)
                        free(string);
                if (node->type == JSON_NUMBER) {
                        json_u64(json, i, &u);
                        json_double(json, i, &d);
                }
                if (node->type == JSON_OBJECT)
                        json_find(json, i, "prompt");
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        char *text = malloc(size + 1); /* of its own, so that a read behind the end is seen */
        struct json json = {0};

        MUST(text != NULL);
        memcpy(text, data, size);
        if (json_parse(text, size, &json) == 0) {
                walk(&json, size);
                json_release(&json);
        }
        free(text);
        return 0;
}
