/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ZeroMQ by libzmq, which is loaded only for publishing: kvctl has no other use for it, and starts
 * without the dozen libraries that it depends on. Calls and numbers are those of libzmq.so.5, which
 * do not change.
 */

#include "tools/kvctl/publish.h"

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"

#define LIBRARY "libzmq.so.5"

enum { ZMQ_PUB = 1, ZMQ_ROUTER = 6 };
enum {
        ZMQ_RCVMORE = 13,
        ZMQ_LINGER = 17,
        ZMQ_SNDHWM = 23,
        ZMQ_LAST_ENDPOINT = 32,
        ZMQ_ROUTER_MANDATORY = 33,
};
enum { ZMQ_DONTWAIT = 1, ZMQ_SNDMORE = 2 };

#define LIVE_UNSENT 20000
#define REPLAY_UNSENT 256 /* the rest waits in replays.c, without a copy */

struct calls {
        void *(*ctx_new)(void);
        int (*ctx_term)(void *context);
        void *(*socket)(void *context, int type);
        int (*close)(void *socket);
        int (*setsockopt)(void *socket, int option, const void *value, size_t size);
        int (*getsockopt)(void *socket, int option, void *value, size_t *size);
        int (*bind)(void *socket, const char *endpoint);
        int (*send)(void *socket, const void *data, size_t size, int flags);
        int (*recv)(void *socket, void *to, size_t size, int flags);
        int (*zmq_errno)(void);
        const char *(*strerror)(int error);
};

static const struct {
        const char *name;
        size_t offset;
} names[] = {
        {"zmq_ctx_new", offsetof(struct calls, ctx_new)},
        {"zmq_ctx_term", offsetof(struct calls, ctx_term)},
        {"zmq_socket", offsetof(struct calls, socket)},
        {"zmq_close", offsetof(struct calls, close)},
        {"zmq_setsockopt", offsetof(struct calls, setsockopt)},
        {"zmq_getsockopt", offsetof(struct calls, getsockopt)},
        {"zmq_bind", offsetof(struct calls, bind)},
        {"zmq_send", offsetof(struct calls, send)},
        {"zmq_recv", offsetof(struct calls, recv)},
        {"zmq_errno", offsetof(struct calls, zmq_errno)},
        {"zmq_strerror", offsetof(struct calls, strerror)},
};

struct publisher {
        void *library; /* owned */
        struct calls zmq;
        void *context;       /* owned */
        void *live, *replay; /* owned sockets */
        char live_at[256], replay_at[256];
};

/* ---- life ------------------------------------------------------------------------------------ */

static int load(struct publisher *p, struct kvd_why *why) {
        p->library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
        if (!p->library)
                return kvd_refuse(why, -ENOPKG,
                                  "publishing needs " LIBRARY ", of the package libzmq5: %s",
                                  dlerror());
        for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
                void *call = dlsym(p->library, names[i].name);

                if (!call)
                        return kvd_refuse(why, -ENOPKG, LIBRARY " has no %s", names[i].name);
                memcpy((uint8_t *)&p->zmq + names[i].offset, &call, sizeof call);
        }
        p->context = p->zmq.ctx_new();
        return p->context ? 0 : kvd_refuse(why, -ENOMEM, "out of memory");
}

/* A router reports that a connection has no room, or has ended, instead of dropping messages. */
static void set_options(struct publisher *p, void *socket, int type) {
        int most = type == ZMQ_ROUTER ? REPLAY_UNSENT : LIVE_UNSENT, linger = 0, on = 1;

        p->zmq.setsockopt(socket, ZMQ_SNDHWM, &most, sizeof most);
        p->zmq.setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
        if (type == ZMQ_ROUTER)
                p->zmq.setsockopt(socket, ZMQ_ROUTER_MANDATORY, &on, sizeof on);
}

static int listen_at(struct publisher *p, int type, const char *endpoint, void **ret, char *at,
                     size_t room, struct kvd_why *why) {

        *ret = p->zmq.socket(p->context, type);
        if (!*ret)
                return kvd_refuse(why, -ENOMEM, "no socket: %s",
                                  p->zmq.strerror(p->zmq.zmq_errno()));
        set_options(p, *ret, type);
        if (p->zmq.bind(*ret, endpoint) < 0)
                return kvd_refuse(why, -EINVAL, "cannot listen at \"%s\": %s", endpoint,
                                  p->zmq.strerror(p->zmq.zmq_errno()));
        p->zmq.getsockopt(*ret, ZMQ_LAST_ENDPOINT, at, &room);
        return 0;
}

int publisher_new(const char *listen, const char *replay, struct publisher **ret,
                  struct kvd_why *why) {
        _cleanup_(publisher_freep) struct publisher *p = calloc(1, sizeof *p);
        int r;

        if (!p)
                return kvd_refuse(why, -ENOMEM, "out of memory");
        r = load(p, why);
        if (r == 0)
                r = listen_at(p, ZMQ_PUB, listen, &p->live, p->live_at, sizeof p->live_at, why);
        if (r == 0 && replay)
                r = listen_at(p, ZMQ_ROUTER, replay, &p->replay, p->replay_at, sizeof p->replay_at,
                              why);
        if (r == 0)
                *ret = STEAL(p);
        return r;
}

struct publisher *publisher_free(struct publisher *p) {
        if (!p)
                return NULL;
        if (p->live)
                p->zmq.close(p->live);
        if (p->replay)
                p->zmq.close(p->replay);
        if (p->context)
                p->zmq.ctx_term(p->context);
        if (p->library)
                dlclose(p->library);
        free(p);
        return NULL;
}

void publisher_freep(struct publisher **p) {
        publisher_free(*p);
}

const char *publisher_endpoint(const struct publisher *p) {
        return p->live_at;
}

const char *publisher_replay_endpoint(const struct publisher *p) {
        return p->replay_at;
}

/* ---- messages -------------------------------------------------------------------------------- */

struct part {
        const void *data;
        size_t size;
};

/* The parts of a message are sent together or, if a queue is full, not at all. */
static void send_parts(struct publisher *p, void *socket, const char *topic, uint64_t seq,
                       const void *payload, size_t size) {
        uint64_t number = htobe64(seq);
        const struct part parts[] = {{topic, strlen(topic)},
                                     {&number, sizeof number},
                                     {payload, size}};

        for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
                if (p->zmq.send(socket, parts[i].data, parts[i].size,
                                ZMQ_DONTWAIT | (i + 1 < ARRAY_SIZE(parts) ? ZMQ_SNDMORE : 0)) < 0)
                        return;
}

void publish(struct publisher *p, const char *topic, uint64_t seq, const void *payload,
             size_t size) {
        send_parts(p, p->live, topic, seq, payload, size);
}

/* Only the first part can find no room, because a connection takes messages whole. */
int publisher_answer_begin(struct publisher *p, const struct asker *asker) {
        if (p->zmq.send(p->replay, asker->id, asker->size, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
                return p->zmq.zmq_errno() == EAGAIN ? 0 : -ENOTCONN;
        p->zmq.send(p->replay, "", 0, ZMQ_DONTWAIT | ZMQ_SNDMORE);
        return 1;
}

void publisher_answer(struct publisher *p, const char *topic, uint64_t seq, const void *payload,
                      size_t size) {
        send_parts(p, p->replay, topic, seq, payload, size);
}

/* Receives a part of a message; false if none. *size is above room if it was cut. */
static bool receive_part(struct publisher *p, bool first, void *to, size_t room, size_t *size) {
        size_t n = sizeof(int);
        int more = 0, got;

        if (!first && (p->zmq.getsockopt(p->replay, ZMQ_RCVMORE, &more, &n) < 0 || !more))
                return false;
        got = p->zmq.recv(p->replay, to, room, ZMQ_DONTWAIT);
        *size = (size_t)MAX(got, 0);
        return got >= 0;
}

/* A REQ socket sends three parts: its id, an empty one, and a number. Others are ignored. */
bool publisher_asked(struct publisher *p, struct asker *asker, uint64_t *seq) {
        uint64_t number = 0, rest;
        size_t empty, size = 0, n = 0;

        if (!p->replay || !receive_part(p, true, asker->id, sizeof asker->id, &asker->size))
                return false;
        if (receive_part(p, false, &rest, sizeof rest, &empty) && empty == 0 &&
            receive_part(p, false, &number, sizeof number, &size))
                n = 3;
        while (receive_part(p, false, &rest, sizeof rest, &empty))
                n++;
        *seq = be64toh(number);
        return n == 3 && size == sizeof number && asker->size <= sizeof asker->id;
}
