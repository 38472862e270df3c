/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_TOKENIZER_H
#define KVLM_TOKENIZER_H

/*
 * vocab.txt: line number (from 0) is the token id, the line is the token's bytes with the escapes
 * \n \t \\ \xNN. Ids 0 to 3 are control tokens, which no text matches; 4 to 259 the single bytes
 * <0x00> to <0xFF>; pieces follow. A text becomes, from left to right, the longest piece that
 * matches, or else one byte token.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TOKEN_PAD, TOKEN_BOS, TOKEN_EOS, TOKEN_UNK, TOKEN_BYTE, TOKEN_PIECE = TOKEN_BYTE + 256 };

struct tokenizer;

int tokenizer_new(const char *directory, struct tokenizer **ret);
struct tokenizer *tokenizer_free(struct tokenizer *);
uint32_t tokenizer_size(const struct tokenizer *); /* number of ids */
/* the bytes of vocab.txt */
void tokenizer_file(const struct tokenizer *, const uint8_t **data, size_t *size);

/* The text's tokens, preceded by <bos> if prompt is true. *ids is to be freed by the caller. */
int tokenizer_encode(const struct tokenizer *, const char *text, size_t size, bool prompt,
                     uint32_t **ids, uint32_t *n);

/* The bytes of a token; control tokens and ids beyond the vocabulary have none. */
const char *tokenizer_decode(const struct tokenizer *, uint32_t id, size_t *size);

#endif
