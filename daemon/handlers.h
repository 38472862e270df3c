/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_HANDLERS_H
#define KVD_DAEMON_HANDLERS_H

/* One function per request of msg.def. They check what the store does not, call it, and fill in the reply. */

#include "daemon/client.h"

/* handlers_session.c: who and where */
client_handler handle_attach;
client_handler handle_space;
client_handler handle_detach;
client_handler handle_segments;

/* handlers_blocks.c: the cache */
client_handler handle_allocate;
client_handler handle_release;
client_handler handle_seal;
client_handler handle_lease;
client_handler handle_evict;

/* handlers_admin.c: change and look inside */
client_handler handle_space_set;
client_handler handle_space_delete;
client_handler handle_block_map;
client_handler handle_chain_info;
client_handler handle_check;

/* handlers_info.c: figures */
client_handler handle_daemon_info;
client_handler handle_space_info;
client_handler handle_client_info;

#endif
