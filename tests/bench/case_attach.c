/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The memory that an index takes, and the time until a new client gets an answer from a pool that
 * others have filled.
 *
 *      index-layout      bytes of address space per block: descriptor, tokens, tables, runs
 *      index-resident    bytes of memory behind it, as the kernel counts them
 *      attach            connect, open the space, first answer (a chain of 2,048 tokens); compared with an mmap of as
 *                        much memory as index and pool, with all pages populated
 */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/report.h"

struct world {
        struct chains chains;
        struct kvd_side kvd;
        kvd *handle; /* of the client, which is new each time */
        kvd_space *space;
        struct kvd_pin pin;
        uint32_t tokens[CHAIN_TOKENS], ids[CHAIN_BLOCKS];
        int memfd; /* of the peer */
        size_t bytes;
        void *mapped;
};

/* ---- memory ---------------------------------------------------------------------------------- */

static struct kvd_index layout_of(const struct world *w) {
        struct kvd_index layout = {.geometry = {.block_tokens = w->kvd.geometry.block_tokens,
                                                .vocab = w->kvd.geometry.vocab},
                                   .capacity = (uint32_t)w->chains.n_blocks,
                                   .run_capacity = (uint32_t)w->chains.n_blocks / KVD_RUN_BLOCKS};

        kvd_index_lay_out(&layout);
        return layout;
}

/* Memory behind the daemon's descriptor dir/name, if it is an index. */
static uint64_t index_bytes_of(const char *dir, const char *name) {
        char path[320], target[256] = "";
        struct stat st;

        snprintf(path, sizeof path, "%s/%s", dir, name);
        if (readlink(path, target, sizeof target - 1) < 0 || !strstr(target, "memfd:") ||
            !strstr(target, "index"))
                return 0;
        return stat(path, &st) < 0 ? 0 : (uint64_t)st.st_blocks * 512;
}

/* The daemon may have several descriptors of the same index, so the largest size counts. */
static uint64_t index_resident(const struct process *daemon) {
        uint64_t most = 0;
        struct dirent *entry;
        char dir[64];
        DIR *fds;

        snprintf(dir, sizeof dir, "/proc/%d/fd", (int)daemon->pid);
        fds = opendir(dir);
        if (!fds)
                return 0;
        while ((entry = readdir(fds))) {
                uint64_t bytes = index_bytes_of(dir, entry->d_name);

                most = MAX(most, bytes);
        }
        closedir(fds);
        return most;
}

static void report_memory(const struct bench *bench, const struct world *w) {
        double layout = (double)layout_of(w).size,
               resident = (double)index_resident(&w->kvd.daemon);
        uint64_t n = w->chains.n_blocks;

        if (bench_wants(bench, "index-layout"))
                report_value("index-layout", "kvd", n, layout / (double)n, "B/block");
        if (bench_wants(bench, "index-resident"))
                report_value("index-resident", "kvd", n, resident / (double)n, "B/block");
}

/* ---- attach ---------------------------------------------------------------------------------- */

static int choose(void *ctx, uint32_t chain) {
        struct world *w = ctx;

        chain_tokens(&w->chains, chain, w->tokens);
        return 0;
}

static int attach(void *ctx) {
        struct world *w = ctx;

        if (kvd_open(w->kvd.socket, &w->handle) < 0)
                return 1;
        if (kvd_space_open(w->handle, "bench", &w->kvd.geometry, NULL, &w->space) < 0)
                return 1;
        return kvd_lookup(w->space, 0, w->tokens, CHAIN_TOKENS, w->ids, CHAIN_BLOCKS, &w->pin) !=
               CHAIN_TOKENS;
}

static int detach(void *ctx) {
        struct world *w = ctx;

        if (w->space) {
                kvd_unpin(w->space, &w->pin);
                w->space = kvd_space_close(w->space);
        }
        if (w->handle)
                w->handle = kvd_close(w->handle);
        process_settle(&w->kvd.daemon);
        return 0;
}

static int populate(void *ctx) {
        struct world *w = ctx;

        w->mapped = mmap(NULL, w->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                         w->memfd, 0);
        return w->mapped == MAP_FAILED;
}

static int unmap(void *ctx) {
        struct world *w = ctx;

        return munmap(w->mapped, w->bytes);
}

/* Memory that is allocated already, as in a pool that others have filled. */
static int make_memory(struct world *w) {
        w->bytes = layout_of(w).size + w->chains.n_blocks * kvd_block_bytes(&w->kvd.geometry);
        w->memfd = memfd_create("kvd-bench", MFD_CLOEXEC);
        if (w->memfd < 0 || ftruncate(w->memfd, (off_t)w->bytes) < 0)
                return -errno;
        return populate(w) || unmap(w) ? -ENOMEM : 0;
}

static int run_attach(const struct bench *bench, struct world *w) {
        struct contest contest = bench_contest(bench, "attach", w->chains.n_blocks,
                                               w->chains.n_chains);
        int r;

        if (!bench_wants(bench, contest.name))
                return 0;
        r = make_memory(w);
        if (r < 0)
                return r;
        contest.samples = bench->quick ? 1 : 3;
        contest_add(&contest, (struct contender){"kvd", choose, attach, detach, w});
        contest_add(&contest, (struct contender){"populate", NULL, populate, unmap, w});
        r = bench_run(bench, &contest);
        close(w->memfd);
        return r;
}

int cases_attach(const struct bench *bench) {
        static const char *const names[] = {"index-layout", "index-resident", "attach", NULL};
        static struct world w = {.kvd = {.daemon = NO_PROCESS}};
        char dir[256];
        int r;

        if (!bench_wants_any(bench, names) || !bench->n_sizes)
                return 0;
        snprintf(dir, sizeof dir, "%s/attach", bench->dir);
        if (mkdir(dir, 0700) < 0)
                return -errno;
        w.chains = chains_plan(bench->sizes[bench->n_sizes - 1]);
        r = kvd_side_start(&w.kvd, bench->kvd, dir, &tiny_geometry,
                           w.chains.n_blocks + w.chains.n_blocks / 8);
        if (r >= 0)
                r = fill_chains(&w.kvd, &w.chains);
        if (r >= 0)
                report_memory(bench, &w);
        if (r >= 0)
                r = run_attach(bench, &w);
        kvd_side_end(&w.kvd);
        return r;
}
