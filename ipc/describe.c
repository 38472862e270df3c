/* SPDX-License-Identifier: Apache-2.0 */

/* The table of messages: msg.def as data, for encoder, decoder and kvctl proto. */

#include "ipc/msg.h"

#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/util.h"

/* Two messages with the same number would give two members with the same name: a compile error. */
struct message_numbers {
#define KVD_MSG_BEGIN(number, name, text) char message_##number;
#define KVD_FIELD(type, message, name, limit, text)
#define KVD_MSG_END(name)
#include "ipc/msg.def"
};

/* The fields of each message, then the messages. */

#define KVD_MSG_BEGIN(number, name, text) static const struct kvd_field name##_fields[] = {
#define KVD_FIELD(type_, message, name_, limit_, text_) \
        {.name = #name_, \
         .text = text_, \
         .limit = limit_, \
         .offset = offsetof(struct kvd_msg, message.name_), \
         .type = KVD_FIELD_##type_, \
         .name_size = sizeof #name_ - 1},
#define KVD_MSG_END(message) \
        { .name = NULL } \
        } \
        ;
#include "ipc/msg.def"

#pragma GCC diagnostic error "-Woverride-init" /* two messages with the same number */

static const struct kvd_msg_info messages[256] = {
#define KVD_MSG_BEGIN(number, name_, text_) \
        [number] = {.name = #name_, \
                    .text = text_, \
                    .fields = name_##_fields, \
                    .n_fields = ARRAY_SIZE(name_##_fields) - 1, \
                    .size = sizeof(struct kvd_msg_##name_)},
#define KVD_FIELD(type, message, name, limit, text)
#define KVD_MSG_END(name)
#include "ipc/msg.def"
};

const struct kvd_msg_info *kvd_msg_info(uint32_t number) {
        if (number >= ARRAY_SIZE(messages) || !messages[number].name)
                return NULL;
        return &messages[number];
}

const char *kvd_field_type_name(enum kvd_field_type type) {
        static const char *const names[] = {[KVD_FIELD_u32] = "u32",
                                            [KVD_FIELD_u64] = "u64",
                                            [KVD_FIELD_str] = "str",
                                            [KVD_FIELD_bin] = "bin"};

        return names[type];
}

struct kvd_slice kvd_slice_of(const char *text) {
        return (struct kvd_slice){text, (uint32_t)strlen(text)};
}

struct kvd_slice kvd_slice_cut(const char *text, uint32_t most) {
        return (struct kvd_slice){text, (uint32_t)strnlen(text, most)};
}

char *kvd_slice_copy(struct kvd_slice slice, char *to, size_t size) {
        size_t n = MIN(slice.size, size - 1);

        if (n)
                memcpy(to, slice.data, n);
        to[n] = 0;
        return to;
}

bool kvd_slice_is(struct kvd_slice slice, const char *text) {
        size_t n = strlen(text);

        return slice.size == n && memcmp(slice.data ?: "", text, n) == 0;
}
