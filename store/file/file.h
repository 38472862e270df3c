/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_FILE_H
#define KVD_STORE_FILE_FILE_H

/* The file tier of a store, and what it keeps for a space. */

#include "store/cache/cache.h"
#include "store/disk.h"
#include "store/file/bring.h"
#include "store/file/catalog.h"
#include "store/file/host.h"
#include "store/file/set.h"

/* ROOM: it has a block, and is asked for when its file is asked next; HERE: it has come */
enum fetch_step_state { FETCH_WANTED, FETCH_ROOM, FETCH_ASKED, FETCH_HERE };

struct fetch_step {
        uint64_t sequence;
        kvd_ref block;                /* held, unless it is wanted */
        uint32_t place;
        enum fetch_step_state state;
};

struct fetch {
        struct bringing to;           /* in file->fetches */
        struct file *file;
        uint64_t record;              /* sequence of what it comes behind; 0: the root */
        uint64_t root;                /* of its records */
        uint32_t n, at, first_depth;  /* steps; at: those that are done */
        uint32_t taken;               /* ... those that are more than wanted */
        uint32_t under_way;           /* questions */
        struct fetch_step *steps;     /* behind this struct */
        uint32_t *tokens;             /* ... behind the steps, block_tokens for each */
};

struct file_name { /* of a namespace: its id is the hash of this */
        char domain[KVD_NAME_MAX + 1], space[KVD_NAME_MAX + 1];
        struct kvd_shape geometry;
        uint64_t kind; /* hashed, too, unless it is causal */
};

#define ERASING 256u /* spaces that are being erased, at once */

struct file_erasing {
        bool wanted, begun;
        int number;          /* in the catalog, once it has begun */
        uint64_t serial;     /* ... of the first superblock without it */
        struct file_name name;
};

struct file_count { /* of one of the files */
        uint64_t hits, misses, wrong, errors, read_bytes, written_bytes;
        uint64_t copies_written, copies_read, copies_lost;
        int last_error;               /* of errors; 0: there was none */
        uint32_t failing;             /* questions in a row of which it did nothing */
        char why[128];                /* it is off, or what else there is to say */
};

/* One of the files: what its process is asked, a question at a time, and no other waits for it. */
struct file_disk {
        enum store_disk_state state;  /* OPENING, SCANNING, ON or OFF */
        bool open;                    /* its process has it open */
        bool hangs;                   /* no answer is to be expected, or none has come since */
        uint64_t told, telling;       /* serials of its superblock, and of the one to be; 0: none */
        uint32_t extent, slot;        /* where its scan goes on */
        bool asked;                   /* a question is out, at its process or at a worker */
        bool ready;                   /* there is one, and its process is asked next */
        uint64_t asked_ns;            /* when */
        struct store_disk_question question; /* any but SUPER */
        struct fetch *reading;        /* READ: whose */
        bool awaited;                 /* a fetch is next, once it may begin (host_may_begin) */
        struct kvd_list wanted;       /* spaces with copies that are to be read there */
        bool copies_last;             /* blocks are next */
        uint32_t reads_in_a_row;      /* questions for fetches since writing last had a turn */
        struct file_count count;
        uint64_t read_ns, write_ns;
};

/* Makes questions of exact copies, which disks.c knows by this alone. */
struct file_copies {
        void (*next)(struct file *file, uint32_t disk, bool *later);
        void (*done)(struct file *file, uint32_t disk, const int32_t *errors, uint32_t n);
        void (*miss)(struct file *file, uint32_t disk); /* nothing comes from there */
};

struct file { /* of a store; all of its files */
        struct store *store;
        enum store_disk_state state;
        struct store_disk_config config;
        void (*wanted)(void *data, bool soon);
        void *data;

        struct set set;
        struct catalog catalog;
        struct file_disk *disks;      /* owned; config.n_files */
        uint64_t sequence;            /* of the last record */
        struct store_disk_question tell; /* SUPER: for whom is asked now */
        struct file_super super;      /* ... and what */

        struct space *owners[FILE_NAMESPACES]; /* by their number; NULL: deleted */
        struct kvd_list fetches;      /* owned */
        struct fetch_step steps[KVD_FETCH_BLOCKS]; /* of a fetch that may begin */
        uint32_t turn;                /* number of the space that is swept next */
        uint32_t prefix[KVD_FETCH_TOKENS]; /* a bidirectional one, while it is looked at */
        struct file_erasing erasing[ERASING];
        uint32_t n_erasing;
        uint32_t sweep;               /* place where dead records are looked for next */
        struct store_disk_info info;  /* of all */
        struct host *host;            /* owned; NULL: the pool is in memory of the host */
        const struct file_copies *copies;
        uint32_t copies_turn;         /* number of the space whose copies are looked at next */
        uint64_t copies_go;           /* bytes of copies that are being written */
};

/* evict --to file: all that is there when it begins */
enum file_all { ALL_NOT, ALL_UNDER_WAY, ALL_DONE };

struct file_wanted { /* copies that are to be read from a file, in this order */
        struct kvd_list_node node;    /* in its disk's, while there are any */
        struct space *space;
        uint64_t since_ns;            /* there has been no memory for them; 0: there may be */
        uint32_t first, last;
};

struct file_space {
        struct kvd_key id;
        int number;                   /* of its namespace in the catalog; -1: not known */
        bool named;                   /* id is made */
        bool refused;                 /* the file takes no more namespaces */
        bool charged;                 /* ... for having one: KVD_COST_file_names */
        bool unswept;                 /* something changed since its blocks were looked at */
        enum file_all all;            /* under way: what is not admitted goes there, too */
        uint64_t since_ns;            /* it began then: what it found or wrote stays */
        uint64_t left;                /* blocks that did not go */
        uint64_t no_return;           /* ... since no fetch could bring them back */
        uint32_t hand;                /* block to look at next */
        uint32_t looked;              /* ... since something was found */
        uint64_t changes;             /* when it was last marked */
        struct file_wanted wanted[DISK_FILES]; /* of each file */
        uint32_t told;                /* place to tell clients of next; CATALOG_NOWHERE: all is */
};

/* The disk of a place, and what happened there. */
static inline uint32_t file_disk_of(const struct file *file, uint64_t place) {
        return catalog_file_of(&file->catalog, place);
}
static inline struct file_count *file_count(struct file *file, uint64_t place) {
        return &file->disks[file_disk_of(file, place)].count;
}
/* 0 is no error, and nothing to count. */
static inline void file_count_error(struct file_count *count, int error) {
        count->errors += error != 0;
        count->last_error = error ?: count->last_error;
}
/* What the last one was; "": there was none. */
const char *file_last_error(const struct file_count *count);
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
/* The same, of one that has none yet; -1: there is no place, or none for its domain. */
int file_enter_space(struct file *file, struct space *space);
void file_want(struct file *file, bool soon);
/* Clients ask for what is below while it can come. */
void file_tell_below(struct space *space);
/* By its names and its geometry: blocks of another one are of no use to it. */
void file_name_of(const struct space *space, struct file_name *ret);
/* Files have come, or gone: what was put off is looked at, and clients are told. */
void file_changes(struct file *file);
/* What was deleted is forgotten, and said to be when no file has it. */
void file_erase(struct file *file);
/* Records of what was erased make room, a piece at a time. True: there is more. */
bool file_sweep_dead(struct file *file);

/* Can a disk be asked? A question is begun, has items added, and is made ready. */
bool file_is_idle(const struct file *file, uint32_t disk);
bool file_any_idle(const struct file *file);
void file_begin_question(struct file *file, uint32_t disk, enum store_disk_ask what,
                         struct space *space);
/* May one more block go along? */
bool file_question_is_full(const struct file *file, uint32_t disk);
void file_question_add(struct file *file, uint32_t disk, const struct store_disk_item *item);
void file_question_ready(struct file *file, uint32_t disk);
/* What a worker had of the question is done: the disk is next, or nobody. */
void file_is_ready(struct file *file, uint32_t disk);
void file_settle(struct file *file, uint32_t disk, const int32_t *errors, uint32_t n);

/* The root of a chain's records. tokens: bidirectional: of the whole prefix. */
uint64_t file_root(const struct space *space, uint64_t root, const uint32_t *tokens);
/*
 * The record with these tokens behind up, or the first of its chain (CATALOG_NOWHERE), which label
 * says but for that. Its place, or CATALOG_NOWHERE: it is not there.
 */
uint32_t file_record_behind(const struct file *file, struct kvd_label *label, uint32_t up,
                            const uint32_t *tokens);
/* The record of a resident block: its place, or CATALOG_NOWHERE. */
uint32_t file_record_of(const struct file *file, const struct space *space, uint32_t id);
/* one that went for another is no mark of a use */
void file_forget_stale(const struct file *file, struct space *space, uint32_t id);
void file_note_record(struct space *space, uint32_t id, uint32_t place, uint64_t sequence);

/* demote.c: makes questions of blocks to be written, for disks that are idle. */
void demote_next(struct file *file, bool *later);
void demote_done(struct file *file, uint32_t disk, const int32_t *errors, uint32_t n);

/* What a domain may have there, records and copies. */
uint64_t demote_most(const struct file *file, const struct space *space);

/* copies.c: of exact copies that go or come back. */
extern const struct file_copies file_copies;
/* A piece of what waits for files that are off, or hang. True: there is more. */
bool copies_miss_some(struct file *file, struct space *space);
void copies_space_leaves(struct file *file, struct space *space);

/* fetch.c: of blocks to be read. False: there is more to be looked at before anything else is. */
bool fetch_next(struct file *file, bool *later);
void fetch_done(struct file *file, uint32_t disk, const int32_t *errors, uint32_t n);
void fetches_end(struct file *file, const struct space *space, const struct attachment *a);
void fetches_end_all(struct file *file);
/* They end where they need that disk, but for one of them, or NULL. */
void fetches_miss(struct file *file, uint32_t disk, const struct fetch *but);

#endif
