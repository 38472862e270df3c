/* SPDX-License-Identifier: Apache-2.0 */

/*
 * spaces: all spaces. Each is a row, with its geometry, its size and the methods that are on.
 */

#include <inttypes.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/layout.h"
#include "ipc/base/settings.h"
#include "tools/kvctl/map.h"

static const struct column space_columns[] = {
        {"name", "SPACE", UNIT_NONE},
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"shape", "SHAPE", UNIT_NONE},
        {"kind", NULL, UNIT_NONE},
        {"keys", NULL, UNIT_NONE},
        {"policy", "POLICY", UNIT_NONE},
        {"isolation", NULL, UNIT_NONE},
        {"geometry.layers", NULL, UNIT_COUNT},
        {"geometry.kv_heads", NULL, UNIT_COUNT},
        {"geometry.head_dim", NULL, UNIT_COUNT},
        {"geometry.block_tokens", NULL, UNIT_COUNT},
        {"geometry.layer_groups", NULL, UNIT_COUNT},
        {"geometry.dtype", NULL, UNIT_NONE},
        {"geometry.order", NULL, UNIT_NONE},
        {"geometry.rope", NULL, UNIT_NONE},
        {"geometry.state_width", NULL, UNIT_COUNT},
        {"geometry.vocab", NULL, UNIT_COUNT},
        {"geometry.fingerprint", NULL, UNIT_NONE},
        {"geometry.layout", NULL, UNIT_NONE},
        {"block_bytes", "BLOCK", UNIT_BYTES},
        {"max_blocks", "MOST", UNIT_COUNT},
        {"capacity", NULL, UNIT_COUNT},
        {"index_bytes", NULL, UNIT_BYTES},
        {"segment_bytes", NULL, UNIT_BYTES},
        {"segments", NULL, UNIT_COUNT},
        {"blocks.total", "BLOCKS", UNIT_COUNT},
        {"blocks.sealed", NULL, UNIT_COUNT},
        {"blocks.held", "HELD", UNIT_COUNT},
        {"blocks.evictable", "EVICTABLE", UNIT_COUNT},
        {"blocks.filling", "FILLING", UNIT_COUNT},
        {"blocks.free", "FREE", UNIT_COUNT},
        {"blocks.limbo", NULL, UNIT_COUNT},
        {"blocks.leaves", NULL, UNIT_COUNT},
        {"blocks.private", NULL, UNIT_COUNT},
        {"blocks.shared", NULL, UNIT_COUNT},
        {"blocks.spilled", NULL, UNIT_COUNT},
        {"blocks.vague", NULL, UNIT_COUNT},
        {"blocks.pending", NULL, UNIT_COUNT},
        {"blocks.poisoned", NULL, UNIT_COUNT},
        {"runs", NULL, UNIT_COUNT},
        {"leases", NULL, UNIT_COUNT},
        {"clients", "CLIENTS", UNIT_COUNT},
        {"tokens_reused", "REUSED", UNIT_SHARE},
        {"methods", "METHODS", UNIT_NONE},
        {"sequences", NULL, UNIT_COUNT},
        {"spill_slots", NULL, UNIT_COUNT},
        {"label_bytes", NULL, UNIT_BYTES},
        {"copy_bytes", NULL, UNIT_BYTES},
        {"sketch_bytes", NULL, UNIT_BYTES},
};

static void fill_settings(struct table *t, const struct kvd_msg_space_info_reply *info,
                          const struct kvd_shape *g) {
        if (kvd_shape_is_opaque(g))
                table_format(t, "%.31s x %u", g->layout, g->block_tokens);
        else
                table_format(t, "%ux%ux%u %s x %u", g->layers, g->kv_heads, g->head_dim,
                             kvd_enum_word(KVD_ENUM_dtype, g->dtype), g->block_tokens);
        table_string(t, kvd_enum_word(KVD_ENUM_kind, info->kind));
        table_string(t, kvd_enum_word(KVD_ENUM_keys, info->keys));
        table_string(t, kvd_enum_word(KVD_ENUM_policy, info->policy));
        table_string(t, info->arena ? "arena" : "shared");
}

static void fill_geometry(struct table *t, const struct kvd_shape *g) {
        bool opaque = kvd_shape_is_opaque(g);

        table_number(t, g->layers);
        table_number(t, g->kv_heads);
        table_number(t, g->head_dim);
        table_number(t, g->block_tokens);
        table_number(t, g->layer_groups);
        table_string(t, opaque ? NULL : kvd_enum_word(KVD_ENUM_dtype, g->dtype));
        table_string(t, opaque ? NULL : kvd_enum_word(KVD_ENUM_order, g->order));
        table_string(t, opaque ? NULL : kvd_enum_word(KVD_ENUM_rope, g->rope));
        table_number(t, g->state_width);
        table_number(t, g->vocab);
        table_format(t, "%016" PRIx64 "%016" PRIx64, g->fingerprint[1], g->fingerprint[0]);
        if (opaque)
                table_format(t, "%.31s", g->layout);
        else
                table_string(t, NULL);
}

static void fill_blocks(struct table *t, const struct kvd_msg_space_info_reply *info,
                        struct map_sums sums) {
        table_fields(t, 8, KVD_MSG_space_info_reply, info);
        table_number(t, sums.held);
        table_number(t, sums.evictable);
        table_fields(t, 13, KVD_MSG_space_info_reply, info);
}

static bool is_method_on(const struct kvd_msg_space_info_reply *info, unsigned which) {
        double value = 0;

        if (strcmp(kvd_setting_info(which)->name, "on") == 0 &&
            info->settings.size >= (which + 1) * sizeof value)
                memcpy(&value, (const uint8_t *)info->settings.data + which * sizeof value,
                       sizeof value);
        return value != 0 && which != KVD_pressure_on;
}

/* Names of the methods that are on. */
static void fill_methods(struct table *t, const struct kvd_msg_space_info_reply *info) {
        char names[128] = "";
        size_t n = 0;

        for (unsigned i = 0; i < KVD_N_SETTINGS; i++)
                if (is_method_on(info, i))
                        n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", n ? "," : "",
                                              kvd_setting_info(i)->method);
        table_string(t, n ? names : NULL);
        table_fields(t, 5, KVD_MSG_space_info_reply, info);
}

static void fill_space(struct table *t, const struct kvd_msg_space_info_reply *info,
                       struct map_sums sums) {
        struct kvd_shape geometry = {0};

        if (info->geometry.size == sizeof geometry)
                memcpy(&geometry, info->geometry.data, sizeof geometry);
        table_fields(t, 2, KVD_MSG_space_info_reply, info);
        fill_settings(t, info, &geometry);
        fill_geometry(t, &geometry);
        fill_blocks(t, info, sums);
        table_share(t, (double)counter_at(info->client_counters, KVD_CLIENT_TOKENS_FOUND),
                    (double)counter_at(info->client_counters, KVD_CLIENT_TOKENS_ASKED));
        fill_methods(t, info);
}

int add_spaces(struct kvctl *kvctl, struct answer *answer) {
        _cleanup_(maps_clear) struct maps maps = {0};
        struct kvd_msg_space_info_reply info;
        uint32_t cursor = 0;
        struct table *t;
        int r = maps_read(kvctl, false, &maps);

        if (r < 0)
                return r;
        t = ANSWER_ROWS(answer, "spaces", space_columns);
        if (!t)
                return kvctl_out_of_memory(kvctl);
        while ((r = kvctl_next_space(kvctl, &cursor, &info)) == 1)
                fill_space(t, &info, maps_sum(&maps, &info));
        if (r == 0 && table_rows(t) == 0)
                answer_say(
                        answer,
                        "No spaces yet: \"kvctl space create\" or an engine's first use makes one.");
        return r;
}

int verb_spaces(struct kvctl *kvctl, struct answer *answer) {
        return add_spaces(kvctl, answer);
}
