/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_FILE_H
#define KVD_STORE_FILE_FILE_H

/* The file tier of a store, and what it keeps for a space. */

#include "store/cache/cache.h"
#include "store/disk.h"
#include "store/file/bring.h"
#include "store/file/catalog.h"
#include "store/file/host.h"

#define FETCHES 64u       /* under way at once, of all spaces */
#define FETCH_BLOCKS 512u /* of one: a longer chain is fetched by asking again */
#define FETCH_TOKENS 16384u

struct fetch_step {
        uint32_t place;
        uint64_t sequence;
};

struct fetch {
        struct bringing to;           /* in file->fetches */
        struct file *file;
        uint64_t record;              /* sequence of what it comes behind; 0: the root */
        uint32_t n, at, first_depth;  /* steps; at: those that are done */
        struct fetch_step steps[FETCH_BLOCKS];
        uint32_t tokens[FETCH_TOKENS]; /* of the steps, block_tokens each */
};

struct file_name { /* of a namespace: its id is the hash of this */
        char domain[KVD_NAME_MAX + 1], space[KVD_NAME_MAX + 1];
        struct kvd_shape geometry;
};

#define ERASING 256u /* spaces that are being erased, at once */

struct file_erasing {
        bool wanted, begun;
        int number;          /* in the catalog, once it has begun */
        struct file_name name;
};

struct file_count { /* of one of the files */
        uint64_t hits, misses, wrong, errors, read_bytes, written_bytes;
        uint32_t failing;             /* questions in a row of which it did nothing */
        char why[128];                /* it is off */
};

struct file { /* of a store; all of its files */
        struct store *store;
        enum store_disk_state state;
        struct store_disk_config config;
        void (*wanted)(void *data, bool soon);
        void *data;

        struct catalog catalog;
        uint8_t secret[KVD_SECRET_BYTES];
        uint64_t sequence;            /* of the last record */
        struct {
                uint32_t extent, slot;
        } scan;                       /* where it goes on */

        bool asked;                   /* question is out, at the disk or at a worker */
        bool ready;                   /* ... it was at a worker, and the disk is asked next */
        bool hangs;                   /* ... and no answer is to be expected */
        uint64_t asked_ns;            /* when */
        struct store_disk_question question;
        struct fetch *reading;        /* READ: whose */
        int naming;                   /* NAMESPACE: number in the catalog; FORGET: in erasing */

        struct kvd_list fetches;
        struct fetch *all_fetches;    /* owned; FETCHES */
        uint32_t turn;                /* number of the space that is swept next */
        struct file_erasing erasing[ERASING];
        uint32_t n_erasing;
        uint32_t sweep;               /* place where dead records are looked for next */
        struct store_disk_info info;  /* of all */
        struct file_count counts[DISK_FILES];
        struct host *host;            /* owned; NULL: the pool is in memory of the host */
};

/* evict --to file: all that is there when it begins */
enum file_all { ALL_NOT, ALL_UNDER_WAY, ALL_DONE };

struct file_space {
        struct kvd_key id;
        int number;                   /* of its namespace in the catalog; -1: not known */
        bool named;                   /* id is made */
        bool refused;                 /* the file takes no more namespaces */
        bool unswept;                 /* something changed since its blocks were looked at */
        enum file_all all;            /* under way: what is not admitted goes there, too */
        uint64_t since_ns;            /* it began then: what it found or wrote stays */
        uint64_t left;                /* blocks that did not go */
        uint32_t hand;                /* block to look at next */
        uint32_t looked;              /* ... since something was found */
        uint64_t changes;             /* when it was last marked */
        uint32_t told;                /* place to tell clients of next; CATALOG_NOWHERE: all is */
};

/* What happened at a place is counted here. */
static inline struct file_count *file_count(struct file *file, uint64_t place) {
        return &file->counts[catalog_file(&file->catalog, place) - file->catalog.files];
}
/* Of all files. */
static inline uint64_t file_bytes(const struct file *file) {
        uint64_t bytes = 0;

        for (uint32_t i = 0; i < file->config.n_files; i++)
                bytes += file->config.bytes[i];
        return bytes;
}

static inline struct file_space *file_space_of(const struct space *space) {
        return space->parts.file;
}

/* NULL: there is no file, or it is not on, or the space is not for it. */
struct file *file_for(const struct space *space);
/* The number of its namespace; -1: it has none yet. */
int file_space_number(struct file *file, struct space *space);
void file_want(struct file *file, bool soon);
void file_begin_question(struct file *file, enum store_disk_ask what, struct space *space);
/* May one more block go along? */
bool file_question_is_full(const struct file *file);
void file_question_add(struct file *file, const struct store_disk_item *item);
/* What a worker had of the question is done: the disk is next, or nobody. */
void file_is_ready(struct file *file);
void file_settle(struct file *file, const int32_t *errors, uint32_t n);

/* The record of a resident block: its place, or CATALOG_NOWHERE. */
uint32_t file_record_of(const struct file *file, const struct space *space, uint32_t id);
/* one that went for another is no mark of a use */
void file_forget_stale(const struct file *file, struct space *space, uint32_t id);
void file_note_record(struct space *space, uint32_t id, uint32_t place, uint64_t sequence);

/* demote.c: fills the question with blocks to be written. */
bool demote_next(struct file *file, bool *later);
void demote_done(struct file *file, const int32_t *errors, uint32_t n);

/* fetch.c: with blocks to be read. */
bool fetch_next(struct file *file, bool *later);
void fetch_done(struct file *file, const int32_t *errors, uint32_t n);
void fetches_end(struct file *file, const struct space *space, const struct attachment *a);
void fetches_end_all(struct file *file, bool wait); /* wait: but the one whose answer is awaited */

#endif
