/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_MAIN_H
#define KVD_DAEMON_PROCESS_REMOTE_MAIN_H

/*
 * The remote process: kvd --remote. It speaks to the servers of the remote tier, so that a network
 * that hangs holds up nobody else. It ends with its owner. Returns an exit status.
 */
int remote_main(void);

#endif
