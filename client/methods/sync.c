/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Changes to a sequence's blocks. The daemon proposes changes, and the client applies or rejects
 * them. The new block is pinned before the old one is released, and the daemon keeps both until it
 * is told which changes were applied.
 */

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client/internal.h"
#include "ipc/base/summary.h"
#include "ipc/base/sys.h"

/* ---- changes --------------------------------------------------------------------------------- */

static void let_go(struct kvd_sequence *s, struct kvd_entry *entry) {
        if (entry->data && !(entry->flags & KVD_ENTRY_BORROWED))
                unpin_block(s->view, entry->block);
        entry->data = NULL;
}

/* The caller has pinned the block. */
static void place_block(const struct kvd_sequence *s, struct kvd_entry *entry,
                        const struct kvd_change *change) {
        uint32_t id = kvd_ref_id(change->ref);

        entry->data = s->view->sealed + (uint64_t)id * s->view->ix->block_bytes;
        entry->block = id;
        entry->generation = kvd_ref_generation(change->ref);
        entry->delta = change->kind == KVD_CHANGE_COMPACT ? 0 : change->delta;
}

/* Gives the entry another block, unless that block is gone. */
static bool put_block(struct kvd_sequence *s, struct kvd_entry *entry,
                      const struct kvd_change *change) {
        uint32_t id = kvd_ref_id(change->ref);

        if (id >= s->view->ix->capacity || view_map_blocks(s->view, &change->ref, 1) < 0 ||
            !pin_block(s->view, change->ref))
                return false;
        let_go(s, entry);
        place_block(s, entry, change);
        return true;
}

static void place_row(struct kvd_entry *entry, const struct kvd_change *change) {
        bool told = change->kind == KVD_CHANGE_LEAVE || change->kind == KVD_CHANGE_ARRIVE;

        entry->row = change->row;
        entry->row_generation = told ? change->row_generation : kvd_ref_generation(change->ref);
}

/* Initial use of a block that was requested and came back. Attention updates it later. */
static const struct kvd_use asked_for = {.mass = 256, .hits = 256};

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
        case KVD_CHANGE_LEAVE: let_go(s, entry); break;
        default: return false;
        }
        if (change->kind == KVD_CHANGE_ARRIVE) {
                s->arrived[change->flags & KVD_ENTRY_APPROX ? 1 : 0]++;
                use_begin(s, entry->block, asked_for);
        }
        entry->flags = change->flags;
        place_row(entry, change);
        return true;
}

/* ---- a compaction: all of it or nothing ------------------------------------------------------ */

static bool may_pack(const struct kvd_sequence *s, const struct kvd_change *change) {
        const struct kvd_entry *entry = change->slot < s->n ? &s->entries[change->slot] : NULL;

        return change->kind == KVD_CHANGE_COMPACT && entry && entry->data &&
               !(entry->flags & KVD_ENTRY_BORROWED) &&
               change->n_tokens <= s->space->geometry.block_tokens &&
               (!change->ref || kvd_ref_id(change->ref) < s->view->ix->capacity);
}

static bool pin_packed(struct kvd_sequence *s, const struct kvd_change *change) {
        return !change->ref ||
               (view_map_blocks(s->view, &change->ref, 1) == 0 && pin_block(s->view, change->ref));
}

static bool pin_all(struct kvd_sequence *s, const struct kvd_change *changes, uint32_t n) {
        uint32_t i = 0;

        while (i < n && may_pack(s, &changes[i]) && pin_packed(s, &changes[i]))
                i++;
        if (i == n)
                return true;
        while (i-- > 0)
                if (changes[i].ref)
                        unpin_block(s->view, kvd_ref_id(changes[i].ref));
        return false;
}

static bool apply_compaction(struct kvd_sequence *s, const struct kvd_change *changes, uint32_t n) {
        if (!pin_all(s, changes, n))
                return false;
        for (uint32_t i = 0; i < n; i++) {
                const struct kvd_change *change = &changes[i];
                struct kvd_entry *entry = &s->entries[change->slot];

                let_go(s, entry);
                if (change->ref) {
                        place_block(s, entry, change);
                        entry->n_tokens = change->n_tokens;
                        use_begin(s, entry->block, (struct kvd_use){0});
                }
                entry->flags = change->flags;
                place_row(entry, change);
        }
        return true;
}

/* Number of changes, from the first of n on, that are applied or rejected together. */
static uint32_t group(const struct kvd_change *changes, uint32_t n) {
        if (changes->kind != KVD_CHANGE_COMPACT || changes->delta < 0 ||
            (uint32_t)changes->delta >= n)
                return 1;
        return (uint32_t)changes->delta + 1;
}

static bool apply_group(struct kvd_sequence *s, const struct kvd_change *changes, uint32_t n) {
        return changes->kind == KVD_CHANGE_COMPACT ? apply_compaction(s, changes, n) :
                                                     apply(s, changes);
}

/* Returns how many changes were applied; taken[i]: whether changes[i] was. */
static int apply_all(struct kvd_sequence *s, const struct kvd_change *changes, uint32_t n,
                     uint32_t *taken) {
        int changed = 0;

        for (uint32_t i = 0, k; i < n; i += k) {
                bool yes;

                k = group(changes + i, n - i);
                yes = apply_group(s, changes + i, k);
                for (uint32_t j = i; j < i + k; j++)
                        changed += (int)(taken[j] = yes);
        }
        return changed;
}

/* ---- sync ------------------------------------------------------------------------------------ */

struct news {
        struct kvd_sequence *sequence;
        bool pending;
        uint32_t n;
        struct kvd_change changes[KVD_SYNC_CHANGES];
};

static void take_news(const void *reply, void *to) {
        const struct kvd_msg_sync_reply *m = reply;
        struct news *news = to;

        news->pending = m->pending;
        news->sequence->copy_bytes = m->copy_bytes;
        news->sequence->sketch_bytes = m->sketch_bytes;
        news->n = MIN(m->changes.size / (uint32_t)sizeof *news->changes, KVD_SYNC_CHANGES);
        if (news->n)
                memcpy(news->changes, m->changes.data, news->n * sizeof *news->changes);
}

static uint32_t epoch_of(const shm_u32 *epoch) {
        return atomic_load_explicit(epoch, memory_order_acquire);
}

/*
 * Requests and applies changes until there are no more, and adds their number to *changed.
 * *pending: something that the sequence requested is not complete.
 */
static int take_over(struct kvd_sequence *s, int *changed, bool *pending) {
        uint32_t taken[KVD_SYNC_CHANGES], n_taken = 0, epoch = epoch_of(&s->view->ix->sync_epoch);
        struct kvd_msg_sync request = {.space = s->view->handle, .sequence = s->number};
        struct news news = {.sequence = s};
        struct kvd_msg_sync_reply reply;
        int r;

        do {
                request.taken = (struct kvd_slice){taken, n_taken * (uint32_t)sizeof *taken};
                r = sequence_ask(s, KVD_MSG_sync, &request, &reply, take_news, &news);
                if (r < 0)
                        return r;
                n_taken = news.n;
                *changed += apply_all(s, news.changes, news.n, taken);
                if (news.n)
                        pins_moved(s->view);
        } while (n_taken);
        s->seen = epoch;
        *pending = news.pending;
        return 0;
}

int kvd_sequence_sync(struct kvd_sequence *s) {
        bool pending;
        int changed = 0, r = space_check(s->space);

        if (r < 0)
                return r;
        if (epoch_of(&s->view->ix->sync_epoch) == s->seen && !s->lost && view_is_current(s->view))
                return 0;
        r = take_over(s, &changed, &pending);
        return r < 0 ? r : changed;
}

/* ---- waiting --------------------------------------------------------------------------------- */

#define PAUSE_FIRST_NS UINT64_C(500000)
/* the death of a daemon wakes no waiter: it is noticed after this time */
#define PAUSE_MOST_NS UINT64_C(8000000)

/* The daemon's table of the sequence ends with the connection: a new one does not have it. */
static bool daemon_is_gone(struct kvd_sequence *s) {
        struct kvd *handle = s->space->handle;
        bool gone;

        if (handle_lock(handle) < 0)
                return false; /* not known */
        gone = !conn_has_peer(handle->conn) || handle->epoch != s->view->epoch;
        handle_unlock(handle);
        return gone;
}

static int gone(struct kvd_sequence *s) {
        s->lost = true;
        return client_fail(-ESTALE,
                           "the sequence belongs to a daemon that is gone; open a new one");
}

static void sleep_until_moved(const struct kvd_sequence *s, uint32_t epoch, uint64_t ns) {
        const struct timespec pause = {0, (long)ns};

        syscall(SYS_futex, &s->view->ix->job_epoch, FUTEX_WAIT, epoch, &pause, NULL, 0);
}

int kvd_sequence_wait(struct kvd_sequence *s, uint64_t timeout_ns) {
        uint64_t now = sys_now_ns(),
                 deadline = timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
        uint64_t pause = PAUSE_FIRST_NS;
        int changed = 0, r;

        if (space_check(s->space) < 0)
                return -ECHILD;
        for (;;) {
                uint32_t epoch = epoch_of(&s->view->ix->job_epoch);
                bool pending;

                deadline_begin(); /* for this round */
                if (daemon_is_gone(s))
                        return gone(s);
                r = take_over(s, &changed, &pending);
                if (r < 0)
                        return daemon_is_gone(s) ? gone(s) : r;
                if (!pending)
                        return changed;
                now = sys_now_ns();
                if (now >= deadline)
                        return client_fail(
                                -ETIMEDOUT,
                                "something that the sequence asked for is still under way");
                sleep_until_moved(s, epoch, MIN(pause, deadline - now));
                pause = MIN(2 * pause, PAUSE_MOST_NS);
        }
}

/* ---- requests -------------------------------------------------------------------------------- */

static int check_slots(const struct kvd_sequence *s, uint32_t n, const uint32_t *slots) {
        for (uint32_t i = 0; i < n; i++)
                if (slots[i] >= s->n)
                        return client_fail(-EINVAL, "the sequence has no entry %u", slots[i]);
        return n > KVD_FRAME_MAX / 16 ? client_fail(-EINVAL, "%u entries at once are too many", n) :
                                        0;
}

int kvd_sequence_step(struct kvd_sequence *s, uint32_t first, uint32_t n) {
        struct kvd_msg_share request = {s->view->handle, s->number, first, n};

        if (space_check(s->space) < 0)
                return -ECHILD;
        if (n == 0 || first > s->n_tokens || n > s->n_tokens - first)
                return client_fail(-EINVAL,
                                   "the sequence has %u tokens, a step of %u from %u is not in it",
                                   s->n_tokens, n, first);
        if (!kvd_setting_on(s->view->ix->settings, KVD_memshare_on) && view_is_current(s->view))
                return 0;
        return sequence_call(s, KVD_MSG_share, &request, NULL, NULL, NULL);
}

static void take_cooling(const void *reply, void *to) {
        *(uint32_t *)to = ((const struct kvd_msg_cool_reply *)reply)->cooling;
}

int kvd_sequence_cool(struct kvd_sequence *s, uint32_t n, const uint32_t *slots,
                      enum kvd_cool how) {
        struct kvd_msg_cool request = {s->view->handle,
                                       s->number,
                                       how,
                                       {slots, n * (uint32_t)sizeof *slots}};
        struct kvd_msg_cool_reply reply;
        uint32_t cooling = 0;
        int r = check_slots(s, n, slots);

        if (r == 0)
                r = sequence_call(s, KVD_MSG_cool, &request, &reply, take_cooling, &cooling);
        return r < 0 ? r : (int)cooling;
}

static void take_revived(const void *reply, void *to) {
        const struct kvd_msg_revive_reply *m = reply;

        *(uint32_t *)to = MAX(m->exact, m->approx);
}

int kvd_sequence_revive(struct kvd_sequence *s, uint32_t n, const uint32_t *slots,
                        enum kvd_revive how) {
        struct kvd_msg_revive request = {s->view->handle,
                                         s->number,
                                         how,
                                         {slots, n * (uint32_t)sizeof *slots}};
        struct kvd_msg_revive_reply reply;
        uint32_t coming = 0;
        int r = check_slots(s, n, slots);

        if (r == 0)
                r = sequence_call(s, KVD_MSG_revive, &request, &reply, take_revived, &coming);
        return r < 0 ? r : (int)coming;
}

static void take_packed(const void *reply, void *to) {
        *(uint32_t *)to = ((const struct kvd_msg_compact_reply *)reply)->entries;
}

/* Zero blocks would mean in the message that no scores are given. */
static int check_scores(const struct kvd_sequence *s, const struct kvd_scores *scores,
                        uint32_t most) {
        if (scores->n_blocks == 0)
                return client_fail(-EINVAL, "scores are given, but no block that holds them");
        if (scores->n_blocks > most)
                return client_fail(-E2BIG, "scores in %u blocks; the maximum is %u",
                                   scores->n_blocks, most);
        return space_check(s->space);
}

int kvd_sequence_compact(struct kvd_sequence *s, uint32_t first, uint32_t n, uint32_t keep,
                         const struct kvd_scores *scores) {
        struct kvd_msg_compact request = {s->view->handle, s->number, first, n, keep, {0}};
        struct kvd_msg_compact_reply reply;
        kvd_ref refs[KVD_MOST_compact_scores / sizeof(kvd_ref)];
        uint32_t entries = 0;
        int r = scores ? check_scores(s, scores, ARRAY_SIZE(refs)) : 0;

        if (n == 0 || first > s->n || n > s->n - first)
                return client_fail(-EINVAL, "the sequence has %u entries, not %u from %u on", s->n,
                                   n, first);
        if (r == 0 && scores)
                r = filling_refs(s->view, scores->n_blocks, scores->blocks, refs);
        if (r < 0)
                return r;
        if (scores)
                request.scores = (struct kvd_slice){refs,
                                                    scores->n_blocks * (uint32_t)sizeof *refs};
        r = sequence_call(s, KVD_MSG_compact, &request, &reply, take_packed, &entries);
        return r < 0 ? r : (int)entries;
}
