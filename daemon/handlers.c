/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/handlers.h"

const struct handler handlers[256] = {
        [KVD_MSG_attach] = {.handle = handle_attach, .before_attach = true},
        [KVD_MSG_space] = {.handle = handle_space, .wants_idle = true},
        [KVD_MSG_detach] = {.handle = handle_detach, .wants_idle = true},
        [KVD_MSG_segments] = {.handle = handle_segments},
        [KVD_MSG_allocate] = {.handle = handle_allocate, .wants_idle = true},
        [KVD_MSG_release] = {.handle = handle_release},
        [KVD_MSG_seal] = {.handle = handle_seal},
        [KVD_MSG_lease] = {.handle = handle_lease},
        [KVD_MSG_evict] = {.handle = handle_evict, .wants_idle = true},
        [KVD_MSG_space_set] = {.handle = handle_space_set, .wants_idle = true},
        [KVD_MSG_space_delete] = {.handle = handle_space_delete, .wants_idle = true},
        [KVD_MSG_daemon_info] = {.handle = handle_daemon_info},
        [KVD_MSG_space_info] = {.handle = handle_space_info},
        [KVD_MSG_client_info] = {.handle = handle_client_info},
        [KVD_MSG_block_map] = {.handle = handle_block_map},
        [KVD_MSG_chain_info] = {.handle = handle_chain_info},
        [KVD_MSG_check] = {.handle = handle_check},
};
