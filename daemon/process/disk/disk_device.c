/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads and writes many records at once. The descriptor was opened with O_DIRECT, where possible,
 * so that nothing is cached twice. Flushes are fdatasync: once it returns, all earlier writes are
 * on the disk.
 */

#include "daemon/process/disk/disk_device.h"

#include <errno.h>
#include <liburing.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define TOGETHER_BYTES (UINT64_C(1) << 20)
#define FILL_BYTES (UINT64_C(16) << 20) /* maximum number of zeros that a call writes */

struct device {
        struct disk disk;
        int fd;
        bool ring_is_there;
        struct io_uring ring;
        uint32_t in_ring;
        uint64_t held;  /* bytes of I/Os in the ring that are not submitted yet */
        uint8_t *known; /* memory registered with the ring; NULL: none */
        uint64_t known_bytes;
        struct disk_io *done[DISK_DEPTH]; /* by calls, without the ring */
        uint32_t n_done;
};

/* ---- one after the other --------------------------------------------------------------------- */

static bool is_behind_end(int fd, uint64_t at) {
        struct stat st;

        return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size <= at;
}

/* Continues short transfers. Parts behind the end of a file read as zeros. */
static int transfer(int fd, const struct disk_io *io, bool writes) {
        for (uint64_t done = 0; done < io->bytes;) {
                uint8_t *data = (uint8_t *)io->data + done;
                off_t at = (off_t)(io->at + done);
                ssize_t n = writes ? sys->pwrite(fd, data, io->bytes - done, at) :
                                     sys->pread(fd, data, io->bytes - done, at);

                if (n < 0 && errno == EINTR)
                        continue;
                if (n < 0)
                        return negative_errno();
                done += (uint64_t)n;
                if (n > 0 && n % DISK_SECTOR == 0)
                        continue;
                if (!writes && is_behind_end(fd, io->at + done)) {
                        memset(data + n, 0, io->bytes - done);
                        return 0;
                }
                if (n == 0)
                        return -EIO;
        }
        return 0;
}

/* ---- by io_uring ----------------------------------------------------------------------------- */

static bool submit(struct device *d, uint32_t wait) {
        d->held = 0;
        if (sys->uring(wait ? io_uring_submit_and_wait(&d->ring, wait) :
                              io_uring_submit(&d->ring)) >= 0)
                return true;
        if (errno != EINTR && errno != EAGAIN && errno != EBUSY)
                abort(); /* the kernel may still write to memory: no state is safe any more */
        return false;
}

static bool is_known(const struct device *d, const struct disk_io *io) {
        uint64_t at = (uint64_t)((uint8_t *)io->data - d->known);

        return d->known && at < d->known_bytes && io->bytes <= d->known_bytes - at;
}

static void prepare(struct device *d, struct io_uring_sqe *sqe, struct disk_io *io, bool writes) {
        int fd = d->fd;

        if (is_known(d, io) && writes)
                io_uring_prep_write_fixed(sqe, fd, io->data, io->bytes, io->at, 0);
        else if (is_known(d, io))
                io_uring_prep_read_fixed(sqe, fd, io->data, io->bytes, io->at, 0);
        else if (writes)
                io_uring_prep_write(sqe, fd, io->data, io->bytes, io->at);
        else
                io_uring_prep_read(sqe, fd, io->data, io->bytes, io->at);
        io_uring_sqe_set_data(sqe, io);
}

/*
 * The disk works while the next I/Os are prepared. Small ones are submitted together: a call costs
 * the same for many, and the kernel merges adjacent ones.
 */
static void begin_in_ring(struct device *d, struct disk_io *io, bool writes) {
        prepare(d, io_uring_get_sqe(&d->ring), io, writes);
        io->error = writes;
        d->in_ring++;
        d->held += io->bytes;
        if (d->held >= TOGETHER_BYTES)
                submit(d, 0);
}

/* Repeats a short or interrupted I/O by a call, which returns the reason. */
static void take_one(struct device *d, struct io_uring_cqe *cqe, struct disk_io *io) {
        int n = sys->completion(cqe->res);
        bool writes = io->error;

        io->error = n == (int)io->bytes                         ? 0 :
                    n >= 0 || errno == EAGAIN || errno == EINTR ? transfer(d->fd, io, writes) :
                                                                  negative_errno();
        io_uring_cqe_seen(&d->ring, cqe);
        d->in_ring--;
}

static struct disk_io *end_in_ring(struct device *d) {
        struct io_uring_cqe *cqe;
        struct disk_io *io;

        while (io_uring_peek_cqe(&d->ring, &cqe) != 0)
                submit(d, 1);
        io = io_uring_cqe_get_data(cqe);
        take_one(d, cqe, io);
        return io;
}

/* ---- the disk -------------------------------------------------------------------------------- */

static void begin(struct disk *disk, struct disk_io *io, bool writes) {
        struct device *d = container_of(disk, struct device, disk);

        if (d->ring_is_there) {
                begin_in_ring(d, io, writes);
                return;
        }
        io->error = transfer(d->fd, io, writes);
        d->done[d->n_done++] = io;
}

static struct disk_io *end(struct disk *disk) {
        struct device *d = container_of(disk, struct device, disk);

        if (d->n_done)
                return d->done[--d->n_done];
        return d->in_ring ? end_in_ring(d) : NULL;
}

static int flush(struct disk *disk) {
        struct device *d = container_of(disk, struct device, disk);

        return sys->fdatasync(d->fd) < 0 ? negative_errno() : 0;
}

/* Uses large pages, and registers the memory to save look-ups by the kernel, where allowed. */
static void take_staging(struct disk *disk, void *memory, uint64_t bytes) {
        struct device *d = container_of(disk, struct device, disk);
        struct iovec all = {memory, bytes};

        sys->madvise(memory, bytes, MADV_HUGEPAGE);
        if (!d->ring_is_there || sys->uring(io_uring_register_buffers(&d->ring, &all, 1)) < 0)
                return;
        d->known = memory;
        d->known_bytes = bytes;
}

int device_new(int fd, uint64_t bytes, struct device **ret) {
        struct device *d = sys->calloc(1, sizeof *d);

        if (!d)
                return -ENOMEM;
        d->fd = fd;
        d->disk = (struct disk){.bytes = bytes,
                                .begin = begin,
                                .end = end,
                                .flush = flush,
                                .staging = take_staging};
        d->ring_is_there = sys->uring(io_uring_queue_init(DISK_DEPTH, &d->ring, 0)) == 0;
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

/* Writes zeros, since a block that is not allocated yet might not be available later. */
int device_fill(int fd, uint64_t bytes, uint64_t *done) {
        struct stat st;
        uint64_t at;
        int r;

        if (fstat(fd, &st) < 0)
                return negative_errno();
        *done = bytes;
        if (S_ISBLK(st.st_mode))
                return 0;
        at = (uint64_t)st.st_size / DISK_SECTOR * DISK_SECTOR;
        if (at >= bytes)
                return 0;
        r = write_zeros(fd, at, (uint32_t)MIN(bytes - at, FILL_BYTES));
        if (r < 0)
                return r;
        *done = MIN(at + FILL_BYTES, bytes);
        return 1;
}
