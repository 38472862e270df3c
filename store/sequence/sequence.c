/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opens, grows and closes sequences. The methods that work on them are in store/methods; hooks tell
 * these when a sequence begins and ends.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"
#include "store/account.h"
#include "store/hooks.h"
#include "store/sequence/sequence.h"
#include "store/summaries.h"

static int refuse(struct attachment *a, int error, const char *what) {
        return store_refuse(space_store(a->space), error, "sequence in space '%s': %s",
                            space_name(a->space), what);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* entries of one sequence for each block of the space: more than 1, since entries may leave */
#define ENTRIES_PER_BLOCK 4u
/* entries of all sequences for each block of the space: a prefix may be in many sequences */
#define ENTRIES_IN_ALL 16u

static int check_room(struct attachment *a, uint32_t max_blocks) {
        uint64_t most = (uint64_t)space_index(a->space)->capacity * ENTRIES_PER_BLOCK;

        if (!max_blocks)
                return refuse(a, -EINVAL, "it must have room for at least one block");
        if (max_blocks > most)
                return store_refuse(space_store(a->space), -EDQUOT,
                                    "a sequence in space '%s' has at most %llu blocks, not %u",
                                    space_name(a->space), (unsigned long long)most, max_blocks);
        return 0;
}

static uint32_t free_seat(const struct space *space) {
        for (uint32_t i = 0; i < KVD_MAX_SEQUENCES; i++)
                if (!sequences_of(space)->at[i])
                        return i;
        return NONE;
}

/* Memory of an entry is allocated when it is used, and freed with the sequence. */
uint64_t sequence_entry_bytes(const struct space *space) {
        return sizeof(struct entry) + sizeof(struct step) +
               space_block_tokens(space) * sizeof(uint32_t);
}

static void sequence_free(struct sequence *q) {
        if (!q)
                return;
        account_discharge(q->space, KVD_COST_sequences, 1);
        account_discharge(q->space, KVD_COST_overhead,
                          sizeof *q + q->n_entries * sequence_entry_bytes(q->space));
        if (q->entries)
                munmap(q->entries, q->table_bytes);
        free(q);
}

/* The client chooses the size, so the table is mapped: pages are allocated as they are used. */
static bool make_table(struct sequence *q) {
        uint64_t n = q->max_blocks * sequence_entry_bytes(q->space);
        void *at = sys->mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (at == MAP_FAILED)
                return false;
        q->table_bytes = n;
        q->entries = at;
        q->steps = (struct step *)(q->entries + q->max_blocks);
        q->tokens = (uint32_t *)(q->steps + q->max_blocks);
        return true;
}

static int charge(struct space *space) {
        int r = account_charge(space, KVD_COST_sequences, 1);

        if (r < 0)
                return r;
        r = account_charge(space, KVD_COST_overhead, sizeof(struct sequence));
        if (r < 0)
                account_discharge(space, KVD_COST_sequences, 1);
        return r;
}

/* NULL: there is no memory for it; what was charged is given back. */
static struct sequence *sequence_new(struct attachment *a, uint32_t max_blocks) {
        struct sequence *q = sys->calloc(1, sizeof *q);

        if (!q) {
                account_discharge(a->space, KVD_COST_sequences, 1);
                account_discharge(a->space, KVD_COST_overhead, sizeof *q);
                return NULL;
        }
        q->space = a->space;
        q->attachment = a;
        q->max_blocks = max_blocks;
        if (!make_table(q)) {
                sequence_free(q);
                return NULL;
        }
        hooks_sequence_begins(q->space, q);
        return q;
}

int sequence_open(struct attachment *a, uint32_t max_blocks, uint32_t *ret) {
        struct space *space = a->space;
        uint32_t seat = free_seat(space);
        struct sequences *all = sequences_of(space);
        struct sequence *q;
        int r = space_refuse_opaque(space, "sequences");

        if (r == 0)
                r = check_room(a, max_blocks);
        if (r < 0)
                return r;
        if (seat == NONE || a->tenant->n_sequences >= tenant_most(KVD_MAX_SEQUENCES))
                return store_refuse(space_store(space), -EUSERS,
                                    "space '%s' already has %u sequences, the maximum; close some",
                                    space_name(space), KVD_MAX_SEQUENCES);
        r = charge(space);
        if (r < 0)
                return r;
        q = sequence_new(a, max_blocks);
        if (!q)
                return refuse(a, -ENOMEM, "out of memory for its table");
        all->last_incarnation = all->last_incarnation % (UINT32_MAX / KVD_MAX_SEQUENCES - 1) + 1;
        q->number = all->last_incarnation * KVD_MAX_SEQUENCES + seat;
        all->at[seat] = q;
        all->n++;
        a->n_sequences++;
        a->tenant->n_sequences++;
        *ret = q->number;
        return 0;
}

/* ---- growing --------------------------------------------------------------------------------- */

static int check_append(struct attachment *a, const struct sequence *q,
                        const struct append_request *req) {
        const struct kvd_shape *g = space_geometry(a->space);
        uint64_t room = (uint64_t)req->n_blocks * g->block_tokens;

        if (!req->n_blocks || req->n_tokens > room || req->n_tokens + g->block_tokens <= room)
                return refuse(a, -EINVAL, "the number of tokens does not fit the number of blocks");
        if (!req->own && req->n_tokens != room)
                return refuse(a, -EINVAL, "only full blocks can be borrowed");
        for (uint32_t i = 0; i < req->n_tokens; i++)
                if (!kvd_token_is_valid(g, req->tokens[i]))
                        return refuse(a, -EINVAL, "a token id is beyond the vocabulary");
        if (req->n_blocks > q->max_blocks - q->n_entries)
                return refuse(a, -ENOSPC, "its table is full");
        if (sequences_of(a->space)->n_entries + req->n_blocks >
            (uint64_t)space_index(a->space)->capacity * ENTRIES_IN_ALL)
                return refuse(a, -ENOSPC, "all tables of the space together are too long");
        return 0;
}

/* A borrowed block must have these tokens, at this position of the sequence. */
static int check_borrowed(struct attachment *a, const struct sequence *q,
                          const struct append_request *req) {
        struct space *space = a->space;
        uint32_t bt = space_block_tokens(space);
        uint32_t group = q->group;

        for (uint32_t i = 0; i < req->n_blocks; i++) {
                uint32_t id = kvd_ref_id(req->blocks[i]);
                const struct kvd_desc *desc;

                if (!block_current(space, req->blocks[i]) || block_of(space, id)->private)
                        return refuse(a, -ESTALE,
                                      "a block is not in the cache (any more); look up again");
                if (block_of(space, id)->pending || block_of(space, id)->poisoned)
                        return refuse(a, -EAGAIN,
                                      "a block's data is not there (yet); see kvd_check_pin");
                desc = block_desc(space, id);
                if (i == 0 && !q->n_entries)
                        group = desc->group;
                if (desc->group != group || desc->n_tokens != bt ||
                    (uint64_t)desc->depth * bt != q->n_tokens + i * bt)
                        return refuse(a, -EINVAL,
                                      "a borrowed block has another layer group or position");
                if (memcmp(desc->tokens, req->tokens + i * bt, bt * sizeof *req->tokens) != 0)
                        return refuse(a, -EINVAL, "a borrowed block has other tokens");
        }
        return 0;
}

static void add_entry(struct sequence *q, kvd_ref block, uint32_t flags, const uint32_t *tokens,
                      uint32_t n) {
        struct entry *e = &q->entries[q->n_entries++];

        *e = (struct entry){.ref = block,
                            .position = q->n_tokens,
                            .n_tokens = (uint16_t)n,
                            .slots = (uint16_t)n,
                            .place = KVD_NOWHERE,
                            .ordinal = KVD_NO_ORDINAL,
                            .next = NONE};
        memcpy(q->tokens + q->n_tokens, tokens, n * sizeof *tokens);
        q->n_tokens += n;
        sequences_of(q->space)->n_entries++;
        q->n_unscored++;
        entry_set_flags(q, e, flags);
}

static void seal_own(struct sequence *q, kvd_ref block, const uint32_t *tokens, uint32_t n) {
        struct kvd_desc fields = {.depth = q->n_tokens,
                                  .n_tokens = (uint16_t)n,
                                  .group = (uint16_t)q->group,
                                  .flags = KVD_DESC_PRIVATE};
        uint32_t id = kvd_ref_id(block);

        block_fill_end(q->space, id);
        block_seal_private(q->space, id, &fields, tokens);
        block_ref_up(q->space, id);
        add_entry(q, block, KVD_ENTRY_OWN, tokens, n);
        summary_want(q->space, id);
}

int sequence_append(struct attachment *a, uint32_t number, const struct append_request *req,
                    uint32_t *first) {
        struct sequence *q = sequence_find(a, number);
        uint32_t bt = space_block_tokens(a->space);
        int r;

        if (!q)
                return -ENOENT;
        if (!req->own && space_awaits_data(a->space))
                semaphores_look(a->space);
        r = check_append(a, q, req);
        if (r == 0 && req->own && !blocks_filled_by(a, req->blocks, req->n_blocks))
                r = refuse(a, -ESTALE,
                           "a block is not (or no longer) one that this client is filling");
        if (r == 0 && !req->own)
                r = check_borrowed(a, q, req);
        if (r == 0)
                r = account_charge(a->space, KVD_COST_overhead,
                                   req->n_blocks * sequence_entry_bytes(a->space));
        if (r < 0)
                return r;
        *first = q->n_entries;
        if (!req->own && !q->n_entries)
                q->group = block_desc(a->space, kvd_ref_id(req->blocks[0]))->group;
        for (uint32_t i = 0; i < req->n_blocks; i++) {
                uint32_t n = MIN(bt, req->n_tokens - i * bt);

                if (req->own)
                        seal_own(q, req->blocks[i], req->tokens + i * bt, n);
                else
                        add_entry(q, req->blocks[i], KVD_ENTRY_BORROWED, req->tokens + i * bt, n);
        }
        if (req->own)
                space_count(a->space, KVD_SPACE_APPENDED, req->n_blocks);
        return 0;
}

/* ---- closing --------------------------------------------------------------------------------- */

/* The sequence is gone at once; its blocks are released in pieces. */
static void close_one(struct sequence *q) {
        struct space *space = q->space;

        hooks_sequence_ends(space, q);
        sequences_of(space)->at[SEQUENCE_SEAT(q->number)] = NULL;
        sequences_of(space)->n--;
        q->attachment->n_sequences--;
        q->attachment->tenant->n_sequences--;
        q->attachment = NULL;
        q->next = sequences_of(space)->closing;
        sequences_of(space)->closing = q;
        space_is_busy(space);
}

int sequence_close(struct attachment *a, uint32_t number) {
        struct sequence *q = sequence_find(a, number);

        if (!q)
                return -ENOENT;
        close_one(q);
        return 0;
}

#define CLOSE_SEQUENCES 16u /* in one call */

static bool close_some(struct attachment *a) {
        struct sequences *all = sequences_of(a->space);
        uint32_t left = a->n_sequences - MIN(a->n_sequences, CLOSE_SEQUENCES);

        for (uint32_t i = 0; a->n_sequences > left && i < KVD_MAX_SEQUENCES; i++)
                if (all->at[i] && all->at[i]->attachment == a)
                        close_one(all->at[i]);
        return left > 0;
}

#define CLOSE_ENTRIES 1024u             /* entries released in one call */
#define CLOSE_COPIES 256u               /* ... with copies to be erased */
#define CLOSE_BYTES (UINT64_C(2) << 20) /* of exact copies erased in one call */

/* Returns whether a copy was erased. */
static bool let_go(struct sequence *q, struct entry *e) {
        struct space *space = q->space;
        bool erased = e->place != KVD_NOWHERE;

        if (e->busy == OFFERED)
                change_drop_offer(q, e);
        if (e->busy == COMPACT_WANTED)
                entry_drop_room(q, e);
        if (e->ref && !(e->flags & KVD_ENTRY_BORROWED) &&
            block_of(space, kvd_ref_id(e->ref))->private && block_current(space, e->ref))
                block_ref_down(space, kvd_ref_id(e->ref));
        if (erased)
                place_erase(space, e->place);
        entry_set_leaving(q, e, false);
        entry_set_flags(q, e, 0);
        *e = (struct entry){.place = KVD_NOWHERE, .ordinal = KVD_NO_ORDINAL};
        return erased;
}

#define TABLE_PIECE (UINT64_C(4) << 20)

/* Frees pages of a piece of its table, which may have a million. False: all are freed. */
static bool table_goes(struct sequence *q) {
        uint64_t n = MIN(q->table_bytes - q->table_gone, TABLE_PIECE);

        if (n)
                sys->madvise((uint8_t *)q->entries + q->table_gone, n, MADV_DONTNEED);
        q->table_gone += n;
        return n > 0;
}

static bool tidy(struct space *space) {
        struct sequence *q = sequences_of(space)->closing;
        uint64_t bytes = 0, each = MAX(space_block_bytes(space), CLOSE_BYTES / CLOSE_COPIES);

        if (!q)
                return false;
        for (uint32_t i = 0; i < CLOSE_ENTRIES && bytes < CLOSE_BYTES && q->cursor < q->n_entries;
             i++)
                bytes += let_go(q, &q->entries[q->cursor++]) ? each : 0;
        if (q->cursor < q->n_entries || table_goes(q))
                return true;
        sequences_of(space)->closing = q->next;
        sequences_of(space)->n_entries -= q->n_entries;
        sequence_free(q);
        return true;
}

/* ---- of a space ------------------------------------------------------------------------------ */

static int begin(struct space *space) {
        space->parts.sequences = sys->calloc(1, sizeof *sequences_of(space));
        return sequences_of(space) ? 0 : -ENOMEM;
}

/* Frees a piece of one sequence. Its entries are not released, since the whole space is freed. */
static bool bury(struct space *space) {
        struct sequence *q = sequences_of(space)->closing;

        if (!q)
                return false;
        if (table_goes(q))
                return true;
        sequences_of(space)->closing = q->next;
        sequence_free(q);
        return true;
}

static void end(struct space *space) {
        while (sequences_of(space) && bury(space))
                ;
        free(sequences_of(space));
}

static void usage(const struct space *space, struct space_usage *ret) {
        const struct sequences *all = sequences_of(space);

        ret->sequences = all->n;
        ret->shared = all->n_shared;
        ret->spilled = all->n_spilled;
        ret->vague = all->n_vague;
}

const struct hooks sequence_hooks = {.space_begins = begin,
                                     .idle = tidy,
                                     .space_buried = bury,
                                     .space_ends = end,
                                     .usage = usage,
                                     .attachment_stops = close_some};
