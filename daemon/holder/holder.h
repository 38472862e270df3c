/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_HOLDER_HOLDER_H
#define KVD_DAEMON_HOLDER_HOLDER_H

/* kvd --holder: serves the owner on its socket, or, with a UUID behind it, says there whether it could. */
int holder_main(int argc, char **argv);

#endif
