/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Converts between numbers and words of the enums. The numbers of each enum begin at 1 without
 * gaps, so its words are an array indexed by number, whose element 0 is unused.
 */

#include "ipc/base/enums.h"

#include <string.h>

#include "ipc/base/util.h"

#define WORD_AT(name, number, word, constant) [number] = #word,
#define WORDS(name) static const char *const name##_words[] = {KVD_WORDS_##name(WORD_AT, WORD_AT)};
KVD_ENUMS(WORDS)

static const struct {
        const char *const *words;
        uint32_t n;
} enums[] = {
#define ROW(name) [KVD_ENUM_##name] = {name##_words, ARRAY_SIZE(name##_words)},
        KVD_ENUMS(ROW)};

const char *kvd_enum_word(enum kvd_enum which, uint32_t number) {
        return number > 0 && number < enums[which].n ? enums[which].words[number] : "?";
}

uint32_t kvd_enum_number(enum kvd_enum which, const char *word) {
        for (uint32_t i = 1; i < enums[which].n; i++)
                if (strcmp(enums[which].words[i], word) == 0)
                        return i;
        return 0;
}
