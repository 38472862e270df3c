/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_PUBLISH_H
#define KVCTL_PUBLISH_H

/* Two ZeroMQ sockets: one publishes, and the other gets requests for missed batches. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/why.h"

struct publisher;

/* listen, replay: endpoints, as tcp://127.0.0.1:5557; replay may be NULL. -ENOPKG, -EINVAL, ... */
int publisher_new(const char *listen, const char *replay, struct publisher **ret,
                  struct kvd_why *why);
struct publisher *publisher_free(struct publisher *publisher);
void publisher_freep(struct publisher **publisher);

/* The endpoint to connect to, with the port that the system chose if the endpoint named none. */
const char *publisher_endpoint(const struct publisher *publisher);
const char *publisher_replay_endpoint(const struct publisher *publisher);

/* Sends to all subscribers. One that is too slow misses messages, and sees a gap in the numbers. */
void publish(struct publisher *publisher, const char *topic, uint64_t seq, const void *payload,
             size_t size);

/* True: *asker asks for all batches from *seq on. */
struct asker {
        uint8_t id[256];
        size_t size;
};
bool publisher_asked(struct publisher *publisher, struct asker *asker, uint64_t *seq);
/*
 * Begins a reply, which publisher_answer() must end. 0: the connection has no room for one now.
 * -ENOTCONN: it has ended.
 */
int publisher_answer_begin(struct publisher *publisher, const struct asker *asker);
/* seq UINT64_MAX: end of the replay */
void publisher_answer(struct publisher *publisher, const char *topic, uint64_t seq,
                      const void *payload, size_t size);

#endif
