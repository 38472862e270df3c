/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_RESP_H
#define KVD_DAEMON_PROCESS_REMOTE_RESP_H

/*
 * The part of the protocol of Redis and Valkey (RESP 2) that kvd uses. Commands are arrays of
 * strings. Replies are parsed in place: nothing is copied or allocated.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RESP_LINE 1024u      /* maximum bytes of a line */
#define RESP_MEMBERS 200000u /* maximum of an array, including those of arrays in it */

enum resp_type { RESP_TEXT, RESP_ERROR, RESP_NUMBER, RESP_BULK, RESP_NIL, RESP_ARRAY };

struct resp {
        enum resp_type type;
        const uint8_t *text; /* TEXT, ERROR, BULK: not terminated */
        size_t size;
        int64_t number; /* NUMBER; ARRAY: number of members, which follow */
};

/*
 * Parses what begins at data. 1: it has *used bytes (an array's members follow them). 0: more bytes
 * are needed. -EPROTO: it is not a reply, or a string of more than most bytes.
 */
int resp_take(const uint8_t *data, size_t n, size_t most, struct resp *ret, size_t *used);

/* The same for a reply with all members of its arrays. *ret is its head. */
int resp_take_whole(const uint8_t *data, size_t n, size_t most, struct resp *ret, size_t *used);

/* Writes the head of a command of n strings ('*') or of a string of n bytes ('$'). */
#define RESP_HEAD 24u /* minimum bytes of to */
size_t resp_put_head(uint8_t *to, char sign, uint64_t n);

static inline bool resp_is(const struct resp *r, const char *text, size_t n) {
        return r->size >= n && __builtin_memcmp(r->text, text, n) == 0;
}
/* Whether the text or error begins with these words. */
#define resp_begins(r, words) resp_is(r, words, sizeof(words) - 1)

#endif
