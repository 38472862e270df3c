/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_DISK_MAIN_H
#define KVD_DAEMON_PROCESS_DISK_MAIN_H

/*
 * The disk process: kvd --disk. It reads and writes a file of the file tier, so that a disk that
 * hangs does not delay the daemon. It ends with its owner. Returns an exit status.
 */
int disk_main(void);

#endif
