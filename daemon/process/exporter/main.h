/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_EXPORTER_MAIN_H
#define KVD_DAEMON_PROCESS_EXPORTER_MAIN_H

/*
 * kvd --exporter: serves the owner on its socket. With a UUID as an argument it only reports there
 * whether it could. Returns an exit status.
 */
int exporter_main(int argc, char **argv);

#endif
