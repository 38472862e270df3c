/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_MAIN_H
#define KVD_DAEMON_PROCESS_WORKER_MAIN_H

/*
 * The worker: kvd --worker. It maps what its owner sends it (index read-only, pool, summaries,
 * exact copies, a sketch), does one job after the other (ipc/base/job.h), and knows nothing about
 * clients, domains or the store. It ends with its owner.
 */

/* Arguments after the program's name: --worker, number of threads. Returns an exit status. */
int worker_main(int argc, char **argv);

#endif
