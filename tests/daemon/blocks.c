/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/daemon/blocks.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/lib/mark.h"

static const struct kvd_geometry geometry = {.layers = 2,
                                             .kv_heads = 2,
                                             .head_dim = 32,
                                             .block_tokens = 16,
                                             .dtype = KVD_F32,
                                             .vocab = 1000};

#define OK(call) ck_assert_msg((call) >= 0, "%s: %s", #call, kvd_error())
#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})

/* ---- life ------------------------------------------------------------------------------------ */

void user_set(struct user *u, const char *setting) {
        char copy[128], *equals;

        snprintf(copy, sizeof copy, "%s", setting);
        equals = strchr(copy, '=');
        *equals = 0;
        peer_ok(u->peer, MSG(space_set, .space = kvd_slice_of("s"), .key = kvd_slice_of(copy),
                             .value = kvd_slice_of(equals + 1)));
}

void user_open(struct user *u, const char *socket, const char *const settings[]) {
        *u = (struct user){.seed = 1};
        u->peer = peer_attach(socket);
        OK(kvd_open(socket, &u->kvd));
        OK(kvd_space_open(u->kvd, "s", &geometry, NULL, &u->space));
        for (; *settings; settings++)
                user_set(u, *settings);
        OK(kvd_sequence_open(u->space, USER_BLOCKS, &u->sequence));
}

void user_close(struct user *u) {
        kvd_sequence_close(u->sequence);
        kvd_space_close(u->space);
        kvd_close(u->kvd);
        peer_close(u->peer);
}

/* ---- contents -------------------------------------------------------------------------------- */

static float number(uint32_t slot, uint32_t i) {
        uint32_t x = (slot * 7919 + i) * 2654435761u;

        return (float)(int32_t)(x ^ x >> 15) / 2147483648.0f;
}

static void fill(float *to, uint32_t slot) {
        for (uint32_t i = 0; i < kvd_block_bytes(&geometry) / sizeof *to; i++)
                to[i] = number(slot, i);
}

void user_append(struct user *u, uint32_t n) {
        struct kvd_block blocks[USER_BLOCKS];
        uint32_t tokens[USER_BLOCKS * 16], first;

        kvd_sequence_entries(u->sequence, &first);
        for (uint32_t got = 0; got < n;) {
                int r = kvd_alloc(u->space, n - got, blocks + got);

                OK(r);
                got += (uint32_t)r;
        }
        for (uint32_t i = 0; i < n; i++)
                fill((float *)blocks[i].data, first + i);
        for (uint32_t i = 0; i < n * 16; i++)
                tokens[i] = (first * 16 + i) % 1000;
        OK(kvd_sequence_append(u->sequence, n, blocks, tokens, n * 16));
}

/* Each block's bytes are computed once: tests that poll compare all blocks every millisecond. */
static void check_bytes(const struct kvd_entry *entry, uint32_t slot) {
        static float wanted[USER_BLOCKS][4096];
        static bool known[USER_BLOCKS];

        ck_assert_uint_le(kvd_block_bytes(&geometry), sizeof wanted[slot]);
        if (!known[slot])
                fill(wanted[slot], slot);
        known[slot] = true;
        ck_assert_msg(memcmp(entry->data, wanted[slot], kvd_block_bytes(&geometry)) == 0,
                      "entry %u has wrong bytes", slot);
}

uint32_t user_resident(struct user *u) {
        const struct kvd_entry *entries;
        uint32_t n, resident = 0;

        entries = kvd_sequence_entries(u->sequence, &n);
        for (uint32_t i = 0; i < n; i++) {
                if (!entries[i].data)
                        continue;
                resident++;
                if (!(entries[i].flags & (KVD_ENTRY_APPROX | KVD_ENTRY_SHARED)))
                        check_bytes(&entries[i], i);
        }
        return resident;
}

uint32_t user_flags(struct user *u, uint32_t flag) {
        const struct kvd_entry *entries;
        uint32_t n, have = 0;

        entries = kvd_sequence_entries(u->sequence, &n);
        for (uint32_t i = 0; i < n; i++)
                have += !!(entries[i].flags & flag);
        return have;
}

void user_sync(struct user *u) {
        OK(kvd_sequence_sync(u->sequence));
}

/* ---- leaving and coming back ----------------------------------------------------------------- */

static uint32_t all_slots(struct user *u, uint32_t *slots) {
        uint32_t n;

        kvd_sequence_entries(u->sequence, &n);
        for (uint32_t i = 0; i < n; i++)
                slots[i] = i;
        return n;
}

uint32_t user_cool(struct user *u, uint32_t n, const uint32_t *slots, enum kvd_cool how) {
        int r = kvd_sequence_cool(u->sequence, n, slots, how);

        ck_assert_msg(r >= 0 || ((r == -EDQUOT || r == -ENOBUFS) &&
                                 strstr(kvd_error(), "exact copies in memory")),
                      "%s", kvd_error());
        return r < 0 ? 0 : (uint32_t)r;
}

/* The daemon gives up a job that killed two workers, so the request is repeated until it is done. */
void user_spill(struct user *u) {
        uint32_t slots[USER_BLOCKS], n = all_slots(u, slots);

        for (int i = 0; user_resident(u); i++) {
                ck_assert_msg(i < PATIENCE_MS, "%u entries do not leave", user_resident(u));
                if (i % 50 == 0)
                        user_cool(u, n, slots, KVD_COOL_SPILL);
                usleep(1000);
                user_sync(u);
        }
}

void user_revive(struct user *u) {
        uint32_t slots[USER_BLOCKS], n = all_slots(u, slots);

        for (int i = 0; user_resident(u) < n; i++) {
                ck_assert_msg(i < PATIENCE_MS, "%u of %u entries do not come back",
                              n - user_resident(u), n);
                if (i % 50 == 0)
                        OK(kvd_sequence_revive(u->sequence, n, slots, KVD_REVIVE_EXACT));
                usleep(1000);
                user_sync(u);
        }
}

/* ---- the daemon ------------------------------------------------------------------------------ */

struct kvd_msg_daemon_info_reply user_info(struct user *u) {
        return peer_ok(u->peer, MSG(daemon_info)).daemon_info_reply;
}

pid_t user_worker(struct user *u) {
        WAIT_UNTIL(user_info(u).worker != 0);
        return (pid_t)user_info(u).worker;
}

uint64_t user_counter(struct user *u, uint32_t which) {
        struct kvd_slice counters = peer_ok(u->peer, MSG(space_info)).space_info_reply.counters;
        uint64_t value;

        ck_assert_uint_gt(counters.size, which * sizeof value);
        memcpy(&value, (const uint8_t *)counters.data + which * sizeof value, sizeof value);
        return value;
}

void user_check(struct user *u) {
        struct kvd_msg reply = {0};

        do {
                reply = peer_ok(u->peer, MSG(check, .space = kvd_slice_of("s"),
                                             .cursor = reply.check_reply.next));
                ck_assert_msg(reply.check_reply.broken == 0, "%.*s",
                              (int)reply.check_reply.first.size,
                              (const char *)reply.check_reply.first.data);
        } while (reply.check_reply.next);
}
