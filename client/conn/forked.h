/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_FORKED_H
#define KVD_CLIENT_CONN_FORKED_H

/*
 * Returns a page of zeros, which children of fork() see zeroed again, whatever the parent wrote
 * there: detecting a fork costs one load and no system call. NULL: out of memory.
 */
void *forked_page_new(void);
void forked_page_free(void *page); /* NULL is fine */

#endif
