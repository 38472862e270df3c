/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_EXPORTER_MAIN_H
#define KVD_DAEMON_PROCESS_EXPORTER_MAIN_H

/*
 * kvd --exporter: serves the owner on its socket, or, with a UUID behind it, says there whether it
 * could.
 */
int exporter_main(int argc, char **argv);

#endif
