/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_SEQUENCE_SEQUENCE_H
#define KVD_STORE_SEQUENCE_SEQUENCE_H

/*
 * A sequence inside the store. An entry is resident (it names a block), or has left (an exact copy,
 * tokens in a sketch, or neither). Beside that it is idle or busy with one thing, and in one list
 * while it waits:
 *
 *      IDLE ─cool──► COOL_WANTED ──► COOLING ─────┐                         ┌─taken──► applied
 *      IDLE ─revive► REVIVE_WANTED ► REVIVING ────┼──► OFFERED (a change) ──┤
 *                     ▲─► FETCHING (its copy is in a file)                  │
 *      IDLE ─compact COMPACT_WANTED► COMPACTING ──┤                         │
 *      IDLE ─────────COMPARE's answer─────────────┘                         └─not────► undone
 *      applied or undone, and tokens in a sketch that should not be: FORGET_WANTED ──► FORGETTING ──► IDLE
 *
 * Who owns what: an entry owns its copy's place, and the ordinals of its tokens in a sketch. A
 * place that a worker is writing is the job's until it has the answer. A block that is offered is
 * held, and gets its reference when taken.
 */

/* enum kvd_entry_flags: what a table says is the public word for it */
#include "client/kvd_methods.h"
#include "ipc/base/job.h"
#include "ipc/base/sequence.h"
#include "store/hooks.h"
#include "store/job.h"
#include "store/tier/tier.h"

enum entry_busy {
        IDLE,
        COOL_WANTED,
        COOLING,
        REVIVE_WANTED,
        REVIVING,
        FORGET_WANTED,
        FORGETTING,
        COMPACT_WANTED,
        COMPACTING,
        FETCHING, /* to be revived: its copy is in a file, and comes */
        OFFERED,
};

struct entry {
        kvd_ref ref;           /* resident block; 0: it has left */
        uint64_t checksum;     /* of the exact copy */
        /* of the block that it was made of, which the copy's row of the summaries has, too */
        uint32_t row_generation;
        uint32_t position;     /* of its first token */
        uint32_t place;        /* of its exact copy; KVD_NOWHERE */
        uint32_t sketch;       /* number, if ordinal is set */
        uint32_t ordinal;      /* of its first token there; KVD_NO_ORDINAL */
        uint32_t sketch_next, sketch_prev; /* entries of the same sketch; NONE */
        uint16_t n_tokens;     /* of the sequence that it stands for */
        uint16_t slots;        /* ... and slots of its block in use: others, if it is compact */
        uint16_t flags;        /* enum kvd_entry_flags */
        uint8_t busy;
        /* COOL_WANTED, COOLING: enum kvd_cool; REVIVE_WANTED, REVIVING: enum kvd_revive */
        uint8_t want;
        bool leaving;          /* counted in sequences_of(space)->n_leaving */
        bool summarised;       /* the exact copy's row was copied along */
        /* it has left, and its flags changed since the client heard of them */
        bool untold;
        bool sent;             /* OFFERED: the client has heard of it */
        uint16_t score;        /* KeyDiff's, 1 to 65535; 0: not known */
        uint16_t priority;     /* as priority_rank found it */
        float value;           /* ... on its way there */

        uint8_t change;        /* OFFERED: enum kvd_change_kind */
        uint16_t new_flags, new_slots;
        int32_t new_delta;
        float distance;
        uint32_t next, prev;   /* in one of the lists */
        /*
         * OFFERED: the block that the change brings, held; 0: none. COMPACT_WANTED:
         * keydiff_compact.c
         */
        kvd_ref other;
};

struct list { /* of entries */
        uint32_t first, last, n;
};

struct step { /* MemShare */
        uint32_t first_token, n_tokens;
        uint32_t first_entry, n_entries; /* blocks wholly inside */
        uint64_t number;                 /* among the steps of the space */
        bool wanted;                     /* to be compared with older ones */
};

struct sketch {
        struct sketch *next;
        uint32_t number;
        int fd;                /* owned */
        uint64_t bytes;
        uint32_t rows, columns;
        uint32_t n_ordinals;   /* given out */
        uint32_t n_tokens;     /* that weigh on it: put in and not taken out */
        uint32_t n_entries;    /* that have ordinals in it */
        uint32_t first;        /* ... one of them, if there is any */
        bool broken;           /* a worker was lost while it wrote: to be made anew */
};

struct sequence {
        struct space *space;
        struct attachment *attachment; /* NULL: it is closed */
        struct sequence *next; /* in sequences_of(space)->closing */
        uint32_t number;       /* its seat, and its incarnation above that */
        uint32_t group;
        uint32_t max_blocks;
        uint32_t n_entries, n_tokens, n_steps;
        uint64_t table_gone;   /* closed: bytes whose pages were given back already, of */
        uint64_t table_bytes;  /* ... one owned mapping: */
        struct entry *entries; /* max_blocks */
        struct step *steps;    /* max_blocks */
        uint32_t *tokens;      /* max_blocks x block_tokens */

        struct list changes;   /* offered; the first n_sent of them went out with the last answer */
        uint32_t n_sent;
        struct list cool, revive, forget, compact; /* entries that wait for a worker */
        struct ticket cooling, reviving, forgetting, rebuilding, comparing, scoring, compacting;
        uint32_t keep;         /* tokens that each head keeps of those in compact, or in the job */

        struct sketch *sketches; /* owned; newest first */
        struct sketch *sketch_found; /* one of them: what was looked for last; or NULL */
        uint32_t n_own;        /* resident entries of its own that are not shared */
        uint32_t n_leaving;    /* entries that are */
        uint32_t n_copies;     /* entries that have an exact copy, resident or not */
        uint32_t n_fetching;   /* entries that are */
        uint32_t compared;     /* step of the COMPARE job in flight */
        uint32_t n_compared;   /* steps before it are not wanted */
        uint32_t n_again;      /* steps behind the first and before this one are, once more */
        bool swapped;          /* entries were asked to make way for those in revive */
        bool passed;           /* relief had it compared again, in this time of need */
        /* ... and found nothing to let go when n_own was this; 0: did not look */
        uint32_t spent;
        struct ranked {        /* keydiff_priority.c: the piece of its entries that was ranked last */
                uint32_t from, to;
                uint32_t in_vain; /* entries ranked since one of them left */
        } ranked;
        uint32_t unsummarised; /* entry where summaries.c looks next for one without a summary */
        uint32_t n_summarised; /* ... and found one in each, so many in a row */
        uint32_t n_unscored;   /* entries that came since the last scoring */
        uint32_t cursor;       /* closed: next entry to let go */
        struct critical *critical; /* owned; see hshare.c */
};

struct sequences { /* of a space */
        struct sequence *at[KVD_MAX_SEQUENCES]; /* owned; by seat */
        struct sequence *closing;  /* owned; their blocks are being let go */
        uint32_t n, last_incarnation;
        uint64_t n_entries;        /* of all tables */
        uint64_t n_shared, n_spilled, n_vague, n_leaving; /* entries */

        /* copies.c */
        bool has_clean;            /* there may be copies of entries that are resident again */
        uint32_t clean_sequence, clean_entry; /* ... where they are looked for next */
        uint64_t clean_looks;      /* ... in vain, so far */
        uint32_t cold_sequence, cold_entry; /* those whose copies may go to a file: as above */
        uint64_t cold_looks;
};

static inline struct sequences *sequences_of(const struct space *space) {
        return space->parts.sequences;
}

#define SEQUENCE_SEAT(number) ((number) % KVD_MAX_SEQUENCES)

/* entry.c */
/* NULL, with a reason */
/* of a table's memory: for each entry (store/account.c) */
uint64_t sequence_entry_bytes(const struct space *space);
struct sequence *sequence_find(struct attachment *attachment, uint32_t number);
void entry_set_flags(struct sequence *sequence, struct entry *entry, uint32_t flags);
void entry_set_leaving(struct sequence *sequence, struct entry *entry, bool leaving);
bool entry_is_own(const struct entry *entry); /* resident, filled by this sequence, not shared */
/* whose tokens contain it, or n_entries */
uint32_t sequence_entry_at(const struct sequence *sequence, uint32_t token);

void list_push(struct sequence *sequence, struct list *list, uint32_t at);
void list_push_first(struct sequence *sequence, struct list *list, uint32_t at);
void list_remove(struct sequence *sequence, struct list *list, uint32_t at); /* it is in there */
uint32_t list_pop(struct sequence *sequence, struct list *list); /* or NONE */

int sequence_check_entries(struct attachment *attachment, const struct sequence *sequence,
                           uint32_t how,
                           /* of requests to cool and to revive */
                           const uint32_t *entries, uint32_t n);

/* its block is its own no longer */
void entry_drop_block(struct sequence *sequence, struct entry *entry);
/* the offered block becomes its own */
void entry_take_block(struct sequence *sequence, struct entry *entry);
/* COMPACT_WANTED: gives back what waits */
void entry_drop_room(struct sequence *sequence, struct entry *entry);

/*
 * A block that a worker has filled for an entry. flags: KVD_DESC_APPROX, or KVD_DESC_COMPACT: each
 * head has its tokens.
 */
void entry_seal(struct sequence *sequence, kvd_ref block, uint32_t at, uint32_t n_tokens,
                uint32_t flags);

/* change.c: proposals to the client */
struct offer {
        enum kvd_change_kind kind;
        kvd_ref block;     /* 0: none; held from here on */
        int32_t delta;
        uint32_t flags;    /* of the entry, if it is taken */
        uint32_t slots;    /* COMPACT: in use */
        float distance;
};
void change_offer(struct sequence *sequence, uint32_t at, const struct offer *offer);
void change_drop_offer(struct sequence *sequence, struct entry *entry); /* the sequence closes */
/* false: the client has heard of it */
bool change_withdraw(struct sequence *sequence, uint32_t at);
/* offers what the client was not told, if it is idle */
void change_tell(struct sequence *sequence, uint32_t at);

/* copies.c */
/* for one more; gives up copies of resident entries for it */
bool copies_have_room(struct space *space);
uint32_t copy_take(struct space *space); /* a place, or KVD_NOWHERE */
/* hooks: for the files (file/copies.c) */
int copies_cold(struct space *space, uint32_t *looks, struct copy_owner *ret);
bool copies_are_cold(struct space *space, const struct copy_owner *owner);
void copies_room_again(struct space *space);
void copies_give_up(struct space *space);
void copies_clean(struct space *space); /* a copy is of a resident entry now: it may be given up */
void entry_erase_copy(struct sequence *sequence, struct entry *entry);

#endif
