/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_CLOSER_H
#define KVD_DAEMON_SERVE_CLOSER_H

/*
 * Closes what may take long: large shared memory, whose pages are freed with its last descriptor,
 * and sockets that descriptors may wait in. What a peer has sent and nobody took is closed with the
 * socket, and the end of a file may take as long as its maker likes. So a thread does it, and not
 * the loop. It is started when it is first needed.
 */

#include <stdbool.h>
#include <stdint.h>

struct closer;

/* room: most that wait to be closed. */
int closer_new(uint32_t room, struct closer **ret);
struct closer *closer_free(struct closer *closer); /* after all of them are closed */

/* Takes the descriptor over. Where there is no room, it is closed at once. */
void closer_take(struct closer *closer, int fd);
uint32_t closer_waiting(struct closer *closer);

/* From now on nobody can send descriptors to those who connect; false: the kernel has no such word. */
bool closer_forbid_fds(int listening);
/* May this connection bring descriptors? Then it is made such that kvd_frame_has_fds tells. */
bool closer_is_needed(int connection);

#endif
