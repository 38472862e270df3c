/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The disk process has one volume open, of one file or several, and answers one question after the
 * other. It copies blocks
 * from and to the pool's files, of which it has none in its own memory.
 */

#include "daemon/disk/main.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/asked.h"
#include "daemon/disk/device.h"
#include "ipc/base/file.h"
#include "ipc/base/mapped.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/file/volume.h"

#define EXTENT_BYTES (UINT64_C(64) << 20)
#define EXTENT_LEAST (UINT64_C(1) << 20)
#define EXTENTS_FEW 16u /* a small file has smaller ones */
#define STAGING_BYTES (UINT64_C(64) << 20)

struct memory { /* of a block */
        int fd;
        uint64_t offset;
};

struct disk_process {
        struct device_file files[DISK_FILES];
        uint32_t n_files; /* 0: they have not come yet */
        uint32_t heard;   /* the first so many have answered */
        bool judged;      /* which of them can be used is known */
        uint32_t filled;  /* the first so many are as large as they are to be */
        struct device *device;
        struct kvd_disk_file wire_files[DISK_FILES];
        struct volume volume;
        bool open;
        struct kvd_disk_found found[KVD_DISK_FOUND];
        struct kvd_disk_item wire[KVD_DISK_ITEMS]; /* aligned copies of what came */
        uint32_t tokens[KVD_DISK_TOKENS];
        struct volume_item items[KVD_DISK_ITEMS];
        struct memory memory[KVD_DISK_ITEMS];
        int32_t errors[KVD_DISK_ITEMS];
        bool wants_checksums;
        uint64_t checksums[KVD_DISK_ITEMS]; /* of what was read, before it left for its memory */
};

static struct disk_process process; /* lives as long as the process */

/* ---- memory ---------------------------------------------------------------------------------- */

/* Memory in large pages cannot be written by calls. */
static int copy_mapped(const struct memory *m, void *staging, uint32_t bytes, bool out) {
        struct mapped mapped;
        void *block = mapped_begin(m->fd, m->offset, bytes, &mapped);

        if (!block)
                return -ENOMEM;
        memcpy(out ? block : staging, out ? staging : block, bytes);
        mapped_end(&mapped, 1);
        return 0;
}

/* By calls: pages that nobody has yet need not be made of zeros first, and none is mapped. */
static int copy(const struct volume_item *item, void *staging, bool out) {
        const struct memory *m = item->payload;
        ssize_t n;

        if (out && process.wants_checksums)
                process.checksums[item - process.items] = XXH3_64bits(staging, item->bytes);
        for (uint32_t done = 0; done < item->bytes; done += (uint32_t)n) {
                void *at = (uint8_t *)staging + done;
                off_t offset = (off_t)(m->offset + done);

                n = out ? sys->pwrite(m->fd, at, item->bytes - done, offset) :
                          sys->pread(m->fd, at, item->bytes - done, offset);
                if (n < 0 && errno == EINTR)
                        n = 0;
                else if (n <= 0)
                        return copy_mapped(m, staging, item->bytes, out);
        }
        return 0;
}

/* ---- opening --------------------------------------------------------------------------------- */

static uint64_t extent_bytes(uint64_t bytes) {
        uint64_t part = (bytes - MIN(bytes, FILE_HEAD)) / EXTENTS_FEW / DISK_SECTOR * DISK_SECTOR;

        return MIN(MAX(part, EXTENT_LEAST), EXTENT_BYTES);
}

/* With each answer: how they are. */
static struct kvd_slice tell_files(void) {
        for (uint32_t i = 0; i < process.n_files; i++) {
                const struct volume_file *f = &process.volume.files[i];

                process.wire_files[i] = (struct kvd_disk_file){.extent_bytes = f->extent_bytes,
                                                               .extents = f->n_extents,
                                                               .state = f->state,
                                                               .error = f->error};
        }
        return (struct kvd_slice){process.wire_files,
                                  process.n_files * (uint32_t)sizeof *process.wire_files};
}

static uint64_t bytes_of_smallest(void) {
        uint64_t bytes = UINT64_MAX;

        for (uint32_t i = 0; i < process.n_files; i++)
                if (!process.files[i].error)
                        bytes = MIN(bytes, process.files[i].bytes);
        return bytes;
}

/* One file a question: so who asks knows which one hangs. 1: it has answered; 0: all had before. */
static int hear_one(void) {
        alignas(DISK_SECTOR) static uint8_t sector[DISK_SECTOR];
        struct disk *disk = device_disk(process.device);
        struct disk_io io = {.file = process.heard, .data = sector, .bytes = DISK_SECTOR};

        if (process.heard == process.n_files)
                return 0;
        if (!disk->error[process.heard++])
                disk->begin(disk, &io, false);
        while (disk->end(disk))
                ;
        return 1;
}

/* Before anything is written to any of them: one may be there by mistake. */
static int judge(void) {
        struct volume *v = &process.volume;
        int r = volume_judge(v, device_disk(process.device), extent_bytes(bytes_of_smallest()),
                             STAGING_BYTES);

        process.judged = r == 0;
        v->copy = copy;
        return r;
}

static int open_volume(struct kvd_msg_disk_open_reply *reply) {
        struct volume *v = &process.volume;
        int r = volume_open(v);

        if (r < 0)
                return r;
        process.open = true;
        reply->files = tell_files();
        reply->opening = v->super->opening;
        reply->secret = (struct kvd_slice){v->super->secret, KVD_SECRET_BYTES};
        reply->namespaces = (struct kvd_slice){v->super->namespaces,
                                               v->super->n_namespaces *
                                                       (uint32_t)sizeof *v->super->namespaces};
        return 0;
}

static int take_files(struct kvd_slice sizes, struct kvd_fds *fds) {
        uint32_t n = sizes.size / (uint32_t)sizeof(int64_t), fd = 0;
        int64_t bytes[DISK_FILES];

        if (!n || n > DISK_FILES || sizes.size % sizeof *bytes)
                return -EPROTO;
        memcpy(bytes, sizes.data, sizes.size);
        for (uint32_t i = 0; i < n; i++) {
                if (bytes[i] >= 0 && fd == fds->n)
                        return -EPROTO;
                process.files[i] = (struct device_file){.fd = -1};
                if (bytes[i] < 0) {
                        process.files[i].error = (int)bytes[i];
                        continue;
                }
                process.files[i].fd = STEAL_FD(fds->fd[fd]);
                process.files[i].bytes = (uint64_t)bytes[i];
                fd++;
        }
        process.n_files = n;
        return 0;
}

/* A piece of the first that is too short. 1: there is more to do; 0: all are as they should be. */
static int fill_one(uint64_t *done) {
        for (; process.filled < process.n_files; process.filled++) {
                const struct device_file *file = &process.files[process.filled];
                struct volume_file *f = &process.volume.files[process.filled];
                int r = f->error ? 0 : device_fill(file->fd, file->bytes, done);

                if (r > 0)
                        return r;
                if (r < 0)
                        f->error = r;
        }
        return 0;
}

static int answer_open(const struct kvd_msg_disk_open *m, struct kvd_fds *fds,
                       struct kvd_msg_disk_open_reply *reply) {
        int r;

        if (process.open)
                return -EALREADY;
        r = process.n_files ? 0 : take_files(m->sizes, fds);
        if (r == 0 && process.device)
                r = hear_one();
        else if (r == 0)
                r = device_new(process.files, process.n_files, &process.device) ?: 1;
        if (r == 0 && !process.judged)
                r = judge();
        if (r == 0)
                r = fill_one(&reply->done);
        reply->more = r > 0;
        reply->files = (struct kvd_slice){process.wire_files,
                                          process.heard * (uint32_t)sizeof *process.wire_files};
        return r ? MIN(r, 0) : open_volume(reply);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* A place as the volume has it; one that is in no file is in none of the volume's, either. */
static uint64_t place_of(uint32_t file, uint64_t place) {
        const struct volume_file *f = &process.volume.files[file];

        if (file >= process.n_files || place / FILE_SLOTS >= f->n_extents)
                return UINT64_MAX;
        return place + f->first * (uint64_t)FILE_SLOTS;
}

/* Those that are not there have no bytes, and are refused with the others that are wrong. */
static int64_t take_items(struct kvd_slice items, struct kvd_slice tokens, uint64_t bytes,
                          const struct kvd_fds *fds) {
        uint32_t n = items.size / (uint32_t)sizeof(struct kvd_disk_item), used = 0;
        const struct kvd_disk_item *item = process.wire;

        if (items.size % sizeof *item || n > KVD_DISK_ITEMS || bytes > STAGING_BYTES ||
            tokens.size > sizeof process.tokens)
                return -EPROTO;
        memcpy(process.wire, items.data, items.size);
        memcpy(process.tokens, tokens.data, tokens.size);
        for (uint32_t i = 0; i < n; used += item[i++].label.n_tokens) {
                if (item[i].label.n_tokens > KVD_MAX_BLOCK_TOKENS ||
                    (used + item[i].label.n_tokens) * sizeof(uint32_t) > tokens.size)
                        return -EPROTO;
                process.items[i] = (struct volume_item){
                        .place = place_of(item[i].disk, item[i].place),
                        .label = &item[i].label,
                        .tokens = process.tokens + used};
        }
        for (uint32_t i = 0; i < n; i++) {
                bool there = item[i].file < fds->n && item[i].offset <= UINT64_MAX - bytes &&
                             shared_file_holds(fds->fd[item[i].file], item[i].offset + bytes);

                process.memory[i] = (struct memory){there ? fds->fd[item[i].file] : -1,
                                                    item[i].offset};
                process.items[i].payload = &process.memory[i];
                process.items[i].bytes = there ? (uint32_t)bytes : 0;
        }
        return n;
}

/* A record that is not what it was is not found again, either. */
static void erase_broken(uint32_t n) {
        uint64_t places[KVD_DISK_ITEMS];
        uint32_t k = 0;

        for (uint32_t i = 0; i < n; i++)
                if (process.items[i].error == -EBADMSG)
                        places[k++] = process.items[i].place;
        if (k)
                volume_erase(&process.volume, places, k);
}

static struct kvd_slice checksums_of(struct kvd_slice items) {
        uint32_t n = MIN(items.size / (uint32_t)sizeof(struct kvd_disk_item), KVD_DISK_ITEMS);

        return (struct kvd_slice){process.checksums, process.wants_checksums ?
                                                             n * (uint32_t)sizeof *process.checksums :
                                                             0};
}

static int move_blocks(struct kvd_slice items, struct kvd_slice tokens, uint64_t bytes,
                       const struct kvd_fds *fds, bool writes, struct kvd_slice *ret,
                       struct kvd_slice *files) {
        int64_t n = take_items(items, tokens, bytes, fds);

        if (n < 0)
                return (int)n;
        if (writes)
                volume_write(&process.volume, process.items, (uint32_t)n);
        else
                volume_read(&process.volume, process.items, (uint32_t)n);
        if (!writes)
                erase_broken((uint32_t)n);
        for (int64_t i = 0; i < n; i++)
                process.errors[i] = process.items[i].error;
        *ret = (struct kvd_slice){process.errors, (uint32_t)n * (uint32_t)sizeof *process.errors};
        *files = tell_files();
        return volume_broken(&process.volume);
}

/* ---- the rest -------------------------------------------------------------------------------- */

static int answer_scan(const struct kvd_msg_disk_scan *m, struct kvd_msg_disk_scan_reply *reply) {
        uint64_t place = place_of(m->file, m->extent * (uint64_t)FILE_SLOTS);
        uint32_t extent = (uint32_t)MIN(place / FILE_SLOTS, UINT32_MAX);
        int n = volume_scan(&process.volume, extent, m->first, KVD_DISK_FOUND, process.found);

        if (n < 0)
                return n;
        for (int i = 0; i < n; i++)
                process.found[i].place -= process.volume.files[m->file].first * (uint64_t)FILE_SLOTS;
        reply->slot_bytes = process.volume.slot_bytes[extent];
        reply->found = (struct kvd_slice){process.found, (uint32_t)n *
                                                                 (uint32_t)sizeof *process.found};
        return 0;
}

static int id_of(struct kvd_slice slice, struct kvd_key *ret) {
        if (slice.size != sizeof *ret)
                return -EPROTO;
        memcpy(ret, slice.data, sizeof *ret);
        return 0;
}

static int answer_namespace(const struct kvd_msg_disk_namespace *m,
                            struct kvd_msg_disk_namespace_reply *reply) {
        struct kvd_key id;
        int r = id_of(m->id, &id);

        if (r == 0)
                r = volume_namespace(&process.volume, id, &reply->epoch);
        reply->files = tell_files();
        return r;
}

static int answer_forget(const struct kvd_msg_disk_forget *m,
                         struct kvd_msg_disk_forget_reply *reply) {
        struct kvd_key id;
        int r = id_of(m->id, &id);

        if (r == 0)
                r = volume_forget(&process.volume, id);
        reply->files = tell_files();
        return r;
}

static int question(const struct kvd_msg *q, struct kvd_fds *fds, struct kvd_msg *reply) {
        if (q->number == KVD_MSG_disk_open)
                return answer_open(&q->disk_open, fds, &reply->disk_open_reply);
        if (!process.open)
                return -EPROTO;
        switch (q->number) {
        case KVD_MSG_disk_scan:
                return answer_scan(&q->disk_scan, &reply->disk_scan_reply);
        case KVD_MSG_disk_namespace:
                return answer_namespace(&q->disk_namespace, &reply->disk_namespace_reply);
        case KVD_MSG_disk_forget:
                return answer_forget(&q->disk_forget, &reply->disk_forget_reply);
        case KVD_MSG_disk_read:
                process.wants_checksums = q->disk_read.checksums;
                reply->disk_read_reply.checksums = checksums_of(q->disk_read.items);
                return move_blocks(q->disk_read.items, q->disk_read.tokens,
                                   q->disk_read.block_bytes, fds, false,
                                   &reply->disk_read_reply.errors,
                                   &reply->disk_read_reply.files);
        case KVD_MSG_disk_write:
                return move_blocks(q->disk_write.items, q->disk_write.tokens,
                                   q->disk_write.block_bytes, fds, true,
                                   &reply->disk_write_reply.errors,
                                   &reply->disk_write_reply.files);
        default:
                return -EPROTO;
        }
}

static int do_question(const struct kvd_msg *q, struct kvd_fds *fds, struct kvd_msg *reply,
                       struct kvd_why *why) {
        int r;

        process.volume.why.line[0] = 0;
        r = question(q, fds, reply);
        *why = process.volume.why;
        return r;
}

int disk_main(void) {
        int r = asked_begin("kvd-disk", "--disk", "disk process") ?: asked_serve(do_question);

        volume_close(&process.volume);
        return r;
}
