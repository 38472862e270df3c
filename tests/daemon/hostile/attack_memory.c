/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attacks through shared memory: a client fills its own page with garbage, and tries to write
 * memory that it must not write.
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/daemon/hostile/hostile.h"
#include "tests/daemon/hostile/raw.h"
#include "tests/lib/oracle.h"

struct mapped {
        int fd; /* connection */
        uint32_t handle;
        struct kvd_fds fds; /* index, pins */
        uint64_t index_bytes, pin_bytes;
        const struct kvd_index *index;
        uint8_t *pins;
};

static void map_victim_space(const struct hostile *h, struct mapped *m) {
        struct kvd_msg request = victim_space_message(), reply;

        m->fd = raw_attach(h->daemon.socket);
        if (raw_call(m->fd, &request, &reply, &m->fds) != 1 ||
            reply.number != KVD_MSG_space_reply || m->fds.n != 2)
                die("the victim's space cannot be opened");
        m->handle = reply.space_reply.space;
        m->index_bytes = reply.space_reply.index_bytes;
        m->pin_bytes = reply.space_reply.pin_bytes;
        m->index = mmap(NULL, m->index_bytes, PROT_READ, MAP_SHARED, m->fds.fd[0], 0);
        m->pins = mmap(NULL, m->pin_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->fds.fd[1], 0);
        if (m->index == MAP_FAILED || m->pins == MAP_FAILED)
                die("mmap: %s", strerror(errno));
}

static void refused(bool ok, const char *what) {
        if (ok)
                die("%s was not refused", what);
}

/* ---- the pin page ---------------------------------------------------------------------------- */

static void fill_with_ones(const struct hostile *h) {
        struct mapped m;

        map_victim_space(h, &m);
        memset(m.pins, 0xff, m.pin_bytes);
        hostile_goes_on(h, 200);
}

/*
 * Forged posts with blocks of the attacker and of others, and with arbitrary parents, which change
 * while the daemon reads them. The posted counter is plausible half of the time, and random
 * otherwise.
 */
static void noise_in_posts(const struct hostile *h) {
        struct kvd_msg allocate = {.number = KVD_MSG_allocate, .allocate = {.count = 32}};
        struct random random = {78};
        struct kvd_pinpage *page;
        struct kvd_msg reply;
        struct mapped m;
        uint32_t *words, n_words;
        kvd_ref own[32];

        map_victim_space(h, &m);
        allocate.allocate.space = m.handle;
        if (raw_call(m.fd, &allocate, &reply, NULL) != 1 ||
            reply.number != KVD_MSG_allocate_reply ||
            reply.allocate_reply.blocks.size < sizeof *own)
                die("no blocks to post");
        memset(own, 0, sizeof own);
        memcpy(own, reply.allocate_reply.blocks.data, reply.allocate_reply.blocks.size);
        page = (struct kvd_pinpage *)(void *)m.pins;
        words = (uint32_t *)(void *)(m.pins + kvd_posts_off(page->capacity));
        n_words = KVD_POSTS * (uint32_t)kvd_post_stride(m.index->geometry.block_tokens) / 4;
        for (uint32_t i = 0; i < 20000; i++) {
                struct kvd_msg post = {.number = KVD_MSG_post, .serial = i};
                uint8_t frame[64];
                ssize_t n;

                for (uint32_t k = 0; k < 64; k++) {
                        uint32_t at = random_below(&random, n_words / 2) * 2, which = k % 4;
                        kvd_ref ref = own[random_below(&random, 32)];

                        if (which < 2)
                                memcpy(words + at, &ref, sizeof ref);
                        else
                                words[at] = random_below(&random, which == 2 ? 64 : UINT32_MAX);
                }
                atomic_store(&page->posted, i % 2 ? atomic_load(&page->posts_taken) + 64 :
                                                    random_below(&random, UINT32_MAX));
                if (i % 4 == 0)
                        post = (struct kvd_msg){.number = KVD_MSG_flush, .flush = {m.handle}};
                n = kvd_msg_encode(&post, frame, sizeof frame);
                if (i % 4 == 0)
                        raw_exchange(m.fd, frame, (size_t)n, &reply);
                else if (send(m.fd, frame, (size_t)n, MSG_NOSIGNAL) != n)
                        die("a post was not taken: %s", strerror(errno));
        }
}

/*
 * Random words all over the page, while the daemon evicts. Pins come and go; times and counters are
 * nonsense.
 */
static void fill_with_noise(const struct hostile *h) {
        struct random random = {77};
        struct mapped m;
        uint32_t *words;

        map_victim_space(h, &m);
        words = (uint32_t *)(void *)m.pins;
        for (uint32_t i = 0; i < 20000000; i++)
                __atomic_store_n(&words[random_below(&random, (uint32_t)(m.pin_bytes / 4))],
                                 random_below(&random, 3) ? 0 : random_below(&random, UINT32_MAX),
                                 __ATOMIC_RELAXED);
}

static bool is_pin(uint64_t at, uint32_t capacity) {
        return at < kvd_use_off(capacity) &&
               (at - KVD_PINS_OFF) % sizeof(struct kvd_pin_words) == 0;
}

static void noise_in_touch_and_counters(const struct hostile *h) {
        struct random random = {78};
        struct mapped m;

        map_victim_space(h, &m);
        for (int round = 0; round < 300; round++) {
                for (uint64_t i = KVD_PINS_OFF; i < m.pin_bytes; i += 4)
                        if (!is_pin(i, m.index->capacity))
                                __atomic_store_n((uint32_t *)(void *)(m.pins + i),
                                                 random_below(&random, UINT32_MAX),
                                                 __ATOMIC_RELAXED);
                /* header and counters */
                memset(m.pins, (int)random_below(&random, 256), KVD_PINS_OFF);
                usleep(1000);
        }
}

static void resize_pins(const struct hostile *h) {
        struct mapped m;
        int fd;

        map_victim_space(h, &m);
        fd = m.fds.fd[1];
        refused(ftruncate(fd, 0) == 0, "shrinking the pin page");
        refused(ftruncate(fd, (off_t)m.pin_bytes - 4096) == 0, "shrinking the pin page a little");
        refused(ftruncate(fd, (off_t)m.pin_bytes * 2) == 0, "growing the pin page");
        refused(fallocate(fd, 0, (off_t)m.pin_bytes, 4096) == 0,
                "growing the pin page by fallocate");
        refused(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096) == 0, "collapsing the pin page");
        refused(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0, "sealing the pin page");
        /* a client may punch holes in its own page: they read as no pins */
        for (int i = 0; i < 300; i++) {
                memset(m.pins + KVD_PINS_OFF, 1, m.pin_bytes - KVD_PINS_OFF);
                if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                              (off_t)m.pin_bytes) < 0)
                        die("punching a hole: %s", strerror(errno));
                usleep(500);
        }
}

/* ---- the index ------------------------------------------------------------------------------- */

static void try_write(int fd, uint64_t bytes, const char *how) {
        refused(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED, how);
        refused(write(fd, "x", 1) == 1, how);
        refused(pwrite(fd, "x", 1, 0) == 1, how);
        refused(ftruncate(fd, 0) == 0, how);
        refused(ftruncate(fd, (off_t)bytes * 2) == 0, how);
        refused(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0, how);
        refused(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0, how);
}

static void write_index(const struct hostile *h) {
        struct mapped m;
        char path[64];
        int fd;

        map_victim_space(h, &m);
        try_write(m.fds.fd[0], m.index_bytes, "writing the index");
        refused(mprotect((void *)m.index, m.index_bytes, PROT_READ | PROT_WRITE) == 0,
                "mprotect of the index");
        snprintf(path, sizeof path, "/proc/self/fd/%d", m.fds.fd[0]);
        fd = open(path, O_RDWR); /* the same user may open it, but the seal still applies */
        if (fd >= 0)
                try_write(fd, m.index_bytes, "writing the index through a second descriptor");
        fd = open("/proc/self/mem", O_RDWR);
        if (fd >= 0)
                refused(pwrite(fd, "x", 1, (off_t)(uintptr_t)m.index) == 1,
                        "writing the index through /proc/self/mem");
}

static void resize_segments(const struct hostile *h) {
        struct kvd_msg request = {.number = KVD_MSG_segments, .serial = 1}, reply;
        struct kvd_fds fds;
        struct mapped m;
        struct stat st;

        map_victim_space(h, &m);
        request.segments.space = m.handle;
        if (raw_call(m.fd, &request, &reply, &fds) != 1 || reply.number != KVD_MSG_segments_reply ||
            !fds.n)
                die("no segments");
        for (uint32_t i = 0; i < fds.n; i++) {
                if (fstat(fds.fd[i], &st) < 0)
                        die("fstat");
                refused(ftruncate(fds.fd[i], 0) == 0, "shrinking a segment");
                refused(ftruncate(fds.fd[i], st.st_size * 2) == 0, "growing a segment");
                refused(fcntl(fds.fd[i], F_ADD_SEALS, F_SEAL_WRITE) == 0, "sealing a segment");
        }
        request.segments.first = 8191;
        if (raw_call(m.fd, &request, &reply, &fds) != 1 || reply.number != KVD_MSG_segments_reply ||
            fds.n)
                die("segments that do not exist");
}

const struct attack_row memory_attacks[] = {{"a pin page full of ones", fill_with_ones, 1},
                                            {"a pin page full of noise", fill_with_noise, 1},
                                            {"noise in posts", noise_in_posts, 1},
                                            {"noise in times of use and counters",
                                             noise_in_touch_and_counters, 1},
                                            {"resizing and punching the pin page", resize_pins, 1},
                                            {"writing the index", write_index, 1},
                                            {"resizing segments", resize_segments, 1},
                                            {0}};
