/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_HANDLERS_SCRATCH_H
#define KVD_DAEMON_HANDLERS_SCRATCH_H

/*
 * Memory for the arrays of one request, copied from its frame to be aligned, and of its reply. It
 * is allocated once, at the start. Each array is as long as msg.def allows its field to be.
 */

#include <assert.h>

#include "ipc/base/degraded.h"
#include "ipc/base/why.h"
#include "ipc/frame.h"
#include "ipc/msg.h"
#include "store/remote_tier.h"

struct scratch {
        uint8_t in[KVD_FRAME_MAX], out[KVD_FRAME_MAX];

        /* arrays.h */
        kvd_ref blocks[KVD_MOST_seal_blocks / sizeof(kvd_ref)];
        uint32_t tokens[KVD_MOST_seal_tokens / sizeof(uint32_t)];
        uint32_t numbers[KVD_MOST_drain_unmapped / sizeof(uint32_t)];

        /* replies */
        kvd_ref sealed[KVD_MOST_seal_reply_blocks / sizeof(kvd_ref)];
        uint8_t states[KVD_MOST_block_map_reply_states];
        /* a frame has room for these and the blocks' states */
        uint32_t parents[KVD_MOST_block_map_reply_parents / sizeof(uint32_t)];
        uint8_t ages[KVD_MOST_block_map_reply_ages];
        uint32_t ids[KVD_MOST_pins_reply_ids / sizeof(uint32_t)];
        uint64_t counters[KVD_N_SPACE_COUNTERS], client_counters[KVD_CLIENT_WORDS];
        uint64_t costs[3][KVD_N_COSTS]; /* used, guaranteed, maximum */
        uint64_t degraded[KVD_N_DEGRADED];
        double settings[KVD_N_SETTINGS];
        struct check_report report;
        struct chain_info chain;
        struct kvd_change changes[KVD_SYNC_CHANGES];
        uint8_t layers[KVD_MOST_critical_reply_layers], heads[KVD_MOST_critical_reply_heads];
        struct profile_report profile;
        struct session_info session;
        struct store_disk_info disk;
        struct store_remote_info remote;
        char tier_why[KVD_MOST_tier_info_reply_why + 1];
        struct kvd_why why;
};

#define SCRATCH_FITS(array, field) \
        static_assert(sizeof((struct scratch *)NULL)->array <= KVD_MOST_##field, \
                      "an answer is longer than its field")
#define SCRATCH_TAKES(array, field) \
        static_assert(sizeof((struct scratch *)NULL)->array >= KVD_MOST_##field, \
                      "a field is longer than its array")
SCRATCH_TAKES(blocks, release_blocks);
SCRATCH_TAKES(blocks, append_blocks);
SCRATCH_TAKES(blocks, compact_scores);
SCRATCH_TAKES(blocks, critical_blocks);
SCRATCH_TAKES(blocks, sample_blocks);
SCRATCH_TAKES(blocks, session_blocks);
SCRATCH_TAKES(tokens, append_tokens);
SCRATCH_TAKES(numbers, sync_taken);
SCRATCH_TAKES(numbers, cool_slots);
SCRATCH_TAKES(numbers, revive_slots);
SCRATCH_FITS(blocks, allocate_reply_blocks);
SCRATCH_FITS(numbers, drain_reply_wanted);
SCRATCH_FITS(counters, space_info_reply_counters);
SCRATCH_FITS(client_counters, space_info_reply_client_counters);
SCRATCH_FITS(degraded, daemon_info_reply_degraded);
SCRATCH_FITS(settings, space_info_reply_settings);
SCRATCH_FITS(chain.head, chain_info_reply_head);
SCRATCH_FITS(changes, sync_reply_changes);
SCRATCH_FITS(profile.depth, profile_reply_depth);
SCRATCH_FITS(profile.samples, profile_reply_samples);
SCRATCH_FITS(profile.similarity, profile_reply_similarity);

#endif
