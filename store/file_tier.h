/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_TIER_H
#define KVD_STORE_FILE_TIER_H

/*
 * The file tier, as the daemon sees it. The store has the catalog of the file's records, and
 * decides which blocks are written and read back. A disk process (daemon/process/disk) reads and
 * writes the file, and gets one request at a time. Only clients that wait for a fetch wait for it.
 * Several disks are made one by the system (RAID, LVM).
 *
 *      opening ──it was seen──► scanning ──all extents──► on ──a flush failed, no process──► off
 *                                                          └──no answer──► hanging, until told
 *
 * Below a pool on a GPU, blocks pass through host memory (file/host.c), where copies of some blocks
 * may stay, also without a file.
 *
 * Exact copies of a sequence's blocks are written to the file when memory for them is short, and
 * read back when they are needed (file/cold_copies.c). They belong to that sequence only, and do
 * not survive a restart.
 *
 * Blocks are written ahead of need, so that eviction can drop blocks that are in the file already:
 * blocks used a second time, and blocks deep in a chain. A block is never written before its
 * parent.
 */

#include "ipc/base/disk.h"
#include "store/store.h"

/* Host memory for a tier's requests below a pool on a GPU, in addition to the copies that stay. */
#define STORE_CARRY_BYTES (UINT64_C(16) << 20)

struct store_disk_config {
        bool there;     /* false: there is no file */
        uint64_t bytes; /* its size */
        uint32_t depth; /* tokens; blocks ending there or later are written at first use */
        uint64_t host;  /* bytes of copies in host memory, below a pool on a GPU */
};

enum store_disk_ask {
        STORE_DISK_SUPER, /* write the superblock */
        STORE_DISK_SCAN,  /* read up to KVD_DISK_FOUND slots of an extent */
        STORE_DISK_READ,
        STORE_DISK_WRITE,
};

struct store_disk_item {
        uint64_t place;
        struct kvd_label label;
        kvd_ref block; /* held until the reply */
        const uint32_t *tokens;
        bool copied;   /* host memory has a copy: the disk is not read */
        uint32_t copy; /* place of the exact copy, if question.copies */
};

struct store_disk_question {
        enum store_disk_ask what;
        const void *super; /* SUPER: the superblock to write */
        uint32_t super_bytes;
        uint32_t extent, first; /* SCAN: number of the extent, first slot */
        struct space *space;    /* READ, WRITE: space of the items */
        bool copies;            /* READ, WRITE: exact copies, not blocks */
        bool checksums;         /* READ: the reply brings checksums */
        uint32_t n, n_segments; /* number of items, and of segments that they are in */
        struct store_disk_item items[KVD_DISK_ITEMS];
};

/*
 * Creates the tier; call it before clients connect. Without this call, or if config has neither
 * a file nor host, there is no tier and the functions below do nothing. Without a file the tier is on
 * at once, and empty.
 */
int store_disk_begin(struct store *store, const struct store_disk_config *config);
/*
 * Sets a function that is called when there is a request for the disk; soon: a client waits for it.
 */
void store_on_disk(struct store *store, void (*called)(void *data, bool soon), void *data);

/*
 * The process has opened the file. copies: both copies of the superblock, as they are on the disk.
 * With an error the file is not used.
 */
void store_disk_looked(struct store *store, int error, const void *copies, uint64_t bytes);
/* A remark about the file in use, for users; "": none. */
void store_disk_note(struct store *store, const char *why);
/* Turns the file off until the daemon is restarted. */
void store_disk_off(struct store *store, const char *why);

/*
 * For a tier without a file, which has no disk process: gives work to the worker. True: call again
 * after a while.
 */
bool store_host_next(struct store *store);

/* The next request to the file's process; NULL: none. *later: there may be one after a while. */
const struct store_disk_question *store_disk_next(struct store *store, bool *later);

/*
 * The reply, by the kind of the request. Errors are 0 or negative. After an error of SUPER the file
 * is off, except for -EAGAIN: then the request is repeated.
 */
void store_disk_told(struct store *store, int error);
void store_disk_scanned(struct store *store, int error, uint32_t slot_bytes,
                        const struct kvd_disk_found *found, uint32_t n);
/* checksums: XXH3-64 of each block read; NULL if not requested. */
void store_disk_moved(struct store *store, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n);
/* There was no reply for a while: until it comes, new fetches do not use the file's records. */
void store_disk_slow(struct store *store);
/* There is no reply, and the process still exists: fetches stop waiting for it. */
void store_disk_hangs(struct store *store);
/* The process is gone, and with it the request; the next process opens the file again. */
void store_disk_lost(struct store *store);

/* The memory of a request's item: a descriptor and the offset in it; or a negative errno. */
int store_disk_memory(struct store *store, uint32_t item, uint64_t *offset);

#define STORE_DISK_SPACES 158u /* number of spaces that can have blocks in the file */

/* Was a space with that name deleted, and may the file still have records of it? */
bool store_disk_erasing(const struct store *store, const char *domain, const char *space);
/* -EBUSY: too many deleted spaces, of the domain or of all, must still be erased from the file. */
int store_disk_may_erase(struct store *store, const char *domain);

enum store_disk_state {
        STORE_DISK_NONE,
        STORE_DISK_OPENING,
        STORE_DISK_SCANNING,
        STORE_DISK_ON,
        STORE_DISK_HANGS, /* does not reply */
        STORE_DISK_OFF,
};

struct store_disk_info { /* of the file, or of copies in host memory */
        enum store_disk_state state;
        const char *name;
        uint64_t bytes, used, records, scanned, extents;
        uint64_t fetches, queue; /* number of fetches; number of them under way */
        uint64_t hits, misses;   /* number of blocks fetched; number not found, or damaged */
        uint64_t wrong;          /* number of blocks found damaged */
        uint64_t read_bytes, written_bytes, errors, evicted;
        uint64_t read_ns, write_ns; /* time for which reads, and writes, were under way */
        uint64_t copies; /* number of exact copies in the file; used includes their bytes */
        uint64_t copies_written, copies_read;
        uint64_t copies_lost;   /* number of exact copies that were unreadable or damaged */
        const char *last_error; /* text of the last of errors */
        uint64_t age_ns;        /* time since the last use, or start, of what is evicted next */
        char why[128];          /* why it is off, or another remark */
};
/* Is there a file that is off or hangs? */
bool store_disk_is_off(const struct store *store);
/* ret->state is STORE_DISK_NONE if there is neither a file nor host memory in place of one. */
void store_disk_get_info(const struct store *store, struct store_disk_info *ret);
/*
 * The same for copies in host memory (store_disk_config.host). Returns 1, or 0 if there are none.
 */
uint32_t store_host_get_info(const struct store *store, struct store_disk_info *ret);

struct fetch_request {
        uint32_t group, n_tokens;
        uint64_t salt;
        const uint32_t *tokens; /* those behind `behind` */
        kvd_ref behind;         /* causal: a block of the chain, or KVD_ROOT */
        /* bidirectional: tokens of the prefix in the client's requests right before this one */
        uint32_t before;
        bool more; /* the prefix goes on in the next request: nothing is fetched yet */
};

/*
 * Fetches what is below the pool of a chain, behind its resident blocks, from the first place that
 * has any of it. Returns the number of tokens that will be resident, as far as is known: servers
 * are only asked then. *fd becomes readable when the fetch has ended, successfully or not, and is
 * owned by the store until then; -1: nothing to wait for. -EBUSY: too many fetches are under way. -ESTALE: the block behind which tokens are
 * fetched is not resident, or is of another chain; or the tokens before are not there.
 */
int64_t space_fetch(struct attachment *attachment, const struct fetch_request *q, int *fd);

/*
 * Writes all blocks of a space that the file does not have. space_demote begins, space_demoted
 * polls. 1: under way; 0: the file has all blocks that were sealed at the beginning, except for
 * *no_return blocks that no fetch could bring back; -ENOSPC: some blocks could not be written;
 * -EOPNOTSUPP: there is no file.
 */
int space_demote(struct space *space);
int space_demoted(struct space *space, uint64_t *no_return);

#endif
