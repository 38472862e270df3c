/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_SEQUENCE_SEQUENCE_H
#define KVD_STORE_SEQUENCE_SEQUENCE_H

/*
 * A sequence inside the store. An entry is resident (it names a block), or has left (it has an
 * exact copy, tokens in a sketch, or neither). In addition it is idle or busy with one operation,
 * and it is in one list while it waits:
 *
 *      IDLE ─cool──► COOL_WANTED ──► COOLING ─────┐                         ┌─taken──► applied
 *      IDLE ─revive► REVIVE_WANTED ► REVIVING ────┼──► OFFERED (a change) ──┤
 *                     ▲─► FETCHING (its copy is in a file)                  │
 *      IDLE ─compact COMPACT_WANTED► COMPACTING ──┤                         │
 *      IDLE ─────────COMPARE's answer─────────────┘                         └─not────► undone
 *      applied or undone, and tokens must leave a sketch: FORGET_WANTED ──► FORGETTING ──► IDLE
 *
 * Ownership: an entry owns the place of its exact copy, and the ordinals of its tokens in a sketch.
 * A job owns the place that its worker writes until the worker has answered. An offered block is
 * held, and gets its reference when the change is taken.
 */

/* for enum kvd_entry_flags, which clients see, too */
#include "client/kvd_methods.h"
#include "ipc/base/job.h"
#include "ipc/base/sequence.h"
#include "store/below/place.h"
#include "store/job.h"

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
        FETCHING, /* to be revived: its copy is being read from a file */
        OFFERED,
};

struct entry {
        kvd_ref ref;       /* resident block; 0 if it has left */
        uint64_t checksum; /* of the exact copy */
        /* generation of the block that was copied; also in the copy's row of the summaries */
        uint32_t row_generation;
        uint32_t position; /* of its first token, in tokens */
        /* of its exact copy, or reserved for that (COOL_WANTED); KVD_NOWHERE if none */
        uint32_t place;
        uint32_t sketch;  /* number of its sketch, if ordinal is set */
        uint32_t ordinal; /* of its first token in the sketch; KVD_NO_ORDINAL if none */
        uint32_t sketch_next, sketch_prev; /* entries of the same sketch; NONE if none */
        uint16_t n_tokens;                 /* tokens of the sequence that it stands for */
        uint16_t slots; /* slots of its block in use; differs from n_tokens if compact */
        uint16_t flags; /* enum kvd_entry_flags */
        uint8_t busy;   /* enum entry_busy */
        /* COOL_WANTED, COOLING: enum kvd_cool; REVIVE_WANTED, REVIVING: enum kvd_revive */
        uint8_t want;
        bool leaving;    /* counted in sequences_of(space)->n_leaving */
        bool summarised; /* the exact copy has a row of the summaries */
        /* its flags changed after it left, and the client was not told yet */
        bool untold;
        bool sent;         /* OFFERED: the offer was sent to the client */
        uint16_t score;    /* of JOB_SCORE, 1 to 65535; 0 if not known */
        uint16_t priority; /* result of priority_rank */
        float value;       /* its intermediate sum */

        uint8_t change; /* OFFERED: enum kvd_change_kind */
        uint16_t new_flags, new_slots;
        int32_t new_delta;
        float distance;
        uint32_t next, prev; /* in one of the lists */
        /*
         * OFFERED: held block that the change brings, or 0. COMPACT_WANTED: room for the packed
         * block, or 0 (compact.c).
         */
        kvd_ref other;
};

struct copy_owner {                      /* owner of an exact copy */
        uint32_t place, sequence, entry; /* place of the copy, number of the sequence, its entry */
};

struct list { /* of entries */
        uint32_t first, last, n;
};

struct step { /* of reasoning */
        uint32_t first_token, n_tokens;
        uint32_t first_entry, n_entries; /* entries wholly inside */
        uint64_t number;                 /* among the steps of the space */
        bool wanted;                     /* to be compared with older steps */
        bool again;   /* once more, when its last blocks are no longer the newest */
        bool counted; /* as compared */
};

struct sketch {
        struct sketch *next;
        uint32_t number;
        int fd; /* owned */
        uint64_t bytes;
        uint32_t rows, columns;
        uint32_t n_ordinals; /* ordinals given out */
        uint32_t n_tokens;   /* tokens in it: added and not taken out */
        uint32_t n_entries;  /* entries with ordinals in it */
        uint32_t first;      /* one of these, if n_entries > 0 */
        bool broken;         /* a worker was lost while it wrote: must be rebuilt */
};

struct sequence {
        struct space *space;
        struct attachment *attachment; /* NULL: it is closed */
        struct sequence *next;         /* in sequences_of(space)->closing */
        uint32_t number;               /* incarnation * KVD_MAX_SEQUENCES + seat */
        uint32_t group;
        uint32_t max_blocks;
        uint32_t n_entries, n_tokens, n_steps;
        uint64_t table_gone;   /* closed: bytes of the table whose pages were freed already */
        uint64_t table_bytes;  /* size of one owned mapping, which has these arrays: */
        struct entry *entries; /* max_blocks */
        struct step *steps;    /* max_blocks */
        uint32_t *tokens;      /* max_blocks x block_tokens */

        struct list changes; /* offers; the first n_sent of them were in the last answer */
        uint32_t n_sent;
        struct list cool, revive, forget, compact; /* entries that wait for a worker */
        struct ticket cooling, reviving, forgetting, rebuilding, comparing, scoring, compacting;
        uint32_t keep;         /* compaction: tokens that each head keeps, over all its entries */
        struct scores *scores; /* owned; the client's for it; or NULL (compact.c) */

        struct sketch *sketches;     /* owned; newest first */
        struct sketch *sketch_found; /* result of the last search among these; or NULL */
        uint32_t n_own;              /* resident entries of its own that are not shared */
        uint32_t n_leaving;          /* entries that are leaving */
        uint32_t n_copies;           /* entries that have the place of an exact copy */
        uint32_t n_fetching;         /* entries that are FETCHING */
        uint32_t compared;           /* step of the COMPARE job in flight */
        uint32_t n_compared;         /* steps before this one need not be compared */
        uint32_t n_again;            /* steps 1 to n_again - 1 are compared once more */
        bool swapped;                /* other entries were asked to make room for those in revive */
        bool passed;                 /* relief has had it compared again during this shortage */
        /* n_own at the last fruitless search of relief; 0 if not searched yet */
        uint32_t spent;
        struct ranked { /* priority.c: the range of entries that was ranked last */
                uint32_t from, to;
                uint32_t in_vain; /* entries ranked since one of them left */
        } ranked;
        uint32_t unsummarised; /* entry at which summaries.c continues to look for missing rows */
        uint32_t n_summarised; /* consecutive entries without a missing row */
        uint32_t n_unscored;   /* entries added since the last scoring */
        uint32_t cursor;       /* closed: next entry to release */
        struct critical *critical; /* owned; its sharing configuration */
};

struct sequences {                              /* of a space */
        struct sequence *at[KVD_MAX_SEQUENCES]; /* owned; by seat */
        struct sequence *closing; /* owned; closed, but their entries are not released yet */
        uint32_t n, last_incarnation;
        uint64_t n_entries;                               /* of all tables */
        uint64_t n_shared, n_spilled, n_vague, n_leaving; /* entries */

        /* entry_copies.c */
        bool has_clean; /* there may be copies of entries that are resident again */
        uint32_t clean_sequence, clean_entry; /* where the search for these continues */
        uint64_t clean_looks;                 /* looks since the last one was found */
        uint32_t cold_sequence, cold_entry;   /* the same for copies that may go to a file */
        uint64_t cold_looks;
};

static inline struct sequences *sequences_of(const struct space *space) {
        return space->parts.sequences;
}

#define SEQUENCE_SEAT(number) ((number) % KVD_MAX_SEQUENCES)

/* sequence.c: bytes of a table for each entry (store/account.c) */
uint64_t sequence_entry_bytes(const struct space *space);

/* entry.c; `at` is the index of an entry */
/* NULL if the attachment has no such sequence; store_why() says so */
struct sequence *sequence_find(struct attachment *attachment, uint32_t number);
void entry_set_flags(struct sequence *sequence, struct entry *entry, uint32_t flags);
void entry_set_leaving(struct sequence *sequence, struct entry *entry, bool leaving);
bool entry_is_own(const struct entry *entry); /* resident, filled by this sequence, not shared */
/* the entry that has this token of the sequence, or n_entries */
uint32_t sequence_entry_at(const struct sequence *sequence, uint32_t token);

void list_push(struct sequence *sequence, struct list *list, uint32_t at);
void list_push_first(struct sequence *sequence, struct list *list, uint32_t at);
void list_remove(struct sequence *sequence, struct list *list, uint32_t at); /* must be in it */
uint32_t list_pop(struct sequence *sequence, struct list *list);             /* or NONE */

/* checks the arguments of a request to cool or revive entries; 0 or -EINVAL */
int sequence_check_entries(struct attachment *attachment, const struct sequence *sequence,
                           uint32_t how, const uint32_t *entries, uint32_t n);

/* the entry gives up its block */
void entry_drop_block(struct sequence *sequence, struct entry *entry);
/* replaces its block by the offered one */
void entry_take_block(struct sequence *sequence, struct entry *entry);
/* COMPACT_WANTED: frees the room for the packed block */
void entry_drop_room(struct sequence *sequence, struct entry *entry);

/*
 * Seals a block that a worker has filled for an entry. flags: 0, KVD_DESC_APPROX, or
 * KVD_DESC_COMPACT (each head has tokens of its own).
 */
void entry_seal(struct sequence *sequence, kvd_ref block, uint32_t at, uint32_t n_tokens,
                uint32_t flags);

/* change.c: proposals to the client */
struct offer {
        enum kvd_change_kind kind;
        kvd_ref block; /* 0 if none; held while it is offered */
        int32_t delta;
        uint32_t flags; /* flags of the entry once the change is taken */
        uint32_t slots; /* COMPACT: slots in use */
        float distance;
};
void change_offer(struct sequence *sequence, uint32_t at, const struct offer *offer);
void change_drop_offer(struct sequence *sequence, struct entry *entry); /* the sequence closes */
/* false: there is no offer, or it was sent already */
bool change_withdraw(struct sequence *sequence, uint32_t at);
/* if the entry is idle, offers flags that the client was not told */
void change_tell(struct sequence *sequence, uint32_t at);

/* entry_copies.c */
/* is there room for one more copy? Frees copies of resident entries if necessary */
bool copies_have_room(struct space *space);
uint32_t copy_take(struct space *space); /* a place, or KVD_NOWHERE */
void copies_clean(struct space *space);  /* an entry with a copy is resident again */
void entry_place(struct sequence *sequence, struct entry *entry, uint32_t place);
void entry_erase_copy(struct sequence *sequence, struct entry *entry);
/* it is not revived */
void revival_refused(struct sequence *sequence, uint32_t at);
/* the copy is damaged, so it is never used */
void copy_broken(struct sequence *sequence, uint32_t at);

/* for the file tier, which moves copies to a file and back (file/cold_copies.c) */
/*
 * Finds a copy in memory that is not about to be used. 1: found; 0: none; -EAGAIN: *looks is used
 * up before all copies were looked at.
 */
int copies_cold(struct space *space, uint32_t *looks, struct copy_owner *ret);
bool copies_are_cold(struct space *space, const struct copy_owner *owner);
/* copies of the space were written to a file, or could not be: others may find room */
void copies_room_again(struct space *space);
/*
 * A copy was read back, or was not: error is 0 or a negative errno. With -EBADMSG or -EIO the copy
 * is lost.
 */
void copy_came(struct space *space, const struct copy_owner *owner, int error);

#endif
