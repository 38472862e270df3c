/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads and writes of many records at once. The descriptor was opened with O_DIRECT, so that
 * nothing is cached twice, and flushes are fdatasync: what they answer is on the disk.
 */

#include "daemon/disk/device.h"

#include <errno.h>
#include <liburing.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define DEPTH 64u
#define FILL_BYTES (UINT64_C(16) << 20) /* of one call */

struct device {
        struct disk disk;
        int fd;
        bool ring_is_there;
        struct io_uring ring;
};

/* ---- one after the other --------------------------------------------------------------------- */

/* Short ones go on; 0 is the end of the file. */
static int transfer(int fd, const struct disk_io *io, bool writes) {
        for (uint64_t done = 0; done < io->bytes;) {
                uint8_t *data = (uint8_t *)io->data + done;
                off_t at = (off_t)(io->at + done);
                ssize_t n = writes ? sys->pwrite(fd, data, io->bytes - done, at) :
                                     sys->pread(fd, data, io->bytes - done, at);

                if (n < 0 && errno == EINTR)
                        continue;
                if (n <= 0)
                        return n < 0 ? -errno : -EIO;
                done += (uint64_t)n;
        }
        return 0;
}

static void by_calls(struct device *d, struct disk_io *ios, uint32_t n, bool writes) {
        for (uint32_t i = 0; i < n; i++)
                ios[i].error = transfer(d->fd, &ios[i], writes);
}

/* ---- by io_uring ----------------------------------------------------------------------------- */

static void submit_one(struct device *d, struct disk_io *io, bool writes) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&d->ring);

        if (writes)
                io_uring_prep_write(sqe, d->fd, io->data, io->bytes, io->at);
        else
                io_uring_prep_read(sqe, d->fd, io->data, io->bytes, io->at);
        io_uring_sqe_set_data(sqe, io);
}

/* One that was short is done again by a call, which says why. */
static void take_one(struct device *d, struct io_uring_cqe *cqe, bool writes) {
        struct disk_io *io = io_uring_cqe_get_data(cqe);
        int n = sys->completion(cqe->res);

        io->error = n == (int)io->bytes                           ? 0 :
                    n >= 0 || errno == EAGAIN || errno == EINTR ? transfer(d->fd, io, writes) :
                                                                  -errno;
        io_uring_cqe_seen(&d->ring, cqe);
}

static void by_ring(struct device *d, struct disk_io *ios, uint32_t n, bool writes) {
        uint32_t begun = 0, done = 0;

        while (done < n) {
                struct io_uring_cqe *cqe;

                while (begun < n && begun - done < DEPTH)
                        submit_one(d, &ios[begun++], writes);
                if (sys->uring(io_uring_submit_and_wait(&d->ring, 1)) < 0 && errno != EINTR &&
                    errno != EAGAIN && errno != EBUSY)
                        abort(); /* the kernel may still write: nothing here is safe any more */
                while (io_uring_peek_cqe(&d->ring, &cqe) == 0) {
                        take_one(d, cqe, writes);
                        done++;
                }
        }
}

/* ---- the disk -------------------------------------------------------------------------------- */

static void transfer_all(struct disk *disk, struct disk_io *ios, uint32_t n, bool writes) {
        struct device *d = container_of(disk, struct device, disk);

        if (d->ring_is_there)
                by_ring(d, ios, n, writes);
        else
                by_calls(d, ios, n, writes);
}

static void read_all(struct disk *disk, struct disk_io *ios, uint32_t n) {
        transfer_all(disk, ios, n, false);
}

static void write_all(struct disk *disk, struct disk_io *ios, uint32_t n) {
        transfer_all(disk, ios, n, true);
}

static int flush(struct disk *disk) {
        return sys->fdatasync(container_of(disk, struct device, disk)->fd) < 0 ? -errno : 0;
}

int device_new(int fd, uint64_t bytes, struct device **ret) {
        struct device *d = sys->calloc(1, sizeof *d);

        if (!d)
                return -ENOMEM;
        d->disk = (struct disk){
                .bytes = bytes, .read = read_all, .write = write_all, .flush = flush};
        d->fd = fd;
        d->ring_is_there = sys->uring(io_uring_queue_init(DEPTH, &d->ring, 0)) == 0;
        *ret = d;
        return 0;
}

struct disk *device_disk(struct device *device) {
        return &device->disk;
}

/* ---- a new file ------------------------------------------------------------------------------ */

static int write_zeros(int fd, uint64_t at, uint32_t bytes) {
        struct disk_io io = {.at = at, .bytes = bytes};
        int r;

        io.data = sys->mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                            0);
        if (io.data == MAP_FAILED)
                return -ENOMEM;
        r = transfer(fd, &io, true);
        munmap(io.data, bytes);
        return r;
}

/* Zeros are written, not promised: a block that the file system has yet to find may not come. */
int device_fill(int fd, uint64_t bytes, uint64_t *done) {
        struct stat st;
        uint64_t at;
        int r;

        if (fstat(fd, &st) < 0)
                return -errno;
        *done = bytes;
        if (S_ISBLK(st.st_mode))
                return 0;
        at = (uint64_t)st.st_size / DISK_SECTOR * DISK_SECTOR;
        if (at >= bytes)
                return sys->ftruncate(fd, (off_t)bytes) < 0 ? -errno : 0;
        r = write_zeros(fd, at, (uint32_t)MIN(bytes - at, FILL_BYTES));
        if (r < 0)
                return r;
        *done = MIN(at + FILL_BYTES, bytes);
        return 1;
}
