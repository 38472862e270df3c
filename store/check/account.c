/* SPDX-License-Identifier: Apache-2.0 */

/*
 * S16: a space is charged for what it has, and for nothing else. A charge that is not taken back
 * would be lost to the space's domain for ever.
 */

#include "store/account.h"
#include "store/check/check.h"
#include "store/below/prefix.h"
#include "store/file/file.h"
#include "store/keep_inside.h"
#include "store/remote/inside.h"
#include "store/sequence/sequence.h"
#include "store/summaries.h"

static uint64_t n_attachments(const struct space *s) {
        uint64_t n = 0;

        for (uint32_t i = 0; i < s->n_attachments; i++)
                n += s->attachments[i] != NULL;
        return n;
}

static uint64_t n_arenas(const struct space *s) {
        uint64_t n = 0;

        for (const struct arena *arena = s->memory.arenas; arena; arena = arena->next)
                n++;
        return n;
}

static uint64_t n_files(const struct walk *w) {
        const struct space *s = w->space;
        uint64_t n = SPACE_FILES + n_attachments(s) + w->audit->sketches + w->audit->fetches +
                     semaphores_before(s);

        for (uint32_t i = 0; i < s->ix->max_segments; i++)
                if (s->memory.segments[i].file.fd >= 0)
                        n += segment_files(s->ix);
        return n;
}

static uint64_t prefixes_bytes(const struct space *s) {
        uint64_t n = 0;

        for (uint32_t i = 0; i < s->n_attachments; i++)
                n += s->attachments[i] ? prefix_bytes(s->attachments[i]) : 0;
        return n;
}

static uint64_t overhead(const struct walk *w) {
        const struct space *s = w->space;
        const struct sequences *all = sequences_of(s);

        return space_table_bytes(s->ix) + n_arenas(s) * arena_bytes(s->ix) +
               n_attachments(s) * kvd_pinpage_bytes(s->ix) + all->n * sizeof(struct sequence) +
               all->n_entries * sequence_entry_bytes(s) + summaries_bytes(s) +
               (s->parts.remote ? remote_space_bytes(s->ix) : 0) + semaphores_bytes(s) +
               w->audit->fetch_bytes + prefixes_bytes(s) + sessions_bytes(s);
}

static uint64_t kept(const struct space *s) {
        uint64_t n = space_kept_bytes(s);

        for (uint32_t i = 0; i < s->n_attachments; i++)
                n += s->attachments[i] ? attachment_kept_bytes(s->attachments[i]) : 0;
        for (uint32_t i = 0; i < s->ix->max_segments; i++)
                n += s->memory.segments[i].kept;
        return n;
}

static uint64_t all_session_pins(const struct space *s) {
        uint64_t bytes = 0;

        for (uint32_t i = 0; s->leaves.sessions.n && i < STORE_MAX_SESSIONS; i++)
                bytes += session_pins(s, &s->leaves.sessions.at[i]);
        return bytes;
}

void check_charges(struct walk *w) {
        const struct space *s = w->space;
        const uint64_t has[KVD_N_COSTS] = {
                [KVD_COST_pool] = s->memory.n_with_memory * s->ix->segment_bytes,
                [KVD_COST_overhead] = overhead(w),
                [KVD_COST_files] = n_files(w),
                [KVD_COST_spill] = places_of(s)->spill_bytes,
                [KVD_COST_sketches] = w->audit->sketches,
                [KVD_COST_spaces] = 1,
                [KVD_COST_sequences] = sequences_of(s)->n,
                [KVD_COST_leases] = s->leases.n,
                [KVD_COST_kept] = kept(s),
                [KVD_COST_file_names] = s->parts.file && s->parts.file->charged,
                [KVD_COST_sessions] = s->leaves.sessions.n,
                [KVD_COST_session_pins] = all_session_pins(s),
        };

        w->spent += s->ix->max_segments * 10 + s->n_attachments * 100 +
                    s->leaves.sessions.n_used * 20;
        for (uint32_t i = 0; i < KVD_N_COSTS; i++)
                expect(w, has[i] == s->account.used[i],
                       "S16 the space has %llu of cost %u, and is charged for %llu",
                       (unsigned long long)has[i], i, (unsigned long long)s->account.used[i]);
}
