/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvctl/words.h"

#include <assert.h>
#include <string.h>

#include "client/kvd.h"

const char *const words_dtype[] = {"f32", "f16", "bf16", "i8", NULL};
const char *const words_order[] = {"hnd", "nhd", NULL};
const char *const words_rope[] = {"post", "pre", "none", NULL};
const char *const words_kind[] = {"causal", "bidirectional", NULL};
const char *const words_keys[] = {"serve", "paper", NULL};
const char *const words_policy[] = {"lru", "fifo", "priority", NULL};

static_assert(KVD_F32 == 1 && KVD_F16 == 2 && KVD_BF16 == 3 && KVD_I8 == 4 && KVD_HND == 1 && KVD_NHD == 2 &&
              KVD_ROPE_POST == 1 && KVD_ROPE_PRE == 2 && KVD_ROPE_NONE == 3 && KVD_CAUSAL == 1 &&
              KVD_BIDIRECTIONAL == 2 && KVD_KEYS_SERVE == 1 && KVD_KEYS_PAPER == 2 && KVD_LRU == 1 && KVD_FIFO == 2 &&
              KVD_PRIORITY == 3,
              "the lists above follow client/kvd.h");

const char *word_of(const char *const *words, uint32_t number) {
        for (uint32_t i = 0; words[i]; i++)
                if (i + 1 == number)
                        return words[i];
        return "?";
}

uint32_t word_number(const char *const *words, const char *word) {
        for (uint32_t i = 0; words[i]; i++)
                if (strcmp(words[i], word) == 0)
                        return i + 1;
        return 0;
}
