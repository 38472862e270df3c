/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Arrays in a frame are unaligned, and as long as their sender likes. They are checked here and
 * copied to aligned memory for the store.
 */

#include "daemon/handlers/arrays.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"

static int64_t copy_array(struct client *c, struct kvd_slice from, const char *what, void *to,
                          uint32_t size, uint32_t room) {
        if (from.size % size)
                return client_refuse(c, -EINVAL, "%s has %u bytes, not a multiple of %u", what,
                                     from.size, size);
        if (from.size / size > room)
                return client_refuse(c, -EINVAL, "%s has more than %u elements", what, room);
        if (from.size)
                memcpy(to, from.data, from.size);
        return from.size / size;
}

int64_t array_of_blocks(struct client *c, struct kvd_slice from) {
        struct scratch *s = c->server->scratch;

        return copy_array(c, from, "blocks", s->blocks, sizeof(kvd_ref), ARRAY_SIZE(s->blocks));
}

int64_t array_of_tokens(struct client *c, struct kvd_slice from) {
        struct scratch *s = c->server->scratch;

        return copy_array(c, from, "tokens", s->tokens, sizeof(uint32_t), ARRAY_SIZE(s->tokens));
}

int64_t array_of_numbers(struct client *c, struct kvd_slice from, const char *what) {
        struct scratch *s = c->server->scratch;

        return copy_array(c, from, what, s->numbers, sizeof(uint32_t), ARRAY_SIZE(s->numbers));
}

int key_of(struct client *c, struct kvd_slice from, struct kvd_key *ret) {
        *ret = (struct kvd_key){0};
        if (from.size != 0 && from.size != sizeof *ret)
                return client_refuse(c, -EINVAL, "prefix_key has %u bytes, not %zu", from.size,
                                     sizeof *ret);
        if (from.size)
                memcpy(ret, from.data, sizeof *ret);
        return 0;
}
