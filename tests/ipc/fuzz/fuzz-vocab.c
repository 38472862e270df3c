/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvlm's vocabulary: any file gives a tokenizer or is refused. Text that the tokenizer encodes
 * decodes to the same text.
 */

#include <string.h>

#include "tests/ipc/fuzz/folder.h"
#include "tools/kvlm/tokenizer.h"

static void round_trip(const struct tokenizer *t, const char *text, size_t size) {
        uint32_t *ids = NULL, n = 0;
        size_t at = 0, part;

        MUST(tokenizer_encode(t, text, size, false, &ids, &n) == 0);
        for (uint32_t i = 0; i < n; i++) {
                const char *bytes = tokenizer_decode(t, ids[i], &part);

                MUST(ids[i] < tokenizer_size(t) && part > 0 && part <= size - at &&
                     memcmp(bytes, text + at, part) == 0);
                at += part;
        }
        MUST(at == size);
        free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
        struct tokenizer *t;

        if (tokenizer_new(folder_with("vocab.txt", data, size), &t) < 0)
                return 0;
        round_trip(t, (const char *)data, size < 512 ? size : 512);
        tokenizer_free(t);
        return 0;
}
