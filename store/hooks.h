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

        /* A sequence. */
        void (*sequence_begins)(struct sequence *q);
        /* is work under way that the client waits for? */
        bool (*sequence_pending)(struct sequence *q);
        /* the sequence was closed: withdraws its jobs, and frees the part's data of it */
        void (*sequence_ends)(struct sequence *q);

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

void hooks_sequence_begins(struct space *space, struct sequence *q);
bool hooks_sequence_pending(const struct space *space, struct sequence *q);
void hooks_sequence_ends(struct space *space, struct sequence *q);

const struct hooks *hooks_of_change(const struct space *space, enum kvd_change_kind kind);

#endif
