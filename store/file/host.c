/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks on their way between a pool on a GPU and its file pass through host memory (host.h). A
 * copy that stays there belongs to its record; the coldest copies are evicted for new ones. Without
 * a disk, a record is nothing but its copy: requests to the disk are answered here, the names of
 * spaces are not written anywhere, and nothing outlives the daemon.
 */

#include "store/file/host.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/sys.h"
#include "store/below/place.h"
#include "store/file/file.h"

#define EXTENT_BYTES (UINT64_C(256) << 20)
#define LEAST_EXTENTS 16u
static_assert(CATALOG_NOWHERE == UINT32_MAX, "its successor is 0");

#define LOOKS 64u /* copies to look at for one that can be evicted */

struct host_record {
        uint64_t checksum;
        uint32_t place;          /* of the exact copy, plus 1; 0 if none */
        uint32_t colder, warmer; /* LRU list of records with copies: record plus 1; 0: end */
};

struct host {
        struct file *file;
        struct carry carry; /* for the request */
        bool has_disk;
        uint64_t n_records;
        struct host_record *records; /* owned; by place in the catalog; NULL: no copies stay */
        uint32_t coldest, warmest;   /* ends of the LRU list: record plus 1; 0: empty */
        uint64_t most, bytes, n_copies, evicted; /* of copies; most: maximum of bytes */
        struct file_count count;                 /* of copies; used if there is a disk, too */
        int32_t errors[KVD_DISK_ITEMS];
};

/* ---- copies that stay ------------------------------------------------------------------------ */

static uint64_t bytes_of(const struct host *h, uint32_t record) {
        return h->file->catalog.extents[record / FILE_SLOTS].slot_bytes;
}

static struct space *space_of(const struct host *h, uint32_t record) {
        return h->file->owners[h->file->catalog.entries[record].space];
}

/* The link to change: the neighbour's, or the end of the list. */
static uint32_t *warmer_of(struct host *h, uint32_t number) {
        return number ? &h->records[number - 1].warmer : &h->coldest;
}

static uint32_t *colder_of(struct host *h, uint32_t number) {
        return number ? &h->records[number - 1].colder : &h->warmest;
}

static void unlink_copy(struct host *h, uint32_t record) {
        struct host_record *r = &h->records[record];

        *warmer_of(h, r->colder) = r->warmer;
        *colder_of(h, r->warmer) = r->colder;
}

static void link_warmest(struct host *h, uint32_t record) {
        struct host_record *r = &h->records[record];

        r->colder = h->warmest;
        r->warmer = 0;
        *warmer_of(h, r->colder) = record + 1;
        h->warmest = record + 1;
}

static void touch(struct host *h, uint32_t record) {
        unlink_copy(h, record);
        link_warmest(h, record);
}

static void release(struct host *h, uint32_t record) {
        struct host_record *r = &h->records[record];
        struct space *space = space_of(h, record);

        unlink_copy(h, record);
        if (space)
                carry_take_back(&h->carry, space, r->place - 1);
        r->place = 0;
        h->bytes -= bytes_of(h, record);
        h->n_copies--;
}

static void gone(void *data, uint32_t record) {
        struct host *h = data;

        if (h->records[record].place)
                release(h, record);
}

/* Is there a copy that is not being moved? */
static bool may_go(const struct host *h, uint32_t record) {
        return h->records[record].place && !h->file->catalog.entries[record].busy;
}

static void drop(struct host *h, uint32_t record) {
        if (h->has_disk) {
                h->evicted++;
                release(h, record);
        } else {
                h->file->catalog.evicted++;
                catalog_drop(&h->file->catalog, record);
        }
}

/*
 * Would evicting the copy make room for that space? It must be a copy of the space itself or, if
 * the space has a free place, of its domain.
 */
static bool helps(const struct host *h, uint32_t record, const struct space *space) {
        const struct space *other = space_of(h, record);

        return other == space ||
               (other && space_domain(other) == space_domain(space) && places_free(space));
}

/*
 * The number plus 1 of the coldest copy's record, or of the next one after that; 0: none. Without a
 * disk, a copy is all that there is of its record, and goes after those of the record's children:
 * the catalog has the records without children in order of use.
 */
static uint32_t next_warmer(const struct host *h, uint32_t at) {
        const struct catalog *c = &h->file->catalog;

        if (h->has_disk)
                return at ? h->records[at - 1].warmer : h->coldest;
        return (at ? c->entries[at - 1].newer : c->coldest) + 1;
}

/* Evicts the coldest copy, or the coldest that helps that space. False: none was found. */
static bool drop_coldest(struct host *h, const struct space *space) {
        uint32_t at = h->records ? next_warmer(h, 0) : 0;

        for (uint32_t i = 0; at && i < LOOKS; i++, at = next_warmer(h, at))
                if (may_go(h, at - 1) && (!space || helps(h, at - 1, space))) {
                        drop(h, at - 1);
                        return true;
                }
        return false;
}

bool host_has_room(struct file *file, const struct space *space) {
        struct host *h = file->host;

        while (!carry_has_room(&h->carry, space))
                if (!drop_coldest(h, space))
                        return false;
        return true;
}

bool host_gives_way(struct file *file, const struct space *space) {
        struct host *h = file ? file->host : NULL;

        if (!h || !drop_coldest(h, space))
                return false;
        carry_shrink(&h->carry);
        return true;
}

bool host_may_begin(struct file *file, struct space *space) {
        if (!file->host || carry_may_begin(&file->host->carry, space))
                return true;
        file_want(file, true);
        return false;
}

/* Keeps the item's copy as its record's, if there is room. */
static void keep(struct host *h, struct carry *carry, uint32_t item, uint32_t record) {
        struct host_record *r = h->records ? &h->records[record] : NULL;

        if (!r || r->place)
                return;
        while (h->bytes + bytes_of(h, record) > h->most)
                if (!drop_coldest(h, NULL))
                        return;
        r->checksum = carry->items[item].checksum;
        r->place = carry_give(carry, item) + 1;
        link_warmest(h, record);
        h->bytes += bytes_of(h, record);
        h->n_copies++;
        h->count.written_bytes += bytes_of(h, record);
}

/* ---- a request's blocks ---------------------------------------------------------------------- */

static bool has_copy(const struct host *h, const struct space *space, uint32_t record) {
        return h->records && h->records[record].place && space_of(h, record) == space;
}

bool host_takes(struct file *file, uint32_t record) {
        struct host *h = file->host;
        const struct store_disk_question *q = &file->disk.question;

        if (!h)
                return true;
        if (q->n && q->items[0].copied != has_copy(h, q->space, record))
                return false;
        return has_copy(h, q->space, record) || (h->has_disk && host_has_room(file, q->space));
}

void host_add(struct file *file, struct store_disk_item *item) {
        struct host *h = file->host;
        uint32_t record = (uint32_t)item->place;
        struct space *space = file->disk.question.space;
        struct carry *carry;

        if (!h)
                return;
        carry = &h->carry;
        if (!carry->n)
                carry_begin(carry, space);
        item->copied = has_copy(h, space, record);
        if (item->copied)
                carry_add_copy(carry, item->block, h->records[record].place - 1,
                               h->records[record].checksum);
        else
                carry_add(carry, item->block);
}

bool host_asks_first(struct file *file) {
        struct store_disk_question *q = &file->disk.question;

        if (!file->host || q->copies || (q->what != STORE_DISK_WRITE && q->what != STORE_DISK_READ))
                return false;
        if (q->what == STORE_DISK_WRITE)
                carry_down(&file->host->carry);
        else if (q->items[0].copied)
                carry_up(&file->host->carry);
        return q->what == STORE_DISK_WRITE || q->items[0].copied;
}

static void written(struct host *h, const int32_t *errors, uint32_t n) {
        struct carry *carry = &h->carry;

        for (uint32_t i = 0; i < MIN(n, carry->n); i++)
                if (!errors[i])
                        keep(h, carry, i, (uint32_t)h->file->disk.question.items[i].place);
        carry_end(carry);
}

bool host_asks_then(struct file *file, const int32_t *errors, const uint64_t *checksums,
                    uint32_t n) {
        struct host *h = file->host;

        if (!h || !h->carry.space)
                return false;
        if (file->disk.question.what == STORE_DISK_READ)
                return carry_up_written(&h->carry, errors, checksums, n);
        written(h, errors, n);
        return false;
}

bool host_is_all(const struct file *file) {
        return file->host && !file->host->has_disk;
}

bool host_shrinks(struct file *file) {
        return file->host && carry_shrink(&file->host->carry);
}

bool host_has_question(const struct file *file) {
        return file->host && carry_is_under_way(&file->host->carry);
}

/* ---- what the worker did --------------------------------------------------------------------- */

/* The worker failed, not the disk: the space's blocks are swept again. */
static void look_again(const struct space *space) {
        sweep_again(&file_space_of(space)->below);
}

static void answer(struct file *file, const int32_t *errors, uint32_t n) {
        file_settle(file, errors, n);
        file_want(file, true);
}

/* If all blocks have arrived in host memory, the request is sent to the disk next. */
static void carried_down(struct host *h, bool failed) {
        struct carry *carry = &h->carry;

        if (carry_is_whole(carry) && h->file->disk.state == STORE_DISK_ON) {
                file_is_ready(h->file);
                return;
        }
        if (failed)
                look_again(carry->space);
        carry_end(carry);
        answer(h->file, NULL, 0);
}

/* Marks the record's copy as used, or frees it if it is corrupt: the disk still has the record. */
static int32_t settle_copy(struct host *h, uint32_t record, int32_t error) {
        bool wrong = error == -EBADMSG && h->has_disk;

        if (!wrong) {
                touch(h, record);
                return error;
        }
        h->count.wrong++;
        release(h, record);
        return -ECANCELED;
}

static void carried_up(struct host *h) {
        const struct store_disk_question *q = &h->file->disk.question;
        struct carry *carry = &h->carry;
        uint32_t n = carry->n;

        for (uint32_t i = 0; i < n; i++) {
                const struct carry_item *item = &carry->items[i];
                uint32_t record = (uint32_t)q->items[i].place;

                h->errors[i] = item->borrowed ? settle_copy(h, record, item->error) : item->error;
                if (!item->borrowed && !item->error)
                        keep(h, carry, i, record);
        }
        carry_end(carry);
        answer(h->file, h->errors, n);
}

static void carried(struct carry *carry, bool failed) {
        struct host *h = carry->owner;

        if (h->file->disk.question.what == STORE_DISK_WRITE)
                carried_down(h, failed);
        else
                carried_up(h);
}

/* ---- without a disk -------------------------------------------------------------------------- */

/* There is no disk: answers every request with success. */
bool store_host_next(struct store *store) {
        static const int32_t errors[KVD_DISK_ITEMS];
        const struct store_disk_question *q;
        bool later = false;

        while ((q = store_disk_next(store, &later))) {
                if (q->what == STORE_DISK_SUPER)
                        store_disk_told(store, 0);
                else
                        store_disk_moved(store, errors, NULL, q->n);
        }
        return later;
}

static int make_catalog(struct file *file) {
        uint64_t bytes = file->config.host;
        uint64_t extent = MAX(MIN(EXTENT_BYTES, bytes / LEAST_EXTENTS), 2 * DISK_SECTOR);
        int r = catalog_open(&file->catalog, extent,
                             (uint32_t)MIN(bytes / extent, UINT32_MAX / FILE_SLOTS));

        if (r == 0)
                r = head_alone(&file->head);
        if (r < 0)
                return store_refuse(file->store, r, "cannot set up the tier below the pool: %s",
                                    strerror(-r));
        file->disk.open = true;
        file->disk.state = STORE_DISK_ON;
        return host_opened(file);
}

/* ---- life ------------------------------------------------------------------------------------ */

int host_opened(struct file *file) {
        struct host *h = file->host;

        if (!h || !file->config.host)
                return 0;
        h->n_records = (uint64_t)file->catalog.n_extents * FILE_SLOTS;
        h->records = sys->mmap(NULL, h->n_records * sizeof *h->records, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (h->records == MAP_FAILED) {
                h->records = NULL;
                return store_refuse(file->store, -ENOMEM,
                                    "out of memory for the tier below the pool");
        }
        file->catalog.gone = gone;
        file->catalog.data = h;
        return 0;
}

int host_begin(struct file *file) {
        struct host *h = file->host = sys->calloc(1, sizeof *file->host);

        if (!h)
                return store_refuse(file->store, -ENOMEM,
                                    "out of memory for the tier below the pool");
        h->file = file;
        h->carry.owner = h;
        h->carry.done = carried;
        h->carry.most = STORE_CARRY_BYTES;
        file->below.carry = &h->carry;
        carry_open(&h->carry, file->store);
        h->has_disk = file->config.there;
        h->most = h->has_disk ? file->config.host : UINT64_MAX; /* no disk: the catalog's limit */
        if (h->has_disk)
                return 0;
        file->config.bytes = file->config.host;
        return make_catalog(file);
}

struct host *host_free(struct host *h) {
        if (!h)
                return NULL;
        carry_close(&h->carry, h->file->store);
        if (h->records)
                munmap(h->records, h->n_records * sizeof *h->records);
        free(h);
        return NULL;
}

void host_space_leaves(struct file *file, const struct space *space) {
        struct carry *carry = file->host ? &file->host->carry : NULL;
        bool waits;

        if (!carry || carry->last != space)
                return;
        waits = carry_is_under_way(carry) || (file->disk.ready && carry->space);
        carry_forget(carry);
        if (waits)
                answer(file, NULL, 0);
}

uint32_t host_copy(const struct file *file, const struct space *space, uint32_t record) {
        const struct host *h = file->host;
        uint32_t place = h->records[record].place;

        return place && space_of(h, record) == space ? place - 1 : KVD_NOWHERE;
}

struct file_count *host_count(struct file *file, const struct store_disk_item *item) {
        return item->copied && file->host->has_disk ? &file->host->count : &file->disk.count;
}

uint32_t store_host_get_info(const struct store *store, struct store_disk_info *ret) {
        const struct host *h = store->file ? store->file->host : NULL;

        if (!h || !h->has_disk || !h->file->config.host)
                return 0;
        *ret = (struct store_disk_info){.state = STORE_DISK_ON,
                                        .name = "host",
                                        .bytes = h->most,
                                        .used = h->bytes,
                                        .records = h->n_copies,
                                        .evicted = h->evicted,
                                        .hits = h->count.hits,
                                        .misses = h->count.misses,
                                        .wrong = h->count.wrong,
                                        .errors = h->count.errors,
                                        .last_error = file_last_error(&h->count),
                                        .read_bytes = h->count.read_bytes,
                                        .written_bytes = h->count.written_bytes};
        return 1;
}
