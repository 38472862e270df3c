/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_IPC_MSG_H
#define KVD_IPC_MSG_H

/*
 * The messages of msg.def as C: numbers, structs, descriptions, one encoder and one decoder.
 *
 *      struct kvd_msg m = {.number = KVD_MSG_allocate, .serial = 7, .allocate = {.space = 1, .count = 64}};
 *      n = kvd_msg_encode(&m, frame, sizeof frame);
 *
 * str and bin members point into the frame that they were decoded from, and are valid as long as it
 * is. Only kvd_decoder_new allocates.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define KVD_PROTOCOL 12u
#define KVD_REPLY 128u /* number of a reply = number of the request + KVD_REPLY */

struct kvd_slice {
        const void *data;
        uint32_t size;
};

struct kvd_slice kvd_slice_of(const char *text);
struct kvd_slice kvd_slice_cut(const char *text, uint32_t most); /* cut to `most` bytes */
/* Copies a str, cut to size - 1 bytes, and appends a NUL. Returns to. */
char *kvd_slice_copy(struct kvd_slice slice, char *to, size_t size);
bool kvd_slice_is(struct kvd_slice slice, const char *text);

enum kvd_msg_number {
#define KVD_MSG_BEGIN(number, name, text) KVD_MSG_##name = number,
#define KVD_FIELD(type, message, name, limit, text)
#define KVD_MSG_END(name)
#include "ipc/msg.def"
};

/* The maximum length of each str and bin in bytes, for example KVD_MOST_seal_tokens. */
#define KVD_MOST_OF_u32(message, name, limit)
#define KVD_MOST_OF_u64(message, name, limit)
#define KVD_MOST_OF_str(message, name, limit) KVD_MOST_##message##_##name = limit,
#define KVD_MOST_OF_bin(message, name, limit) KVD_MOST_##message##_##name = limit,
enum {
#define KVD_MSG_BEGIN(number, name, text)
#define KVD_FIELD(type, message, name, limit, text) KVD_MOST_OF_##type(message, name, limit)
#define KVD_MSG_END(name)
#include "ipc/msg.def"
};

typedef uint32_t kvd_field_u32;
typedef uint64_t kvd_field_u64;
typedef struct kvd_slice kvd_field_str;
typedef struct kvd_slice kvd_field_bin;

#define KVD_MSG_BEGIN(number, name, text) struct kvd_msg_##name {
#define KVD_FIELD(type, message, name, limit, text) kvd_field_##type name;
#define KVD_MSG_END(name) \
        } \
        ;
#include "ipc/msg.def"

struct kvd_msg {
        uint32_t number; /* enum kvd_msg_number */
        uint64_t serial;
        union {
#define KVD_MSG_BEGIN(number, name, text) struct kvd_msg_##name name;
#define KVD_FIELD(type, message, name, limit, text)
#define KVD_MSG_END(name)
#include "ipc/msg.def"
        };
};

/* ---- description ----------------------------------------------------------------------------- */

enum kvd_field_type { KVD_FIELD_u32, KVD_FIELD_u64, KVD_FIELD_str, KVD_FIELD_bin };

struct kvd_field {
        const char *name; /* NULL: end of the array */
        const char *text;
        uint64_t limit;  /* largest value or length */
        uint32_t offset; /* in struct kvd_msg */
        uint8_t type;    /* enum kvd_field_type */
        uint8_t name_size;
};

struct kvd_msg_info {
        const char *name; /* NULL: there is no such message */
        const char *text;
        const struct kvd_field *fields;
        uint32_t n_fields;
        uint32_t size; /* bytes of its struct */
};

/* NULL if there is no message with that number. */
const struct kvd_msg_info *kvd_msg_info(uint32_t number);
const char *kvd_field_type_name(enum kvd_field_type type);

/* ---- encode and decode ----------------------------------------------------------------------- */

/*
 * Writes a frame, without the members that are 0 or empty. Returns the frame's size in bytes;
 * -EMSGSIZE: it does not fit; -EINVAL: unknown message, or a member exceeds its limit.
 */
ssize_t kvd_msg_encode(const struct kvd_msg *msg, void *frame, size_t size);

struct kvd_decoder; /* scratch memory for decoding, reused for every frame */
int kvd_decoder_new(struct kvd_decoder **ret);
struct kvd_decoder *kvd_decoder_free(struct kvd_decoder *decoder);
void kvd_decoder_freep(struct kvd_decoder **decoder);

/*
 * Decodes a frame from a peer. Returns 0, or an error that kvd_decoder_why() explains in one line:
 * -EBADMSG: not a message at all (number and serial are 0); -ENOSYS: the number is unknown;
 * -EINVAL: a field is unknown, has the wrong type, or exceeds its limit. With -ENOSYS and -EINVAL,
 * number and serial are valid, so that the request can be answered, and the rest is 0.
 */
int kvd_msg_decode(struct kvd_decoder *decoder, const void *frame, size_t size,
                   struct kvd_msg *ret);
const char *kvd_decoder_why(const struct kvd_decoder *decoder);

#endif
