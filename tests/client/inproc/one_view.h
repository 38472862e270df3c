/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_INPROC_ONE_VIEW_H
#define KVD_TESTS_INPROC_ONE_VIEW_H

/*
 * Lets ThreadSanitizer see what daemon and clients do to each other. ThreadSanitizer follows
 * addresses, but a memfd that is mapped twice has two. It knows what orders two threads, but not
 * that a message does. So this table of system calls changes two things:
 *
 *      An index or pin page that is already mapped gets the same address again. munmap, which is linked with --wrap,
 *      unmaps it when its last user does.
 *      A message orders its sender before its receiver, on that connection only.
 *
 * Without ThreadSanitizer these calls must work like the kernel's.
 */

void one_view_install(void);

#endif
