/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What happens to a sequence's blocks besides growing. The daemon proposes, we take or leave: a block that comes is
 * pinned before the one that goes is let go of, and the daemon keeps both in place until it has heard what we did.
 */

#include <errno.h>
#include <string.h>

#include "client/internal.h"

/* ---- changes -------------------------------------------------------------------------------------------------- */

static void let_go(struct kvd_sequence *s, struct kvd_entry *entry) {
        if (entry->data && !(entry->flags & KVD_ENTRY_BORROWED))
                unpin_block(s->view, entry->block);
        entry->data = NULL;
}

/* The entry gets another block, if it is still there. */
static bool put_block(struct kvd_sequence *s, struct kvd_entry *entry, const struct kvd_change *change) {
        uint32_t id = kvd_ref_id(change->ref);

        if (id >= s->view->ix->capacity || view_map_blocks(s->view, &change->ref, 1) < 0 ||
            !pin_block(s->view, change->ref))
                return false;
        let_go(s, entry);
        entry->data = s->view->sealed + (uint64_t)id * s->view->ix->block_bytes;
        entry->block = id;
        entry->generation = kvd_ref_generation(change->ref);
        entry->delta = change->delta;
        return true;
}

static bool apply(struct kvd_sequence *s, const struct kvd_change *change) {
        struct kvd_entry *entry = change->slot < s->n ? &s->entries[change->slot] : NULL;

        if (!entry || entry->flags & KVD_ENTRY_BORROWED)
                return false;
        switch (change->kind) {
        case KVD_CHANGE_REMAP:
        case KVD_CHANGE_ARRIVE:
                if (!put_block(s, entry, change))
                        return false;
                break;
        case KVD_CHANGE_LEAVE:
                let_go(s, entry);
                break;
        default:
                return false;
        }
        if (change->kind == KVD_CHANGE_ARRIVE)
                s->arrived[change->flags & KVD_ENTRY_APPROX ? 1 : 0]++;
        entry->flags = change->flags;
        entry->row = change->row;
        return true;
}

/* ---- sync ------------------------------------------------------------------------------------------------------ */

struct news {
        uint32_t n;
        struct kvd_change changes[KVD_SYNC_CHANGES];
};

static void take_changes(const void *reply, void *to) {
        const struct kvd_slice *from = &((const struct kvd_msg_sync_reply *)reply)->changes;
        struct news *news = to;

        news->n = from->size / (uint32_t)sizeof *news->changes;
        if (news->n > KVD_SYNC_CHANGES)
                news->n = KVD_SYNC_CHANGES;
        if (news->n)
                memcpy(news->changes, from->data, news->n * sizeof *news->changes);
}

static uint32_t sync_epoch(const struct kvd_sequence *s) {
        return atomic_load_explicit((shm_u32 *)&s->view->ix->sync_epoch, memory_order_acquire);
}

int kvd_sequence_sync(struct kvd_sequence *s) {
        uint32_t taken[KVD_SYNC_CHANGES], n_taken = 0, epoch = sync_epoch(s);
        struct kvd_msg_sync request = {.space = s->view->handle, .sequence = s->number};
        struct kvd_msg_sync_reply reply;
        struct news news;
        int changed = 0, r;

        if (epoch == s->seen && !s->lost && view_is_current(s->view))
                return 0;
        do {
                request.taken = (struct kvd_slice){taken, n_taken * (uint32_t)sizeof *taken};
                r = sequence_ask(s, KVD_MSG_sync, &request, &reply, take_changes, &news);
                if (r < 0)
                        return r;
                n_taken = news.n;
                for (uint32_t i = 0; i < news.n; i++)
                        changed += taken[i] = apply(s, &news.changes[i]);
        } while (n_taken);
        s->seen = epoch;
        return changed;
}

/* ---- wishes ---------------------------------------------------------------------------------------------------- */

static int check_slots(const struct kvd_sequence *s, uint32_t n, const uint32_t *slots) {
        for (uint32_t i = 0; i < n; i++)
                if (slots[i] >= s->n)
                        return client_fail(-EINVAL, "the sequence has no entry %u", slots[i]);
        return n > KVD_FRAME_MAX / 16 ? client_fail(-EINVAL, "%u entries at once are too many", n) : 0;
}

int kvd_sequence_step(struct kvd_sequence *s, uint32_t first, uint32_t n) {
        struct kvd_msg_share request = {s->view->handle, s->number, first, n};

        if (n == 0 || first > s->n_tokens || n > s->n_tokens - first)
                return client_fail(-EINVAL, "the sequence has %u tokens, a step of %u from %u is not in it", s->n_tokens,
                                   n, first);
        if (!kvd_setting_on(s->view->ix->settings, KVD_memshare_on) && view_is_current(s->view))
                return 0;
        return sequence_ask(s, KVD_MSG_share, &request, NULL, NULL, NULL);
}

static void take_cooling(const void *reply, void *to) {
        *(uint32_t *)to = ((const struct kvd_msg_cool_reply *)reply)->cooling;
}

int kvd_sequence_cool(struct kvd_sequence *s, uint32_t n, const uint32_t *slots, enum kvd_cool how) {
        struct kvd_msg_cool request = {s->view->handle, s->number, how, {slots, n * (uint32_t)sizeof *slots}};
        struct kvd_msg_cool_reply reply;
        uint32_t cooling = 0;
        int r = check_slots(s, n, slots);

        if (r == 0)
                r = sequence_ask(s, KVD_MSG_cool, &request, &reply, take_cooling, &cooling);
        return r < 0 ? r : (int)cooling;
}

static void take_revived(const void *reply, void *to) {
        const struct kvd_msg_revive_reply *m = reply;

        *(uint32_t *)to = MAX(m->exact, m->approx);
}

int kvd_sequence_revive(struct kvd_sequence *s, uint32_t n, const uint32_t *slots, enum kvd_revive how) {
        struct kvd_msg_revive request = {s->view->handle, s->number, how, {slots, n * (uint32_t)sizeof *slots}};
        struct kvd_msg_revive_reply reply;
        uint32_t coming = 0;
        int r = check_slots(s, n, slots);

        if (r == 0)
                r = sequence_ask(s, KVD_MSG_revive, &request, &reply, take_revived, &coming);
        return r < 0 ? r : (int)coming;
}

/* ---- what attention says ----------------------------------------------------------------------------------------- */

#define BETA 0.1f

static uint16_t average(uint16_t old, float now) {
        float value = (1 - BETA) * (float)old + BETA * 256 * now;

        return value >= UINT16_MAX ? UINT16_MAX : value > 0 ? (uint16_t)(value + 0.5f) : 0;
}

/* Both numbers are one word, so that a reader never sees halves of two updates. */
void kvd_sequence_use(struct kvd_sequence *s, uint32_t slot, float mass, float hits) {
        shm_u32 *words = (shm_u32 *)((uint8_t *)s->view->page + kvd_use_off(s->view->ix->capacity));
        struct kvd_use use;
        uint32_t word;

        if (slot >= s->n || !s->entries[slot].data || forked(s->space->handle))
                return;
        word = atomic_load_explicit(&words[s->entries[slot].block], memory_order_relaxed);
        memcpy(&use, &word, sizeof use);
        use = (struct kvd_use){average(use.mass, mass), average(use.hits, hits)};
        memcpy(&word, &use, sizeof word);
        atomic_store_explicit(&words[s->entries[slot].block], word, memory_order_relaxed);
}

void kvd_sequence_stats(const struct kvd_sequence *s, struct kvd_sequence_stats *ret) {
        *ret = (struct kvd_sequence_stats){.blocks = s->n, .tokens = s->n_tokens, .revived_exact = s->arrived[0],
                                           .revived_approx = s->arrived[1]};
        for (uint32_t i = 0; i < s->n; i++) {
                const struct kvd_entry *e = &s->entries[i];

                ret->resident += e->data != NULL;
                ret->own += (e->flags & KVD_ENTRY_OWN) != 0;
                ret->borrowed += (e->flags & KVD_ENTRY_BORROWED) != 0;
                ret->spilled += (e->flags & KVD_ENTRY_SPILLED) != 0;
                ret->vague += (e->flags & KVD_ENTRY_VAGUE) != 0;
                ret->approximate += (e->flags & KVD_ENTRY_APPROX) != 0;
                ret->dropped += (e->flags & KVD_ENTRY_DROPPED) != 0;
                if (!(e->flags & KVD_ENTRY_SHARED))
                        continue;
                ret->shared++;
                ret->shared_tokens += e->n_tokens;
                ret->bytes_saved += s->view->ix->block_bytes;
        }
}
