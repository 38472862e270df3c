/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs the store's state machine from seeds (world.h), and checks its answers.
 *
 *      machine PART [--seconds N] [--rounds N] [--seed N]
 *
 *      replay   each seed runs twice: every answer is the same
 *      pairs    each seed runs with domain A and without it: domain B's answers are the same
 *      full     every block is filled or pinned, and clients continue: no operation takes long.
 *               Slow ones are repeated, and the shortest time of each counts
 *      canary   memory moves from domain to domain, and from deleted spaces to new ones: it is zero
 *
 * A part ends after --rounds, or after --seconds. The last line has its figures.
 */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/sanitized.h"
#include "tests/store/world.h"

#define STEPS 300u /* operations per seed */
#define POOL_BLOCKS 256u
#define MOST_US (SANITIZED ? 100000u : 10000u) /* processor time of one operation, at most */
/*
 * How many times to repeat slow operations, at most: the kernel may charge the work of another
 * process to this thread.
 */
#define MOST_PLAYS 12

struct run {
        uint64_t seed, rounds;
        time_t end;
        uint64_t done, operations, blocks_compared, bytes_wrong;
};

static bool goes_on(const struct run *r) {
        return r->rounds ? r->done < r->rounds : time(NULL) < r->end;
}

static void add_up(struct run *r, const struct world *w) {
        for (uint32_t i = 0; i < ARRAY_SIZE(w->parties); i++) {
                r->operations += w->parties[i].operations;
                r->blocks_compared += w->parties[i].blocks_compared;
                r->bytes_wrong += w->parties[i].bytes_wrong;
        }
        if (r->bytes_wrong)
                die("seed %llu: wrong bytes", (unsigned long long)r->seed + r->done);
}

/* ---- replay, pairs --------------------------------------------------------------------------- */

/* The order of turns follows from the seed, too. with_a: false leaves out A's turns. */
static void play(struct run *r, uint64_t seed, bool with_a, uint64_t traces[2]) {
        struct random turns = {seed};
        struct world w;

        world_open(&w, seed, POOL_BLOCKS);
        for (uint32_t i = 0; i < STEPS; i++) {
                uint32_t party = random_below(&turns, 2);

                if (party == 1 || with_a)
                        world_step(&w, party);
        }
        world_check(&w);
        traces[0] = w.parties[0].trace;
        traces[1] = w.parties[1].trace;
        add_up(r, &w);
        world_close(&w);
}

static void replay(struct run *r) {
        uint64_t first[2], second[2];

        for (; goes_on(r); r->done++) {
                play(r, r->seed + r->done, true, first);
                play(r, r->seed + r->done, true, second);
                if (memcmp(first, second, sizeof first) != 0)
                        die("seed %llu does not replay", (unsigned long long)(r->seed + r->done));
        }
        printf("{\"seeds\": %llu, ", (unsigned long long)r->done);
}

static void pairs(struct run *r) {
        uint64_t with[2], without[2];

        for (; goes_on(r); r->done++) {
                play(r, r->seed + r->done, true, with);
                play(r, r->seed + r->done, false, without);
                if (with[1] != without[1])
                        die("seed %llu: B is answered differently beside A",
                            (unsigned long long)(r->seed + r->done));
        }
        printf("{\"pairs\": %llu, ", (unsigned long long)r->done);
}

/* ---- full ------------------------------------------------------------------------------------ */

static uint64_t own_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Pins all blocks. No client unpins or leaves, so after a while every block is in use. */
static void hold_everything(struct world *w) {
        for (uint32_t party = 0; party < 2; party++)
                for (uint32_t i = 0; i < ARRAY_SIZE(w->parties[party].users); i++) {
                        struct user *u = &w->parties[party].users[i];

                        for (uint32_t k = 0; u->words && k < POOL_BLOCKS; k++) {
                                kvd_group_use(u->groups, k);
                                u->words[k].pins = MAX(u->words[k].pins, 1);
                        }
                }
}

static uint64_t time_step(struct world *w, struct random *turns) {
        uint64_t began;

        hold_everything(w);
        began = own_ns();
        world_step(w, random_below(turns, 2));
        return own_ns() - began;
}

#define MAX_DEAR 1000u

/* The slow operations, with the shortest time of each in all plays. */
struct dear {
        uint64_t nth, ns;
};

static struct dear dear[MAX_DEAR];
static uint32_t n_dear;

static void note_dear(uint64_t nth, uint64_t ns) {
        if (n_dear == MAX_DEAR)
                die("%u operations took more than %u us of the processor", MAX_DEAR, MOST_US);
        dear[n_dear++] = (struct dear){nth, ns};
}

/* Plays once, and records slow operations. Returns the longest time of all others. */
static uint64_t play_full(struct run *r, uint64_t *refused) {
        struct random turns = {r->seed};
        struct world w;
        uint64_t most = 0;

        world_open(&w, r->seed, POOL_BLOCKS);
        for (; goes_on(r); r->done++) {
                uint64_t ns = time_step(&w, &turns);

                if (ns / 1000 > MOST_US)
                        note_dear(r->done, ns);
                else
                        most = MAX(most, ns);
                *refused += store_pool_used(w.store) == store_pool_bytes(w.store);
        }
        world_check(&w);
        add_up(r, &w);
        world_close(&w);
        return most;
}

/* Plays the same again, up to the last slow operation, and keeps the shortest times. */
static void play_dear(const struct run *r) {
        uint64_t end = dear[n_dear - 1].nth + 1;
        struct random turns = {r->seed};
        struct dear *next = dear;
        struct world w;

        world_open(&w, r->seed, POOL_BLOCKS);
        for (uint64_t nth = 0; nth < end; nth++) {
                uint64_t ns = time_step(&w, &turns);

                if (nth == next->nth) {
                        next->ns = MIN(next->ns, ns);
                        next++;
                }
        }
        world_close(&w);
}

static uint64_t most_of_dear(void) {
        uint64_t most = 0;

        for (uint32_t i = 0; i < n_dear; i++)
                most = MAX(most, dear[i].ns);
        return most;
}

static void full(struct run *r) {
        uint64_t refused = 0, most = play_full(r, &refused);

        for (int plays = 1; most_of_dear() / 1000 > MOST_US && plays < MOST_PLAYS; plays++)
                play_dear(r);
        most = MAX(most, most_of_dear());
        if (most / 1000 > MOST_US)
                die("an operation took %llu us of the processor", (unsigned long long)most / 1000);
        printf("{\"full_operations\": %llu, \"most_us\": %llu, \"played_again\": %u, ",
               (unsigned long long)refused, (unsigned long long)most / 1000, n_dear);
}

/* ---- canary ---------------------------------------------------------------------------------- */

static struct space *fresh_space(struct world *w, uint64_t nth) {
        struct space *space;

        w->turn = &w->parties[nth / 2 % 2]; /* each domain twice: it reuses its own memory, too */
        if (world_space(w, (uint32_t)nth, &space) < 0)
                die("%s", store_why(w->store));
        return space;
}

/* Counts the words of a new segment that are not zero: old data. Then fills the segment. */
static uint64_t search_and_fill(struct space *space, uint32_t segment) {
        int fd = space_worker_segment_fd(space, segment);
        struct stat st;
        uint64_t *words, found = 0;

        if (fd < 0 || fstat(fd, &st) < 0)
                return 0;
        words = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (words == MAP_FAILED)
                die("mmap: %s", strerror(errno));
        for (size_t i = 0; i < (size_t)st.st_size / 8; i++)
                found += words[i] != 0;
        memset(words, 0xca, (size_t)st.st_size);
        munmap(words, (size_t)st.st_size);
        return found * 8;
}

static uint32_t allocate_all(struct attachment *a) {
        kvd_ref blocks[POOL_BLOCKS];
        uint32_t n = 0;

        for (int r = 1; r > 0 && n<POOL_BLOCKS; n += r> 0 ? (uint32_t)r : 0)
                r = space_allocate(a, POOL_BLOCKS, blocks);
        return n;
}

static void settle(struct world *w) {
        for (int i = 0; i < 100000 && store_idle(w->store); i++)
                ;
}

static void canary(struct run *r) {
        uint64_t segments = 0, found = 0;
        struct world w;

        world_open(&w, r->seed, POOL_BLOCKS);
        for (; goes_on(r); r->done++) {
                struct space *space = fresh_space(&w, r->done);
                struct attachment *a;

                if (attachment_new(space, NULL, 1, NULL, &a) < 0)
                        die("%s", store_why(w.store));
                if (!allocate_all(a))
                        die("round %llu: the memory is not back", (unsigned long long)r->done);
                for (uint32_t i = 0; i < space_index(space)->max_segments; i++) {
                        found += search_and_fill(space, i);
                        segments++;
                }
                space_delete(space, true);
                settle(&w);
        }
        world_close(&w);
        if (found)
                die("%llu bytes of what was deleted were found", (unsigned long long)found);
        printf("{\"switches\": %llu, \"bytes_found\": %llu, ", (unsigned long long)segments,
               (unsigned long long)found);
}

/* ---- main ------------------------------------------------------------------------------------ */

static const struct part {
        const char *name;
        void (*run)(struct run *);
} parts[] = {{"replay", replay}, {"pairs", pairs}, {"full", full}, {"canary", canary}};

static const struct part *part_of(const char *name) {
        for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
                if (name && strcmp(parts[i].name, name) == 0)
                        return &parts[i];
        die("usage: machine replay|pairs|full|canary [--seconds N] [--rounds N] [--seed N]");
}

int main(int argc, char **argv) {
        static const struct option known[] = {{"seconds", required_argument, NULL, 's'},
                                              {"rounds", required_argument, NULL, 'n'},
                                              {"seed", required_argument, NULL, 'r'},
                                              {0}};
        struct run r = {.seed = (uint64_t)time(NULL) << 20, .end = time(NULL) + 5};
        int c;

        while ((c = getopt_long(argc, argv, "", known, NULL)) != -1)
                switch (c) {
                case 's': r.end = time(NULL) + atoi(optarg); break;
                case 'n': r.rounds = strtoull(optarg, NULL, 10); break;
                case 'r': r.seed = strtoull(optarg, NULL, 10); break;
                default: return 2;
                }
        part_of(argv[optind])->run(&r);
        printf("\"operations\": %llu, \"blocks_compared\": %llu, \"wrong_bytes\": %llu, \"seed\": "
               "%llu}\n",
               (unsigned long long)r.operations, (unsigned long long)r.blocks_compared,
               (unsigned long long)r.bytes_wrong, (unsigned long long)r.seed);
        return 0;
}
