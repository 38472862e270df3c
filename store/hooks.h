/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_HOOKS_H
#define KVD_STORE_HOOKS_H

/*
 * What the parts of the store are told of. A part (a method, a room) has one row of these in
 * hooks.c; the cache and the sequences call all rows, in that order, and know none of them by name.
 * Every member may be NULL.
 */

#include "ipc/base/sequence.h"
#include "store/core.h"

struct sequence;

struct copy_owner { /* of an exact copy */
        uint32_t place, sequence, entry; /* sequence: its number */
};

struct hooks {
        /* A space's index is laid out: how much of it the part needs. */
        void (*lay_out)(const struct space *space, uint64_t max_blocks, struct kvd_index *ix);

        /*
         * A space. If space_begins fails, the space ends at once; so space_ends takes a half-made
         * state.
         */
        int (*space_begins)(struct space *space);
        void (*setting_changed)(struct space *space);
        /* does a piece of what can wait. True: there is more */
        bool (*idle)(struct space *space);
        /* finds out what has come, before blocks are evicted or borrowed */
        void (*look)(struct space *space);
        /* it was deleted: withdraws what it asked for */
        void (*space_leaves)(struct space *space);
        /* frees a piece of its memory. True: there is more */
        bool (*space_buried)(struct space *space);
        void (*space_ends)(struct space *space);
        void (*usage)(const struct space *space, struct space_usage *ret); /* the part's figures */

        /*
         * A space that goes on from the daemon before. inherit: the semaphores of that life; *fd is
         * taken if that works. was_reached: by whoever wrote there. inherited: clients and blocks
         * have been taken over.
         */
        int (*inherit)(struct space *space, uint32_t life, int *fd);
        bool (*was_reached)(const struct space *space, uint32_t life, uint32_t semaphore,
                            uint64_t value);
        void (*inherited)(struct space *space);

        void (*store_ends)(struct store *store); /* before its spaces do */

        /*
         * An attachment. It stops when its connection is lost, and ends when its process cannot
         * touch memory any more.
         */
        int (*attachment_begins)(struct attachment *a);
        bool (*attachment_stops)(struct attachment *a); /* a piece. True: there is more */
        void (*attachment_ends)(struct attachment *a);
        /* True: its seat cannot be another's yet */
        bool (*attachment_lingers)(const struct attachment *a);
        /* frees what the part keeps for it */
        void (*attachment_buried)(struct attachment *a);

        /*
         * A block. promise: the seal names data that is still to come; -EINVAL with a word for it.
         */
        int (*promise)(struct attachment *a, const struct seal_request *q, struct kvd_desc *fields,
                       const char **why);
        /* before it is SEALED */
        void (*promised)(struct attachment *a, uint32_t id, const struct kvd_desc *fields);
        /* it is sealed and its data is there; if space->parts.watched */
        void (*readable)(struct space *space, uint32_t id);
        /* 0 to 1, for policies that go by it */
        double (*worth)(const struct space *space, uint32_t id);

        /*
         * Is it on, and does it read the summaries of blocks? Then they are made
         * (methods/summaries.c).
         */
        bool (*reads_summaries)(const struct space *space);

        /* A sequence. */
        void (*sequence_begins)(struct sequence *q);
        /* is something under way that its client waits for? */
        bool (*sequence_pending)(struct sequence *q);
        /* it was closed: withdraws what it asked for */
        void (*sequence_ends)(struct sequence *q);
        void (*sequence_buried)(struct sequence *q);        /* frees what the part keeps for it */

        /*
         * An exact copy, which may be in a file (file/copies.c). copy_cold: one in memory that
         * nobody is about to use: 1; 0: there is none; -EAGAIN: the looks are spent, and not all
         * were looked at. copies_went: some of the space's went to a file, or could not. copy_came:
         * 0, or a negative errno, of which -EBADMSG and -EIO say that the copy is lost.
         * copies_give: those that can be done without make room in memory.
         */
        int (*copy_cold)(struct space *space, uint32_t *looks, struct copy_owner *ret);
        bool (*copy_is_cold)(struct space *space, const struct copy_owner *owner);
        void (*copies_went)(struct space *space);
        void (*copy_came)(struct space *space, const struct copy_owner *owner, int error);
        void (*copies_give)(struct space *space);
        /*
         * ... and what the files are told: there is one more in memory, or one more there that can be
         * done without; one in a file is wanted in memory (0: copy_came follows; or as copy_came
         * says); one in a file is nobody's any more.
         */
        void (*copy_made)(struct space *space);
        int (*copy_wanted)(struct space *space, const struct copy_owner *owner);
        void (*copy_erased)(struct space *space, uint32_t record);

        /*
         * A change of this kind that was offered to a client, when the client has taken it or not.
         */
        enum kvd_change_kind change;
        void (*taken)(struct sequence *q, uint32_t at);
        void (*not_taken)(struct sequence *q, uint32_t at);
};

extern const struct hooks *const store_hooks[]; /* hooks.c; NULL ends it */

/* tell.c: each calls the member of that name in all rows, until one fails where it can. */
void hooks_lay_out(const struct space *space, uint64_t max_blocks, struct kvd_index *ix);
int hooks_space_begins(struct space *space);
void hooks_setting_changed(struct space *space);
bool hooks_idle(struct space *space);
void hooks_look(struct space *space);
void hooks_space_leaves(struct space *space);
bool hooks_space_buried(struct space *space);
void hooks_space_ends(struct space *space);
void hooks_store_ends(struct store *store);
void hooks_usage(const struct space *space, struct space_usage *ret);

int hooks_inherit(struct space *space, uint32_t life, int *fd);
bool hooks_was_reached(const struct space *space, uint32_t life, uint32_t semaphore,
                       uint64_t value);
void hooks_inherited(struct space *space);

int hooks_attachment_begins(struct attachment *a);
bool hooks_attachment_stops(struct attachment *a);
void hooks_attachment_ends(struct attachment *a);
bool hooks_attachment_lingers(const struct attachment *a);
void hooks_attachment_buried(struct attachment *a);

int hooks_promise(struct attachment *a, const struct seal_request *q, struct kvd_desc *fields,
                  const char **why);
void hooks_promised(struct attachment *a, uint32_t id, const struct kvd_desc *fields);
void hooks_readable(struct space *space, uint32_t id);
bool hooks_reads_summaries(const struct space *space);
double hooks_worth(const struct space *space, uint32_t id);

void hooks_sequence_begins(struct space *space, struct sequence *q);
bool hooks_sequence_pending(const struct space *space, struct sequence *q);
void hooks_sequence_ends(struct space *space, struct sequence *q);
void hooks_sequence_buried(struct space *space, struct sequence *q);

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
