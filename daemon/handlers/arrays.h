/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_HANDLERS_ARRAYS_H
#define KVD_DAEMON_HANDLERS_ARRAYS_H

/*
 * Arrays of a request, copied out of its frame, where they lie unaligned, into the server's
 * scratch. They return how many elements, or a negative errno after client_refuse said what is
 * wrong.
 */

#include "daemon/serve/client.h"

int64_t array_of_blocks(struct client *client, struct kvd_slice from); /* to scratch->blocks */
int64_t array_of_tokens(struct client *client, struct kvd_slice from); /* to scratch->tokens */
/* to scratch->numbers */
int64_t array_of_numbers(struct client *client, struct kvd_slice from, const char *what);

/* 0; a missing key is all zeroes. */
int key_of(struct client *client, struct kvd_slice from, struct kvd_key *ret);

#endif
