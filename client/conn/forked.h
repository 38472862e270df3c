/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_FORKED_H
#define KVD_CLIENT_CONN_FORKED_H

/*
 * A page of zeros that children of fork() see zeroed again, whatever the parent wrote there: telling
 * them apart costs one load and no system call. NULL: out of memory.
 */
void *forked_page_new(void);
void forked_page_free(void *page); /* NULL is fine */

#endif
