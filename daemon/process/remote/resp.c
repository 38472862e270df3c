/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Parses the replies of a server, which is not trusted. Lengths are checked before they are used,
 * and members of nested arrays are counted without recursion.
 */

#include "daemon/process/remote/resp.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"

/* Bytes before the line's end; -EAGAIN: it has not come yet; -EPROTO: invalid or too long. */
static int64_t line_of(const uint8_t *data, size_t n) {
        const uint8_t *end = memchr(data, '\r', MIN(n, RESP_LINE));

        if (!end)
                return n >= RESP_LINE ? -EPROTO : -EAGAIN;
        if ((size_t)(end - data) + 1 == n)
                return -EAGAIN;
        return end[1] == '\n' ? end - data : -EPROTO;
}

static bool number_of(const uint8_t *text, size_t n, int64_t *ret) {
        bool negative = n && text[0] == '-';
        int64_t value = 0;

        if (n == negative || n > 18)
                return false;
        for (size_t i = negative; i < n; i++) {
                if (text[i] < '0' || text[i] > '9')
                        return false;
                value = value * 10 + (text[i] - '0');
        }
        *ret = negative ? -value : value;
        return true;
}

/* A string of ret->number bytes, whose head was `used` bytes long. */
static int take_bulk(const uint8_t *data, size_t n, size_t most, struct resp *ret, size_t *used) {
        size_t size = (size_t)ret->number;

        if (ret->number == -1) {
                ret->type = RESP_NIL;
                return 1;
        }
        if (ret->number < 0 || size > most)
                return -EPROTO;
        if (n - *used < size + 2)
                return 0;
        ret->type = RESP_BULK;
        ret->text = data + *used;
        ret->size = size;
        *used += size + 2;
        return memcmp(ret->text + size, "\r\n", 2) == 0 ? 1 : -EPROTO;
}

static int take_line(uint8_t sign, struct resp *ret) {
        ret->type = sign == '+' ? RESP_TEXT : sign == '-' ? RESP_ERROR : RESP_NUMBER;
        return 1;
}

static int take_array(struct resp *ret) {
        ret->type = ret->number == -1 ? RESP_NIL : RESP_ARRAY;
        return ret->number >= -1 && ret->number <= (int64_t)RESP_MEMBERS ? 1 : -EPROTO;
}

int resp_take(const uint8_t *data, size_t n, size_t most, struct resp *ret, size_t *used) {
        int64_t line;

        *ret = (struct resp){0};
        if (!n)
                return 0;
        if (!data[0] || !strchr("+-:$*", data[0]))
                return -EPROTO;
        line = line_of(data + 1, n - 1);
        if (line < 0)
                return line == -EAGAIN ? 0 : -EPROTO;
        ret->text = data + 1;
        ret->size = (size_t)line;
        *used = (size_t)line + 3;
        if (data[0] == '+' || data[0] == '-')
                return take_line(data[0], ret);
        if (!number_of(ret->text, ret->size, &ret->number))
                return -EPROTO;
        if (data[0] == ':')
                return take_line(data[0], ret);
        return data[0] == '$' ? take_bulk(data, n, most, ret, used) : take_array(ret);
}

int resp_take_whole(const uint8_t *data, size_t n, size_t most, struct resp *ret, size_t *used) {
        uint64_t left = 1, seen = 0;
        struct resp member;
        size_t some;

        *used = 0;
        if (!n) /* data may be NULL: compute no offset */
                return 0;
        while (left) {
                int r = resp_take(data + *used, n - *used, most, &member, &some);

                if (r <= 0)
                        return r;
                if (*used == 0)
                        *ret = member;
                *used += some;
                left--;
                left += member.type == RESP_ARRAY ? (uint64_t)member.number : 0;
                if (++seen + left > RESP_MEMBERS)
                        return -EPROTO;
        }
        return 1;
}

size_t resp_put_head(uint8_t *to, char sign, uint64_t n) {
        return (size_t)snprintf((char *)to, RESP_HEAD, "%c%llu\r\n", sign, (unsigned long long)n);
}
