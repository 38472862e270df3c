/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KVLM_LOSSY_H
#define KVD_TESTS_KVLM_LOSSY_H

/* What the tests of methods that give something up have in common: one small model, one text, and runs over it. */

#include "tests/kvlm/folder.h"

enum { LOSSY_N = 300 };

extern const struct shape lossy_shape;
extern const struct random_model *lossy_model;
extern uint32_t lossy_tokens[LOSSY_N];

void lossy_prepare(void); /* a fixture; folder_remove() ends it */

/* Options are one string, with single spaces. */
const float *lossy_logits(const char *options); /* of all tokens; it must succeed */
struct output lossy_run(const char *options);   /* over the same tokens */
void lossy_check_same(const char *options, const char *others); /* logits, to the last bit */
double lossy_distance(const double *expected, const char *options); /* the largest */
double lossy_distance_between(const char *options, const char *others);
double lossy_number(const char *json, const char *name);

#endif
