/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decodes frames from peers. scan.c checks a frame before msgpack-c sees it; this file checks what
 * depends on the table of messages: fields, types and limits.
 */

#include "ipc/msg.h"

#include <errno.h>
#include <inttypes.h>
#include <msgpack.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/text.h"
#include "ipc/base/why.h"
#include "ipc/scan.h"

/*
 * msgpack-c unpacks into a zone. The zone's first chunk has room for the values of any frame that
 * the scan accepts, and msgpack_zone_clear keeps it, so nothing is allocated after kvd_decoder_new.
 */
#define ZONE_BYTES \
        (KVD_SCAN_MAX_OBJECTS * sizeof(msgpack_object_kv) + \
         KVD_SCAN_MAX_OBJECTS * MSGPACK_ZONE_ALIGN)

struct kvd_decoder {
        msgpack_zone zone;
        bool has_zone;
        struct kvd_why why;
};

int kvd_decoder_new(struct kvd_decoder **ret) {
        _cleanup_(kvd_decoder_freep) struct kvd_decoder *d = NULL;

        d = sys->calloc(1, sizeof *d);
        if (!d)
                return -ENOMEM;
        d->has_zone = msgpack_zone_init(&d->zone, ZONE_BYTES);
        if (!d->has_zone)
                return -ENOMEM;
        *ret = STEAL(d);
        return 0;
}

struct kvd_decoder *kvd_decoder_free(struct kvd_decoder *decoder) {
        if (!decoder)
                return NULL;
        if (decoder->has_zone)
                msgpack_zone_destroy(&decoder->zone);
        free(decoder);
        return NULL;
}

void kvd_decoder_freep(struct kvd_decoder **decoder) {
        kvd_decoder_free(*decoder);
}

const char *kvd_decoder_why(const struct kvd_decoder *decoder) {
        return decoder->why.line;
}

/* ---- fields ---------------------------------------------------------------------------------- */

static int over_limit(struct kvd_decoder *d, const struct kvd_msg_info *info,
                      const struct kvd_field *f, uint64_t n) {
        bool number = f->type == KVD_FIELD_u32 || f->type == KVD_FIELD_u64;

        return kvd_refuse(&d->why, -EINVAL, "field '%s' of '%s' %s %" PRIu64 "%s, at most %" PRIu64,
                          f->name, info->name, number ? "is" : "has", n, number ? "" : " bytes",
                          f->limit);
}

static int wrong_type(struct kvd_decoder *d, const struct kvd_msg_info *info,
                      const struct kvd_field *f) {
        return kvd_refuse(&d->why, -EINVAL, "field '%s' of '%s' must be a %s", f->name, info->name,
                          kvd_field_type_name(f->type));
}

static int take_number(struct kvd_decoder *d, const struct kvd_msg_info *info,
                       const struct kvd_field *f, const msgpack_object *value, void *to) {
        if (value->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
                return wrong_type(d, info, f);
        if (value->via.u64 > f->limit)
                return over_limit(d, info, f, value->via.u64);
        if (f->type == KVD_FIELD_u32)
                *(uint32_t *)to = (uint32_t)value->via.u64;
        else
                *(uint64_t *)to = value->via.u64;
        return 0;
}

static int take_slice(struct kvd_decoder *d, const struct kvd_msg_info *info,
                      const struct kvd_field *f, const msgpack_object *value,
                      struct kvd_slice *to) {
        bool str = f->type == KVD_FIELD_str;

        if (value->type != (str ? MSGPACK_OBJECT_STR : MSGPACK_OBJECT_BIN))
                return wrong_type(d, info, f);
        if (value->via.bin.size > f->limit) /* str and bin have the same layout */
                return over_limit(d, info, f, value->via.bin.size);
        if (str && !kvd_is_plain(value->via.str.ptr, value->via.str.size))
                return kvd_refuse(&d->why, -EINVAL,
                                  "field '%s' of '%s' has bytes that are not printable UTF-8",
                                  f->name, info->name);
        *to = (struct kvd_slice){value->via.bin.ptr, value->via.bin.size};
        return 0;
}

/*
 * Fields usually arrive in the order of the table, so the search starts after the last one found.
 */
static const struct kvd_field *find_field(const struct kvd_msg_info *info,
                                          const msgpack_object_str *name, uint32_t *next) {
        for (uint32_t i = 0; i < info->n_fields; i++) {
                const struct kvd_field *f = &info->fields[(*next + i) % info->n_fields];

                if (f->name_size != name->size || memcmp(f->name, name->ptr, name->size) != 0)
                        continue;
                *next = (uint32_t)(f - info->fields) + 1;
                return f;
        }
        return NULL;
}

static int unknown_field(struct kvd_decoder *d, const struct kvd_msg_info *info,
                         const msgpack_object_str *name) {
        bool printable = name->size <= 40 && kvd_is_plain(name->ptr, name->size);

        return kvd_refuse(&d->why, -EINVAL, "unknown field '%.*s' of '%s'; is the peer newer?",
                          printable ? (int)name->size : 3, printable ? name->ptr : "...",
                          info->name);
}

static int take_field(struct kvd_decoder *d, const struct kvd_msg_info *info,
                      const msgpack_object_kv *kv, uint32_t *next, struct kvd_msg *msg) {
        const struct kvd_field *f = find_field(info, &kv->key.via.str, next);
        void *to;

        if (!f)
                return unknown_field(d, info, &kv->key.via.str);
        to = (uint8_t *)msg + f->offset;
        if (f->type == KVD_FIELD_u32 || f->type == KVD_FIELD_u64)
                return take_number(d, info, f, &kv->val, to);
        return take_slice(d, info, f, &kv->val, to);
}

/* ---- message --------------------------------------------------------------------------------- */

static bool is_envelope(const msgpack_object *o) {
        const msgpack_object *e;

        if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size != 3)
                return false;
        e = o->via.array.ptr;
        return e[0].type == MSGPACK_OBJECT_POSITIVE_INTEGER && e[0].via.u64 <= UINT32_MAX &&
               e[1].type == MSGPACK_OBJECT_POSITIVE_INTEGER && e[2].type == MSGPACK_OBJECT_MAP;
}

static int take_message(struct kvd_decoder *d, const msgpack_object_map *map, struct kvd_msg *ret) {
        const struct kvd_msg_info *info = kvd_msg_info(ret->number);
        struct kvd_msg msg = *ret;
        uint32_t next = 0;
        int r;

        if (!info)
                return kvd_refuse(&d->why, -ENOSYS,
                                  "message number %" PRIu32 " is unknown; is the peer newer?",
                                  ret->number);
        for (uint32_t i = 0; i < map->size; i++) {
                r = take_field(d, info, &map->ptr[i], &next, &msg);
                if (r < 0)
                        return r;
        }
        *ret = msg;
        return 0;
}

static int unpack(struct kvd_decoder *d, const void *frame, size_t size, msgpack_object *ret) {
        enum kvd_scan_result scan = kvd_scan(frame, size);
        msgpack_unpack_return unpacked;
        size_t offset = 0;

        if (scan)
                return kvd_refuse(&d->why, -EBADMSG, "%s", kvd_scan_text(scan));
        msgpack_zone_clear(&d->zone);
        unpacked = msgpack_unpack(frame, size, &offset, &d->zone, ret);
        if (unpacked != MSGPACK_UNPACK_SUCCESS)
                return kvd_refuse(&d->why, -EBADMSG, "msgpack-c cannot unpack the frame (%d)",
                                  unpacked);
        return 0;
}

int kvd_msg_decode(struct kvd_decoder *decoder, const void *frame, size_t size,
                   struct kvd_msg *ret) {
        msgpack_object root;
        int r;

        *ret = (struct kvd_msg){0};
        r = unpack(decoder, frame, size, &root);
        if (r < 0)
                return r;
        if (!is_envelope(&root))
                return kvd_refuse(
                        &decoder->why, -EBADMSG,
                        "a message must be an array of number, serial and a map of fields");
        ret->number = (uint32_t)root.via.array.ptr[0].via.u64;
        ret->serial = root.via.array.ptr[1].via.u64;
        return take_message(decoder, &root.via.array.ptr[2].via.map, ret);
}
