/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_PUBLISH_H
#define KVCTL_PUBLISH_H

/* Two sockets of ZeroMQ: one that publishes, and one that is asked for what was missed. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/why.h"

struct publisher;

/* listen, replay: endpoints, as tcp://127.0.0.1:5557; replay NULL: none. -ENOPKG, -EINVAL, ... */
int publisher_new(const char *listen, const char *replay, struct publisher **ret,
                  struct kvd_why *why);
struct publisher *publisher_free(struct publisher *publisher);
void publisher_freep(struct publisher **publisher);

/* What a subscriber connects to: ports that the system chose are there. */
const char *publisher_endpoint(const struct publisher *publisher);
const char *publisher_replay_endpoint(const struct publisher *publisher);

/* To all subscribers. One that does not keep up misses some, and sees it by the numbers. */
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
/* seq UINT64_MAX: that was all */
void publisher_answer(struct publisher *publisher, const char *topic, uint64_t seq,
                      const void *payload, size_t size);

#endif
