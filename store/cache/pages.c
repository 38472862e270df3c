/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which pages host memory has. Reserved 2 MiB pages (hugetlb) are taken if there are enough for the
 * whole pool, of which some may be in segments of the previous daemon. Otherwise the kernel is
 * asked to make 2 MiB pages of ordinary memory (store_large), so that this memory needs one fault
 * and one entry of a page table in each process instead of 512.
 */

#include <errno.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "ipc/base/device.h"
#include "ipc/base/numa.h"
#include "ipc/base/sys.h"
#include "store/cache/cache.h"
#include "store/keep.h"

/* ---- NUMA ------------------------------------------------------------------------------------ */

uint32_t pages_home(const struct store *store, uint32_t node) {
        for (uint32_t i = 0; node && i < store->pages.n_nodes; i++)
                if (store->pages.nodes[i] == node - 1)
                        return 1 + i;
        return 0;
}

static int spread(const struct pages *pages, int fd, uint64_t bytes) {
        uint64_t n;
        int r = 0;

        for (uint64_t i = 0; r == 0 && pages->n_nodes && i < bytes; i += n) {
                n = MIN(bytes - i, SHARED_LARGE);
                r = numa_place(fd, i, n, pages->nodes[i / SHARED_LARGE % pages->n_nodes]);
        }
        return r;
}

int pages_place(const struct store *store, int fd, uint64_t bytes, uint32_t home) {
        return home ? numa_place(fd, 0, bytes, store->pages.nodes[home - 1]) :
                      spread(&store->pages, fd, bytes);
}

static void find_nodes(struct store *store) {
        struct pages *pages = &store->pages;

        if (store->config.backend != KVD_BACKEND_HOST)
                return;
        for (uint32_t i = 0; i < 64 && pages->n_nodes < STORE_NODES; i++)
                if (store->config.nodes >> i & 1)
                        pages->nodes[pages->n_nodes++] = (uint8_t)i;
}

/* ---- reserved pages -------------------------------------------------------------------------- */

uint64_t store_free_huge_bytes(void) {
        FILE *f = fopen("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "re");
        unsigned long long n = 0;

        if (!f)
                return 0;
        if (fscanf(f, "%llu", &n) != 1)
                n = 0;
        fclose(f);
        return n * SHARED_LARGE;
}

uint64_t pages_reserved_in(int fd) {
        struct statfs fs;
        struct stat st;

        return fstatfs(fd, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC && fstat(fd, &st) == 0 ?
                       (uint64_t)st.st_blocks * 512 :
                       0;
}

static uint64_t needed_for_pool(const struct store *store) {
        return ALIGN_UP(store->config.pool_bytes, SHARED_LARGE);
}

static void set_huge(struct store *store, bool huge) {
        store->pages.huge = huge;
        store->pages.bytes = huge ? SHARED_LARGE : sys_page_bytes();
        store->pages.large = store->config.pages != STORE_PAGES_SMALL && sys_page_bytes() == 4096;
}

void pages_choose(struct store *store) {
        uint64_t needed = needed_for_pool(store);
        uint64_t have = store->config.pages == STORE_PAGES_AUTO ? store_free_huge_bytes() : 0;

        find_nodes(store);
        store->pages.too_few = have && have < needed;
        set_huge(store, store->config.pages == STORE_PAGES_HUGE || have >= needed);
}

void pages_choose_again(struct store *store, uint64_t reserved_before) {
        bool enough = store_free_huge_bytes() + reserved_before >= needed_for_pool(store);

        if (store->config.pages != STORE_PAGES_AUTO || store->config.backend != KVD_BACKEND_HOST)
                return;
        set_huge(store, reserved_before && enough);
        store->pages.too_few |= reserved_before && !enough;
}

int store_check_pages(struct store *store, const struct kept_file *files, size_t n) {
        uint64_t needed = needed_for_pool(store), have = store_free_huge_bytes();

        if (store->config.pages != STORE_PAGES_HUGE || store->config.backend != KVD_BACKEND_HOST)
                return 0;
        for (size_t i = 0; i < n; i++)
                have += pages_reserved_in(files[i].fd);
        if (have >= needed)
                return 0;
        return store_refuse(store, -ENOMEM,
                            "pages = huge needs %llu reserved 2 MiB pages and %llu are free; "
                            "raise vm.nr_hugepages or set pages = auto",
                            (unsigned long long)(needed / SHARED_LARGE),
                            (unsigned long long)(have / SHARED_LARGE));
}

/* ---- large pages ----------------------------------------------------------------------------- */

#define TABLE_PART \
        32u /* tables are wanted once that part of the ids is used: then all their pages are */

static void want(struct space *space, uint64_t from, uint64_t to) {
        const struct store_large *maker = &space_store(space)->pages.maker;

        to = MIN(to, space->ix->size) / SHARED_LARGE * SHARED_LARGE;
        from = from / SHARED_LARGE * SHARED_LARGE;
        if (from < to)
                maker->want(maker->data, space->index.fd, from, to - from);
}

void pages_want_index(struct space *space, uint32_t ids) {
        const struct kvd_index *ix = space->ix;
        uint32_t few = ix->capacity / TABLE_PART, runs = ix->run_capacity - space->runs.n_free;
        uint32_t ids_before = space->memory.large.ids, runs_before = space->memory.large.runs;

        if (!space_store(space)->pages.maker.want || !space_store(space)->pages.large)
                return;
        want(space, ix->desc_off + (uint64_t)ids_before * ix->desc_stride,
             ix->desc_off + (uint64_t)ids * ix->desc_stride);
        want(space, ix->run_off + (uint64_t)runs_before * ix->run_stride,
             ix->run_off + (uint64_t)runs * ix->run_stride);
        if (ids_before <= few && ids > few)
                want(space, ix->table_off, ix->desc_off);
        space->memory.large.ids = MAX(ids_before, ids);
        space->memory.large.runs = MAX(runs_before, runs);
}

void store_on_large(struct store *store, const struct store_large *large) {
        store->pages.maker = *large;
}

bool store_wants_pages(const struct store *store) {
        return store->pages.too_few && !store->pages.huge;
}

const char *store_pages_name(const struct store *store) {
        if (store->config.backend != KVD_BACKEND_HOST)
                return "GPU memory";
        return store->pages.huge  ? "2 MiB, reserved" :
               store->pages.large ? "2 MiB, as far as the kernel has them" :
                                    "4 KiB";
}
