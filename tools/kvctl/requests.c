/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads requests, a line at a time. Only the block numbers of each line are kept, so that a trace
 * of a day fits in memory.
 */

#include "tools/kvctl/requests.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_BLOCKS (UINT64_C(1) << 31)

static bool make_room(void **list, size_t *room, size_t want, size_t size) {
        size_t more = MAX(want, 2 * *room);
        void *grown;

        if (want <= *room)
                return true;
        grown = realloc(*list, more * size);
        if (!grown)
                return false;
        *list = grown;
        *room = more;
        return true;
}

static bool make_rooms(struct requests *q, size_t n) {
        return make_room((void **)&q->blocks, &q->blocks_room, q->n_blocks + n,
                         sizeof *q->blocks) &&
               make_room((void **)&q->ends, &q->ends_room, q->n + 1, sizeof *q->ends);
}

/* NULL, or what is wrong with the request. */
static const char *make_room_for(struct requests *q, size_t n) {
        if (q->n_blocks + n > MOST_BLOCKS)
                return "is one too many: there are 2^31 blocks before it";
        return make_rooms(q, n) ? NULL : "does not fit in memory";
}

const char *requests_add(struct requests *q, const uint64_t *blocks, size_t n) {
        const char *trouble = make_room_for(q, n);

        if (trouble)
                return trouble;
        memcpy(q->blocks + q->n_blocks, blocks, n * sizeof *blocks);
        q->n_blocks += n;
        q->ends[q->n++] = q->n_blocks;
        return NULL;
}

static const char *take(struct requests *q, const json_t *ids) {
        size_t n = json_array_size(ids), i;
        const char *trouble = n ? make_room_for(q, n) :
                                  "has no hash_ids, the numbers of its blocks";
        json_t *id;

        if (trouble)
                return trouble;
        json_array_foreach(ids, i, id) {
                if (!json_is_integer(id))
                        return "has something in hash_ids that is not a whole number";
                q->blocks[q->n_blocks++] = (uint64_t)json_integer_value(id);
        }
        q->ends[q->n++] = q->n_blocks;
        return NULL;
}

/* An event of kvctl trace other than a lookup. */
static bool is_other_event(const json_t *line) {
        const char *event = json_string_value(json_object_get(line, "event"));

        return event && strcmp(event, "asked") != 0;
}

static const char *take_line(struct requests *requests, const char *line) {
        json_auto_t *request = NULL;

        if (line[strspn(line, " \t\r\n")] == '\0')
                return NULL;
        request = json_loads(line, 0, NULL);
        if (!request)
                return "is no JSON";
        if (is_other_event(request))
                return NULL;
        return take(requests, json_object_get(request, "hash_ids"));
}

static int read_lines(FILE *from, const char *path, struct requests *ret, struct kvd_why *why) {
        _cleanup_(freep) char *line = NULL;
        const char *trouble = NULL;
        size_t room = 0, number = 0;

        while (!trouble && getline(&line, &room, from) >= 0) {
                number++;
                trouble = take_line(ret, line);
        }
        if (trouble)
                return kvd_refuse(why, -EINVAL, "%s: line %zu %s", path, number, trouble);
        if (ferror(from))
                return kvd_refuse(why, -EIO, "%s: cannot be read", path);
        return ret->n ? 0 : kvd_refuse(why, -EINVAL, "%s: there are no requests in it", path);
}

int requests_read(const char *path, struct requests *ret, struct kvd_why *why) {
        bool own = strcmp(path, "-") != 0;
        FILE *from = own ? fopen(path, "re") : stdin;
        int r;

        *ret = REQUESTS_NONE;
        if (!from)
                return kvd_refuse(why, -EINVAL, "%s: %s", path, strerror(errno));
        r = read_lines(from, path, ret, why);
        if (own)
                fclose(from);
        if (r < 0)
                requests_clear(ret);
        return r;
}

void requests_clear(struct requests *requests) {
        free(requests->blocks);
        free(requests->ends);
        *requests = REQUESTS_NONE;
}
