/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_HOOKS_H
#define KVD_STORE_HOOKS_H

/*
 * Events that the parts of the store are told of. A part (a method, a folder) has one row in
 * hooks.c. The cache and the sequences call all rows, in that order, and know no part by name.
 * Every member may be NULL.
 */

#include "ipc/base/sequence.h"
#include "store/core.h"

struct sequence;

struct copy_owner { /* owner of an exact copy */
        uint32_t place, sequence, entry; /* place of the copy, number of the sequence, its entry */
};

struct hooks {
        /* A space's index is laid out: sets the fields that describe what the part needs. */
        void (*lay_out)(const struct space *space, uint64_t max_blocks, struct kvd_index *ix);

        /*
         * A space. If space_begins fails, the space ends at once, so space_ends must accept a
         * half-initialised state.
         */
        int (*space_begins)(struct space *space);
        void (*setting_changed)(struct space *space);
        /* does a piece of deferred work. True: there is more */
        bool (*idle)(struct space *space);
        /* the space was deleted: withdraws its jobs */
        void (*space_leaves)(struct space *space);
        /* frees a piece of the space's memory. True: there is more */
        bool (*space_buried)(struct space *space);
        void (*space_ends)(struct space *space);
        void (*usage)(const struct space *space, struct space_usage *ret); /* the part's figures */

        void (*store_ends)(struct store *store); /* before its spaces do */

        /*
         * An attachment. It stops when its connection is lost, and ends when its process cannot
         * touch memory any more.
         */
        int (*attachment_begins)(struct attachment *a);
        bool (*attachment_stops)(struct attachment *a); /* does a piece. True: there is more */
        void (*attachment_ends)(struct attachment *a);
        /* frees the part's data of the attachment */
        void (*attachment_buried)(struct attachment *a);

        /*
         * Is the part on, and does it read summaries? If any does, summaries.c makes them.
         */
        bool (*reads_summaries)(const struct space *space);

        /* A sequence. */
        void (*sequence_begins)(struct sequence *q);
        /* is work under way that the client waits for? */
        bool (*sequence_pending)(struct sequence *q);
        /* the sequence was closed: withdraws its jobs, and frees the part's data of it */
        void (*sequence_ends)(struct sequence *q);

        /*
         * Exact copies, which may be in a file (file/copies.c). copy_cold finds a copy in memory
         * that is not about to be used: 1: found; 0: none; -EAGAIN: *looks is used up
         * before all copies were looked at. copies_went: copies of the space were written to a
         * file, or could not be. copy_came: a copy was read back; error is 0 or a negative errno,
         * and with -EBADMSG or -EIO the copy is lost. copies_give: frees the memory of copies that
         * are dispensable.
         */
        int (*copy_cold)(struct space *space, uint32_t *looks, struct copy_owner *ret);
        bool (*copy_is_cold)(struct space *space, const struct copy_owner *owner);
        void (*copies_went)(struct space *space);
        void (*copy_came)(struct space *space, const struct copy_owner *owner, int error);
        void (*copies_give)(struct space *space);
        /*
         * For the file tier. copy_made: there is one more copy in memory, or one more that may
         * leave memory. copy_wanted: a copy in a file is needed in memory; 0: copy_came will
         * follow, else an error as for copy_came. copy_erased: a copy in a file has no owner any
         * more.
         */
        void (*copy_made)(struct space *space);
        int (*copy_wanted)(struct space *space, const struct copy_owner *owner);
        void (*copy_erased)(struct space *space, uint32_t record);

        /* The client has taken, or not taken, a proposed change of this kind. */
        enum kvd_change_kind change;
        void (*taken)(struct sequence *q, uint32_t at);
        void (*not_taken)(struct sequence *q, uint32_t at);
};

extern const struct hooks *const store_hooks[]; /* hooks.c; ends with NULL */

/* tell.c: each calls the member with that name in all rows, or until one fails. */
void hooks_lay_out(const struct space *space, uint64_t max_blocks, struct kvd_index *ix);
int hooks_space_begins(struct space *space);
void hooks_setting_changed(struct space *space);
bool hooks_idle(struct space *space);
void hooks_space_leaves(struct space *space);
bool hooks_space_buried(struct space *space);
void hooks_space_ends(struct space *space);
void hooks_store_ends(struct store *store);
void hooks_usage(const struct space *space, struct space_usage *ret);

int hooks_attachment_begins(struct attachment *a);
bool hooks_attachment_stops(struct attachment *a);
void hooks_attachment_ends(struct attachment *a);
void hooks_attachment_buried(struct attachment *a);

bool hooks_reads_summaries(const struct space *space);

void hooks_sequence_begins(struct space *space, struct sequence *q);
bool hooks_sequence_pending(const struct space *space, struct sequence *q);
void hooks_sequence_ends(struct space *space, struct sequence *q);

int hooks_copy_cold(struct space *space, uint32_t *looks, struct copy_owner *ret);
bool hooks_copy_is_cold(struct space *space, const struct copy_owner *owner);
void hooks_copies_went(struct space *space);
void hooks_copy_came(struct space *space, const struct copy_owner *owner, int error);
void hooks_copies_give(struct space *space);
void hooks_copy_made(struct space *space);
int hooks_copy_wanted(struct space *space, const struct copy_owner *owner);
void hooks_copy_erased(struct space *space, uint32_t record);

const struct hooks *hooks_of_change(const struct space *space, enum kvd_change_kind kind);

#endif
