/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_HANDLERS_ARRAYS_H
#define KVD_DAEMON_HANDLERS_ARRAYS_H

/*
 * Copy arrays of a request from its frame, where they are unaligned, to the server's scratch.
 * Return the number of elements, or a negative errno after client_refuse.
 */

#include "daemon/serve/client.h"

int64_t array_of_blocks(struct client *client, struct kvd_slice from); /* to scratch->blocks */
int64_t array_of_tokens(struct client *client, struct kvd_slice from); /* to scratch->tokens */
/* to scratch->numbers */
int64_t array_of_numbers(struct client *client, struct kvd_slice from, const char *what);

/* 0, or a negative errno after client_refuse. A missing key becomes all zeros. */
int key_of(struct client *client, struct kvd_slice from, struct kvd_key *ret);

#endif
