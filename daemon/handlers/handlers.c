/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of handlers. A row with ATTACHMENT or SPACE for a message without such fields, or with
 * fields of another type, does not compile.
 */

#include "daemon/handlers/handlers.h"

#define FIELD(message, name, type_) \
        __builtin_choose_expr(__builtin_types_compatible_p(typeof(((struct kvd_msg *)NULL) \
                                                                          ->message.name), \
                                                           type_), \
                              offsetof(struct kvd_msg, message.name), (void)0)

#define WITH_NOTHING(message) .needs = NEEDS_NOTHING
#define WITH_ATTACHMENT(message) .needs = NEEDS_ATTACHMENT, .space = FIELD(message, space, uint32_t)
#define WITH_SPACE(message) \
        .needs = NEEDS_SPACE, .space = FIELD(message, space, struct kvd_slice), \
        .domain = FIELD(message, domain, struct kvd_slice)

enum { NONE, FIRST, IDLE };

const struct handler handlers[256] = {
#define KVD_HANDLER(message, needs, flags, worker_for_) \
        [KVD_MSG_##message] = {.handle = handle_##message, \
                               WITH_##needs(message), \
                               .before_attach = flags == FIRST, \
                               .wants_idle = flags == IDLE, \
                               .worker_for = worker_for_},
#include "daemon/handlers/handlers.def"
#undef KVD_HANDLER
};
