/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_TEAM_H
#define KVLM_TEAM_H

/* Threads that do one thing at a time together. The caller is member 0. */

#include <stdint.h>

struct team;

int team_new(uint32_t members, struct team **ret);
struct team *team_free(struct team *);
uint32_t team_size(const struct team *); /* members; fewer than asked for if threads could not be started */

void team_run(struct team *, void (*work)(void *data, uint32_t member), void *data); /* returns when all are done */
void team_meet(struct team *); /* inside work: waits until every member is here */

#endif
