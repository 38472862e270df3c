/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_CLOSER_H
#define KVD_DAEMON_SERVE_CLOSER_H

/*
 * A thread for closes that may take long: of large shared memory, whose pages are freed with its
 * last descriptor, and of sockets that may hold unread descriptors. These are closed with the
 * socket, and the peer that sent them decides how long that takes. The thread is started when it is
 * first needed.
 */

#include <stdbool.h>
#include <stdint.h>

struct closer;

/* room: maximum number of descriptors that wait to be closed. */
int closer_new(uint32_t room, struct closer **ret);
struct closer *closer_free(struct closer *closer); /* closes all of them first */

/* Takes ownership of fd. If there is no room, the caller's thread closes it at once. */
void closer_take(struct closer *closer, int fd);
uint32_t closer_waiting(struct closer *closer);

/*
 * New connections of this socket will accept no descriptors. False: the kernel does not support
 * that.
 */
bool closer_forbid_fds(int listening);
/* Can the peer send descriptors? If so, prepares the connection for kvd_frame_has_fds. */
bool closer_is_needed(int connection);

#endif
