/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_PROMPTS_H
#define KVLM_PROMPTS_H

/* The source of requests: JSON lines as they arrive, a text, or token ids. */

#include "tools/kvlm/options.h"
#include "tools/kvlm/tokenizer.h"

struct prompts;

int prompts_open(const struct options *, const struct tokenizer *, uint32_t vocab,
                 struct prompts **ret);
struct prompts *prompts_close(struct prompts *);

/*
 * 1: the next prompt's ids, to be freed by the caller; 0: no more prompts; -EINVAL: this one is not
 * a prompt, but the next may be; -EINTR.
 */
int prompts_next(struct prompts *, uint32_t **ids, uint32_t *n);

/*
 * For a bidirectional model, whose prefix is shared as a whole or not at all: from now on the
 * document (a line's "document", if it has one) is tokenized separately, and prompts_prefix()
 * returns its number of tokens in the last prompt.
 */
void prompts_split(struct prompts *);
uint32_t prompts_prefix(const struct prompts *);
/* overwrites *length and *steps if the last line gives them */
void prompts_region(const struct prompts *, uint32_t *length, uint32_t *steps);

#endif
