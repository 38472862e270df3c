/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_COLD_COPIES_H
#define KVD_STORE_FILE_COLD_COPIES_H

/* Exact copies in the file, for the methods that make copies and want them back. */

#include "store/sequence/sequence.h"

/* There is one more copy in memory, or one more that may leave memory. */
void copy_made(struct space *space);
/*
 * A copy in a file is needed in memory. 0: copy_came (sequence/sequence.h) will follow, else an
 * error as for copy_came.
 */
int copy_wanted(struct space *space, const struct copy_owner *owner);

#endif
