/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_RESP_H
#define KVD_DAEMON_PROCESS_REMOTE_RESP_H

/*
 * The protocol of Redis and Valkey (RESP 2), as far as kvd speaks it. Commands are arrays of
 * strings. Replies are read where they lie; nothing is copied, and nothing that a server says makes
 * anybody allocate.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RESP_LINE 1024u      /* bytes of a line, most */
#define RESP_MEMBERS 200000u /* of an array, with those of the arrays in it */

enum resp_type { RESP_TEXT, RESP_ERROR, RESP_NUMBER, RESP_BULK, RESP_NIL, RESP_ARRAY };

struct resp {
        enum resp_type type;
        const uint8_t *text; /* TEXT, ERROR, BULK: not terminated */
        size_t size;
        int64_t number;      /* NUMBER; ARRAY: members, which follow */
};

/*
 * What begins at data: 1, and *used says where it ends (an array's members follow there); 0: more
 * bytes are needed; -EPROTO: it is no reply, or a string of more than most bytes.
 */
int resp_take(const uint8_t *data, size_t n, size_t most, struct resp *ret, size_t *used);

/* The same for a reply with all members of its arrays; ret is its beginning. */
int resp_take_whole(const uint8_t *data, size_t n, size_t most, struct resp *ret, size_t *used);

/* Writes the head of a command of so many strings, or of a string of so many bytes. */
#define RESP_HEAD 24u /* bytes that to must have, at least */
size_t resp_put_head(uint8_t *to, char sign, uint64_t n);

static inline bool resp_is(const struct resp *r, const char *text, size_t n) {
        return r->size >= n && __builtin_memcmp(r->text, text, n) == 0;
}
/* Does the text, or error, begin with these words? */
#define resp_begins(r, words) resp_is(r, words, sizeof(words) - 1)

#endif
