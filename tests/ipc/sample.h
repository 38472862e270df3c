/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_IPC_SAMPLE_H
#define KVD_TESTS_IPC_SAMPLE_H

/* Messages of every kind, made from their descriptions. */

#include "ipc/msg.h"

/* bytes: the largest values of all fields together exceed KVD_FRAME_MAX */
#define SAMPLE_FRAME_MAX (256u << 10)

enum sample_kind { SAMPLE_EMPTY, SAMPLE_LARGEST, SAMPLE_RANDOM };

uint64_t sample_random(uint64_t *seed);

/*
 * Fills in all fields. Strings and bins point into memory that the samples share and never change.
 */
void sample_fill(struct kvd_msg *msg, uint32_t number, enum sample_kind kind, uint64_t *seed);

/* The name of the first field in which the two differ, or NULL. */
const char *sample_difference(const struct kvd_msg *a, const struct kvd_msg *b);

#endif
