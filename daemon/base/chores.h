/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_CHORES_H
#define KVD_DAEMON_BASE_CHORES_H

/*
 * A queue of work for a thread of its own: calls of the kernel that may take long, and that the
 * loop does not wait for. The thread is started when it is first needed; all signals are blocked in
 * it.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct chores;

/* An item has `size` bytes, and up to `room` of them wait. `work` is called in the thread. */
int chores_new(uint32_t room, size_t size, void (*work)(void *data, const void *item), void *data,
               struct chores **ret);
struct chores *chores_free(struct chores *chores); /* does all of them first */

/* Copies *item. -EAGAIN: there is no room; another error: the thread could not be started. */
int chores_add(struct chores *chores, const void *item);

/* Takes the oldest item that waits, so that the thread will not; false: none waits. */
bool chores_take_back(struct chores *chores, void *item);

/* The number of items that wait or are being worked on. */
uint32_t chores_left(struct chores *chores);

#endif
