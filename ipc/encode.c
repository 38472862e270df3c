/* SPDX-License-Identifier: Apache-2.0 */

/* Encodes messages as frames. Members are written in the order of msg.def. */

#include "ipc/msg.h"

#include <errno.h>
#include <msgpack.h>
#include <string.h>

struct output {
        uint8_t *at, *end;
};

static int put(void *data, const char *bytes, size_t n) {
        struct output *out = data;

        if ((size_t)(out->end - out->at) < n)
                return -1;
        memcpy(out->at, bytes, n);
        out->at += n;
        return 0;
}

/*
 * The value of an integer member or the length of another one: what the limit applies to; 0:
 * omitted.
 */
static uint64_t magnitude(const struct kvd_msg *msg, const struct kvd_field *f) {
        const void *p = (const uint8_t *)msg + f->offset;

        switch ((enum kvd_field_type)f->type) {
        case KVD_FIELD_u32: return *(const uint32_t *)p;
        case KVD_FIELD_u64: return *(const uint64_t *)p;
        default: return ((const struct kvd_slice *)p)->size;
        }
}

static int count_members(const struct kvd_msg *msg, const struct kvd_msg_info *info) {
        int n = 0;

        for (const struct kvd_field *f = info->fields; f->name; f++) {
                uint64_t m = magnitude(msg, f);

                if (m > f->limit)
                        return -EINVAL;
                n += m != 0;
        }
        return n;
}

static int pack_member(msgpack_packer *pk, const struct kvd_msg *msg, const struct kvd_field *f) {
        const struct kvd_slice *slice = (const void *)((const uint8_t *)msg + f->offset);
        int r;

        r = msgpack_pack_str_with_body(pk, f->name, f->name_size);
        if (r)
                return r;
        if (f->type == KVD_FIELD_str)
                return msgpack_pack_str_with_body(pk, slice->data, slice->size);
        if (f->type == KVD_FIELD_bin)
                return msgpack_pack_bin_with_body(pk, slice->data, slice->size);
        return msgpack_pack_uint64(pk, magnitude(msg, f));
}

static int pack_envelope(msgpack_packer *pk, const struct kvd_msg *msg, int members) {
        return msgpack_pack_array(pk, 3) || msgpack_pack_uint32(pk, msg->number) ||
               msgpack_pack_uint64(pk, msg->serial) || msgpack_pack_map(pk, (size_t)members);
}

ssize_t kvd_msg_encode(const struct kvd_msg *msg, void *frame, size_t size) {
        const struct kvd_msg_info *info = kvd_msg_info(msg->number);
        struct output out = {frame, (uint8_t *)frame + size};
        msgpack_packer pk;
        int members;

        if (!info)
                return -EINVAL;
        members = count_members(msg, info);
        if (members < 0)
                return members;
        msgpack_packer_init(&pk, &out, put);
        if (pack_envelope(&pk, msg, members))
                return -EMSGSIZE;
        for (const struct kvd_field *f = info->fields; f->name; f++)
                if (magnitude(msg, f) && pack_member(&pk, msg, f))
                        return -EMSGSIZE;
        return out.at - (uint8_t *)frame;
}
