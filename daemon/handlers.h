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
client_handler handle_drain;

/* mates.c */
client_handler handle_join;

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
client_handler handle_pins;
client_handler handle_chain_info;
client_handler handle_check;

/* handlers_sequence.c: requests' own tables */
client_handler handle_table;
client_handler handle_append;
client_handler handle_share;
client_handler handle_sync;
client_handler handle_cool;
client_handler handle_revive;
client_handler handle_compact;

/* handlers_method.c: HShare's and BiCache's configurations */
client_handler handle_critical;
client_handler handle_sample;
client_handler handle_sample_done;
client_handler handle_profile;
client_handler handle_summaries;

/* handlers_info.c: figures */
client_handler handle_daemon_info;
client_handler handle_space_info;
client_handler handle_client_info;

#endif
