/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A disk process has the volume of one file open, and serves requests one at a time. It copies
 * blocks from and to the pool's files, and does not keep these mapped.
 */

#include "daemon/process/disk/main.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/process/child_end.h"
#include "daemon/process/disk/disk_device.h"
#include "ipc/base/mapped.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "store/file/volume.h"

#define STAGING_BYTES (UINT64_C(64) << 20)

struct memory { /* location of a block in the pool */
        int fd;
        uint64_t offset;
};

struct disk_process {
        int fd;
        struct device *device; /* NULL: the file was not opened yet */
        struct volume volume;
        alignas(DISK_SECTOR) uint8_t copies[FILE_COPIES * DISK_SECTOR];
        struct file_super super; /* aligned copy of the one received */
        bool filled;             /* the file has its full size */
        struct kvd_disk_found found[KVD_DISK_FOUND];
        struct kvd_disk_item wire[KVD_DISK_ITEMS]; /* aligned copies of those received */
        uint32_t tokens[KVD_DISK_TOKENS];
        struct volume_item items[KVD_DISK_ITEMS];
        struct memory memory[KVD_DISK_ITEMS];
        int32_t errors[KVD_DISK_ITEMS];
        bool wants_checksums;
        uint64_t checksums[KVD_DISK_ITEMS]; /* of blocks read, before the copy to the pool */
};

static struct disk_process process; /* lives as long as the process */

/* ---- memory ---------------------------------------------------------------------------------- */

/* Copies to or from memory in large pages, which calls cannot write. */
static int copy_mapped(const struct memory *m, void *staging, uint32_t bytes, bool out) {
        struct mapped mapped;
        void *block = mapped_begin(m->fd, m->offset, bytes, &mapped);

        if (!block)
                return -ENOMEM;
        memcpy(out ? block : staging, out ? staging : block, bytes);
        mapped_end(&mapped, 1);
        return 0;
}

/* Uses calls, so that new pages need not be filled with zeros first, and nothing is mapped. */
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

static int begin_volume(int fd, uint64_t bytes) {
        int r = device_new(fd, bytes, &process.device);

        process.fd = fd;
        if (r == 0)
                r = volume_begin(&process.volume, device_disk(process.device), STAGING_BYTES);
        process.volume.copy = copy;
        return r;
}

static int answer_open(const struct kvd_msg_disk_open *m, struct kvd_fds *fds,
                       struct kvd_msg_disk_open_reply *reply) {
        int r;

        if (process.device || fds->n != 1)
                return -EPROTO;
        r = begin_volume(STEAL_FD(fds->fd[0]), m->bytes);
        if (r == 0)
                r = volume_look(&process.volume, process.copies);
        reply->copies = (struct kvd_slice){process.copies, sizeof process.copies};
        return r;
}

/* The first request comes once it is known that the file is ours, and may be filled. */
static int answer_super(const struct kvd_msg_disk_super *m,
                        struct kvd_msg_disk_super_reply *reply) {
        int r;

        if (m->super.size != sizeof process.super)
                return -EPROTO;
        memcpy(&process.super, m->super.data, m->super.size);
        r = process.filled ? 0 : device_fill(process.fd, process.volume.disk->bytes, &reply->done);
        reply->more = r > 0;
        process.filled = r == 0;
        return r ? MIN(r, 0) : volume_tell(&process.volume, &process.super);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* An item whose memory does not exist gets 0 bytes, so it is refused like other invalid ones. */
static int64_t take_items(struct kvd_slice items, struct kvd_slice tokens, uint64_t bytes,
                          const struct kvd_fds *fds) {
        uint32_t n = items.size / (uint32_t)sizeof(struct kvd_disk_item), used = 0;
        const struct kvd_disk_item *item = process.wire;

        if (items.size % sizeof *item || n > KVD_DISK_ITEMS || bytes > STAGING_BYTES ||
            tokens.size > sizeof process.tokens)
                return -EPROTO;
        memcpy(process.wire, items.data, items.size);
        if (tokens.size) /* exact copies have none */
                memcpy(process.tokens, tokens.data, tokens.size);
        for (uint32_t i = 0; i < n; used += item[i++].label.n_tokens) {
                if (item[i].label.n_tokens > KVD_MAX_BLOCK_TOKENS ||
                    (used + item[i].label.n_tokens) * sizeof(uint32_t) > tokens.size)
                        return -EPROTO;
                process.items[i] = (struct volume_item){.place = item[i].place,
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

/* Erases damaged records, so that they are not found again. */
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

        return (struct kvd_slice){process.checksums,
                                  process.wants_checksums ?
                                          n * (uint32_t)sizeof *process.checksums :
                                          0};
}

static int broken(void) {
        return process.volume.broken ? -EIO : 0;
}

static int move_blocks(struct kvd_slice items, struct kvd_slice tokens, uint64_t bytes,
                       const struct kvd_fds *fds, bool writes, struct kvd_slice *ret) {
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
        return broken();
}

/* ---- the rest -------------------------------------------------------------------------------- */

static int answer_scan(const struct kvd_msg_disk_scan *m, struct kvd_msg_disk_scan_reply *reply) {
        int n = volume_scan(&process.volume, m->extent, m->first, KVD_DISK_FOUND, process.found);

        if (n < 0)
                return n;
        reply->slot_bytes = process.volume.slot_bytes[m->extent];
        reply->found = (struct kvd_slice){process.found,
                                          (uint32_t)n * (uint32_t)sizeof *process.found};
        return 0;
}

static int question(const struct kvd_msg *q, struct kvd_fds *fds, struct kvd_msg *reply) {
        if (q->number == KVD_MSG_disk_open)
                return answer_open(&q->disk_open, fds, &reply->disk_open_reply);
        if (!process.device)
                return -EPROTO;
        switch (q->number) {
        case KVD_MSG_disk_scan: return answer_scan(&q->disk_scan, &reply->disk_scan_reply);
        case KVD_MSG_disk_super: return answer_super(&q->disk_super, &reply->disk_super_reply);
        case KVD_MSG_disk_read:
                process.wants_checksums = q->disk_read.checksums;
                reply->disk_read_reply.checksums = checksums_of(q->disk_read.items);
                return move_blocks(q->disk_read.items, q->disk_read.tokens,
                                   q->disk_read.block_bytes, fds, false,
                                   &reply->disk_read_reply.errors);
        case KVD_MSG_disk_write:
                return move_blocks(q->disk_write.items, q->disk_write.tokens,
                                   q->disk_write.block_bytes, fds, true,
                                   &reply->disk_write_reply.errors);
        default: return -EPROTO;
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
