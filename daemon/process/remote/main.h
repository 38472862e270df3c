/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_MAIN_H
#define KVD_DAEMON_PROCESS_REMOTE_MAIN_H

/*
 * The remote process: kvd --remote. It talks to the servers of the remote tier, so that a network
 * that hangs blocks no other process. It exits when its owner does. Returns an exit status.
 */
int remote_main(void);

#endif
