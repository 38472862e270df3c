/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_INPROC_ONE_VIEW_H
#define KVD_TESTS_INPROC_ONE_VIEW_H

/*
 * Lets ThreadSanitizer see what daemon and clients do to each other. It follows addresses, and a
 * memfd that is mapped twice has two; it knows what orders two threads, but not that a message
 * does. So, in this table of system calls,
 *
 *      an index or pin page that is mapped already gets the same address again (munmap, which is linked with --wrap,
 *      unmaps it with the last);
 *      a message orders who sent it before who receives it, on that connection only.
 *
 * Without ThreadSanitizer it is merely another kernel with which everything must work.
 */

void one_view_install(void);

#endif
