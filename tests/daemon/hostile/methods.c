/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/hostile/methods.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/sequence.h"
#include "ipc/base/util.h"

#define BT VICTIM_BT
#define MSG(name_, ...) \
        ((struct kvd_msg){.number = KVD_MSG_##name_, .serial = 1, .name_ = {__VA_ARGS__}})

struct kvd_msg methods_ask(const struct asker *a, struct kvd_msg request) {
        struct kvd_msg reply;
        char text[256];

        if (raw_call(a->fd, &request, &reply, NULL) != 1)
                die("message %u ended the connection", request.number);
        if (reply.number == KVD_MSG_error)
                die("message %u: %s", request.number,
                    kvd_slice_copy(reply.error.text, text, sizeof text));
        return reply;
}

uint32_t methods_cool(const struct asker *a, uint32_t sequence, uint32_t how, const uint32_t *slots,
                      uint32_t n) {
        struct kvd_msg m = MSG(cool, .space = a->space, .sequence = sequence, .how = how,
                               .slots = {slots, n * 4}),
                       reply;

        if (raw_call(a->fd, &m, &reply, NULL) != 1)
                die("message %u ended the connection", m.number);
        if (reply.number != KVD_MSG_error)
                return reply.cool_reply.cooling;
        if (reply.error.code != EDQUOT && reply.error.code != ENOBUFS)
                die("cooling was refused with error %u", reply.error.code);
        return 0;
}

void methods_set(const struct asker *a, const char *key, const char *value) {
        methods_ask(a, MSG(space_set, .space = kvd_slice_of(a->name), .key = kvd_slice_of(key),
                           .value = kvd_slice_of(value)));
}

struct asker methods_open(const char *socket, const char *name) {
        static const char *const on[] = {"memshare", "keydiff", "kvreviver", "bicache", "hshare"};
        struct asker a = {.fd = raw_attach(socket), .name = name};

        a.space = raw_open_space(a.fd, name);
        for (uint32_t i = 0; i < ARRAY_SIZE(on); i++)
                methods_set(&a, on[i], "on");
        methods_set(&a, "memshare.min_step_tokens", "1");
        return a;
}

uint32_t methods_sequence(const struct asker *a, uint32_t max_blocks) {
        return methods_ask(a, MSG(table, .space = a->space, .op = 1, .max_blocks = max_blocks))
                .table_reply.sequence;
}

struct kvd_msg methods_append_message(const struct asker *a, uint32_t sequence, const kvd_ref *refs,
                                      uint32_t n, const uint32_t *tokens) {
        return MSG(append, .space = a->space, .sequence = sequence, .own = 1,
                   .blocks = {refs, n * 8}, .tokens = {tokens, n * BT * 4});
}

uint32_t methods_append(const struct asker *a, uint32_t sequence, uint32_t n) {
        static const uint32_t tokens[64 * BT] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};
        kvd_ref refs[64];
        uint32_t got = raw_allocate(a->fd, a->space, MIN(n, 64), refs);

        if (got)
                methods_ask(a, methods_append_message(a, sequence, refs, got, tokens));
        return got;
}

uint32_t methods_sync(const struct asker *a, uint32_t sequence, uint32_t answer, uint32_t ms) {
        uint32_t taken[KVD_SYNC_CHANGES], n = 0, all = 0;
        struct kvd_msg_sync_reply reply = {.pending = 1};

        for (uint32_t i = 0; i < KVD_SYNC_CHANGES; i++)
                taken[i] = answer;
        for (uint32_t quiet = 0; n || (reply.pending && quiet < ms);) {
                reply = methods_ask(a, MSG(sync, .space = a->space, .sequence = sequence,
                                           .taken = {taken, n * 4}))
                                .sync_reply;
                n = reply.changes.size / (uint32_t)sizeof(struct kvd_change);
                all += n;
                quiet = n ? 0 : quiet + 1;
                usleep(n || !reply.pending ? 0 : 1000);
        }
        return all;
}
