/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pairs of runs of a whole daemon, from a seed. In both runs, domain B does the same at the same
 * times, which are the daemon's (tests/lib/clocked.h). In one of them, users of domain A work next
 * to B, in spaces of the same names, and are killed. Both domains have a guarantee, and arenas.
 * Everything that B is told must be the same to the byte: results and reasons, blocks found, block
 * ids, all figures. How long B waits in real time is not compared.
 *
 *      pairs [--seconds N] [--rounds N] [--seed N] [--together]
 *
 * --together puts A's users into B's domain, where B must notice them. If it did not, the
 * comparison would prove nothing. Needs root, to change users.
 */

#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd_methods.h"
#include "ipc/base/util.h"
#include "tests/client/killpoints/chains.h"
#include "tests/lib/clocked.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"

#define USER_A 65533u
#define USER_B 65534u
#define STEPS 40u /* steps of B in a run */
#define TRANSCRIPT (1u << 20)
#define CHAINS 12u
#define HOARD 140u /* blocks of 16 KiB; more than a domain may have */

enum { CAUSAL, WHOLE, LARGE, N_SPACES };

static const char *const names[N_SPACES] = {"causal", "whole", "large"};

static const struct kvd_geometry large_geometry = {.block_tokens = 8,
                                                   .block_bytes = 16384,
                                                   .layout = "pairs"};

struct hold {
        struct kvd_pin pin;
        uint32_t space;
};

struct tenant {
        const char *socket;
        char *told; /* everything that the tenant is told, as text; NULL if it is not recorded */
        size_t n_told;
        struct random random;
        struct kvd *kvd;
        struct kvd_space *spaces[N_SPACES];
        struct conn *conn;
        struct hold holds[4];
        struct kvd_sequence *sequence;
        struct kvd_block hoard[HOARD];
        uint32_t n_hoard;
};

/* ---- what a tenant is told ------------------------------------------------------------------- */

static __attribute__((format(printf, 2, 3))) void note(struct tenant *t, const char *format, ...) {
        va_list args;

        if (!t->told)
                return;
        va_start(args, format);
        t->n_told += (size_t)vsnprintf(t->told + t->n_told, TRANSCRIPT - t->n_told, format, args);
        va_end(args);
        if (t->n_told >= TRANSCRIPT)
                die("the transcript is full");
}

static void note_result(struct tenant *t, const char *what, int64_t r) {
        note(t, "%s: %lld %s\n", what, (long long)r, r < 0 ? kvd_error() : "");
}

static void note_ids(struct tenant *t, uint32_t n, const uint32_t *ids) {
        for (uint32_t i = 0; i < n; i++)
                note(t, " %u", ids[i]);
        note(t, "\n");
}

static void note_field(struct tenant *t, const struct kvd_msg *reply, const struct kvd_field *f) {
        const void *at = (const uint8_t *)reply + f->offset;
        const struct kvd_slice *slice = at;
        char text[256];

        if (f->type == KVD_FIELD_u32)
                note(t, " %s %u", f->name, *(const uint32_t *)at);
        else if (f->type == KVD_FIELD_u64)
                note(t, " %s %llu", f->name, (unsigned long long)*(const uint64_t *)at);
        else if (f->type == KVD_FIELD_str)
                note(t, " %s %s", f->name, kvd_slice_copy(*slice, text, sizeof text));
        else
                for (uint32_t i = 0; i < slice->size; i++)
                        note(t, i ? "%02x" : " bytes %02x", ((const uint8_t *)slice->data)[i]);
}

/* Sends a request, and notes the whole reply except for the caller's pid. */
static int ask(struct tenant *t, uint32_t number, const void *request, struct kvd_msg *reply) {
        const struct kvd_msg_info *info = kvd_msg_info(number + KVD_REPLY);
        int r = conn_call(t->conn, number, request, &reply->attach);

        note_result(t, kvd_msg_info(number)->name, r);
        for (uint32_t i = 0; r == 0 && i < info->n_fields; i++)
                if (strcmp(info->fields[i].name, "pid") != 0)
                        note_field(t, reply, &info->fields[i]);
        note(t, "\n");
        return r;
}

/*
 * Asks for all entries: each such request begins with a cursor, and its reply with the next cursor.
 */
static void ask_all(struct tenant *t, uint32_t number) {
        struct kvd_msg_space_info question = {0};
        struct kvd_msg reply = {0};

        while (ask(t, number, &question, &reply) == 0)
                question.cursor = reply.space_info_reply.next;
}

static void note_space(struct tenant *t, uint32_t i) {
        struct kvd_msg_block_map map = {.space = kvd_slice_of(names[i]), .parents = 1};
        struct kvd_counters n;
        struct kvd_msg reply;

        ask(t, KVD_MSG_block_map, &map, &reply);
        kvd_counters(t->spaces[i], &n);
        note(t, "lookups %llu hits %llu allocated %llu sealed %llu refused %llu\n",
             (unsigned long long)n.lookups, (unsigned long long)n.lookup_hits,
             (unsigned long long)n.blocks_allocated, (unsigned long long)n.blocks_sealed,
             (unsigned long long)n.refused);
}

static void look_around(struct tenant *t) {
        struct kvd_msg reply;

        ask(t, KVD_MSG_daemon_info, NULL, &reply);
        ask_all(t, KVD_MSG_space_info);
        ask_all(t, KVD_MSG_client_info);
        ask_all(t, KVD_MSG_domain_info);
        for (uint32_t i = 0; i < N_SPACES; i++)
                note_space(t, i);
}

/* ---- attaching and leaving ------------------------------------------------------------------- */

static uint32_t below(struct tenant *t, uint32_t n) {
        return random_below(&t->random, n);
}

static void come(struct tenant *t) {
        static const struct kvd_space_options options[N_SPACES] = {
                [WHOLE] = {.kind = KVD_BIDIRECTIONAL}};

        if (kvd_open(t->socket, &t->kvd) < 0 || conn_open(t->socket, "asks", &t->conn) < 0)
                die("%s", kvd_error());
        for (uint32_t i = 0; i < N_SPACES; i++)
                if (kvd_space_open(t->kvd, names[i], i == LARGE ? &large_geometry : &chain_geometry,
                                   &options[i], &t->spaces[i]) < 0)
                        die("%s", kvd_error());
}

static void go(struct tenant *t) {
        struct tenant rest = {.socket = t->socket,
                              .told = t->told,
                              .n_told = t->n_told,
                              .random = t->random};

        t->sequence = kvd_sequence_close(t->sequence);
        for (size_t i = 0; i < ARRAY_SIZE(t->holds); i++)
                kvd_unpin(t->spaces[t->holds[i].space], &t->holds[i].pin);
        kvd_free(t->spaces[LARGE], t->n_hoard, t->hoard);
        for (uint32_t i = 0; i < N_SPACES; i++)
                kvd_space_close(t->spaces[i]);
        kvd_close(t->kvd);
        conn_close(t->conn);
        *t = rest;
}

/* ---- operations ------------------------------------------------------------------------------ */

static void find_and_extend(struct tenant *t) {
        struct hold *h = &t->holds[below(t, ARRAY_SIZE(t->holds))];
        uint32_t chain = below(t, CHAINS), n = 1 + below(t, CHAIN_TOKENS), tokens[CHAIN_TOKENS],
                 ids[CHAIN_BLOCKS];
        bool whole = below(t, 4) == 0;
        int64_t found;

        kvd_unpin(t->spaces[h->space], &h->pin);
        *h = (struct hold){.space = whole ? WHOLE : CAUSAL};
        chain_tokens(chain, CHAIN_TOKENS, tokens);
        kvd_catch_up(t->spaces[h->space]);
        found = kvd_lookup(t->spaces[h->space], 0, tokens, n, ids, CHAIN_BLOCKS, &h->pin);
        note(t, "chain %u of %u tokens, ", chain, n);
        note_result(t, "lookup", found);
        if (found > 0 && chain_wrong(&h->pin, ids, tokens, whole))
                die("wrong bytes");
        note_ids(t, h->pin.n_blocks, ids);
        if (found >= 0 && found < n && found % BT == 0)
                note_result(t, "publish",
                            chain_publish(t->spaces[h->space], &h->pin, tokens, n, whole));
        if (below(t, 2))
                kvd_unpin(t->spaces[h->space], &h->pin);
}

/* Fills its half of the pool, or frees all of it. */
static void hoard(struct tenant *t) {
        uint32_t n = t->n_hoard ? 0 : below(t, HOARD);
        int r = 0;

        kvd_free(t->spaces[LARGE], t->n_hoard, t->hoard);
        t->n_hoard = 0;
        for (; t->n_hoard < n && r >= 0; t->n_hoard += (uint32_t)MAX(r, 0))
                r = kvd_alloc(t->spaces[LARGE], n - t->n_hoard, t->hoard + t->n_hoard);
        note_result(t, "hoard", r);
        for (uint32_t i = 0; i < t->n_hoard; i++)
                note(t, " %u", t->hoard[i].id);
        note(t, "\n");
}

static void evict(struct tenant *t) {
        struct kvd_msg_evict request = {.space = kvd_slice_of(names[below(t, N_SPACES)]),
                                        .blocks = 1 + below(t, 60)};
        struct kvd_msg reply;

        ask(t, KVD_MSG_evict, &request, &reply);
}

static void set_or_delete(struct tenant *t) {
        static const char *const policies[] = {"lru", "fifo", "priority"};
        struct kvd_slice space = kvd_slice_of(names[below(t, N_SPACES)]);
        struct kvd_msg_space_delete delete = {.space = space, .force = 1};
        struct kvd_msg_space_set set = {.space = space, .key = kvd_slice_of("policy")};
        struct kvd_msg reply;

        set.value = kvd_slice_of(policies[below(t, 3)]);
        if (below(t, 3))
                ask(t, KVD_MSG_space_set, &set, &reply);
        else
                ask(t, KVD_MSG_space_delete, &delete, &reply);
}

static void lease(struct tenant *t) {
        uint32_t tokens[CHAIN_TOKENS];

        chain_tokens(below(t, 4), CHAIN_TOKENS, tokens);
        if (below(t, 2))
                note_result(t, "lease", kvd_lease(t->spaces[WHOLE], tokens, CHAIN_TOKENS, 0));
        else
                note_result(t, "lease_end", kvd_lease_end(t->spaces[WHOLE], tokens, CHAIN_TOKENS));
}

static void work_on_sequence(struct tenant *t) {
        uint32_t tokens[4 * BT], slots[4] = {0, 1, 2, 3};
        struct kvd_block blocks[4];
        int r = 0;

        chain_tokens(0, 4 * BT, tokens);
        if (!t->sequence)
                r = kvd_sequence_open(t->spaces[CAUSAL], 64, &t->sequence);
        note_result(t, "sequence", r);
        if (r < 0 || take_blocks(t->spaces[CAUSAL], 4, blocks) < 0)
                return;
        r = kvd_sequence_append(t->sequence, 4, blocks, tokens, 4 * BT);
        note_result(t, "append", r);
        if (r < 0)
                kvd_free(t->spaces[CAUSAL], 4, blocks);
        note_result(t, "cool", kvd_sequence_cool(t->sequence, 4, slots, KVD_COOL_DROP));
        if (below(t, 3) == 0)
                t->sequence = kvd_sequence_close(t->sequence);
}

static void step(struct tenant *t) {
        static void (*const operations[])(
                struct tenant *) = {look_around,     hoard, evict, evict,
                                    set_or_delete,   lease, lease, work_on_sequence,
                                    work_on_sequence};
        uint32_t dice = below(t, 24);

        if (!t->kvd)
                come(t);
        if (dice < ARRAY_SIZE(operations))
                operations[dice](t);
        else if (dice < 10)
                go(t);
        else
                find_and_extend(t);
}

/* ---- processes that do a step on command ----------------------------------------------------- */

enum { STEP = 's', END = 'e' };

struct process {
        pid_t pid;
        int fd;
};

static _Noreturn void obey(int fd, uid_t user, struct tenant *t) {
        char word;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        become_user(user);
        while (read(fd, &word, 1) == 1 && word != END) {
                step(t);
                if (write(fd, &word, 1) != 1)
                        break;
        }
        if (t->kvd)
                look_around(t);
        _exit(0);
}

static struct process employ(const struct clocked *c, uid_t user, uint64_t seed, char *told) {
        struct tenant t = {.socket = c->process.in.socket, .told = told, .random = {seed}};
        struct process p;
        int ends[2];

        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
                die("socketpair: %s", strerror(errno));
        p = (struct process){fork(), ends[0]};
        if (p.pid == 0) {
                close(ends[0]);
                clocked_be_client(c);
                obey(ends[1], user, &t);
        }
        close(ends[1]);
        return p;
}

#define WINDOW_NS UINT64_C(5000000) /* the daemon's time, for tenants that wait within a step */

/*
 * Advances the daemon's clock once the tenant has done its step, or waits within it. By then no
 * tenant runs, and no request is unanswered.
 */
static void give_window(struct clocked *c, const struct process *p) {
        struct pollfd done = {p->fd, POLLIN, 0};
        uint64_t ns = WINDOW_NS;

        if (poll(&done, 1, 500) == 0) {
                clocked_rest(c);
                ns--; /* clocked_rest took one */
        }
        clocked_give(c, ns);
}

static void let_step(struct clocked *c, const struct process *p) {
        char word = STEP;

        if (write(p->fd, &word, 1) != 1)
                die("a tenant ended");
        give_window(c, p);
        if (read(p->fd, &word, 1) != 1)
                die("a tenant ended");
}

static void expect_end(const struct process *p, int wanted) {
        int status = wait_status(p->pid);

        close(p->fd);
        if (status != wanted)
                die("a tenant ended with status %d", status);
}

static void dismiss(struct clocked *c, const struct process *p) {
        char word = END;

        if (write(p->fd, &word, 1) != 1)
                die("a tenant ended");
        give_window(c, p);
        expect_end(p, 0);
}

static void murder(const struct process *p) {
        kill(p->pid, SIGKILL);
        expect_end(p, 128 + SIGKILL);
}

/* ---- pairs ----------------------------------------------------------------------------------- */

enum { A, B = 2 }; /* numbers of clients: A has two */

struct neighbours {
        struct process at[2];
        struct random random;
        uid_t user;
};

static void hire(struct neighbours *n, uint32_t i, struct clocked *c, uint64_t seed) {
        n->at[i] = employ(c, n->user, seed, NULL);
        clocked_client(c, A + i, n->at[i].pid);
}

#define WINDOWS 3u /* maximum number of steps between two of B's */

static void neighbours_work(struct neighbours *n, struct clocked *c) {
        uint32_t i = random_below(&n->random, ARRAY_SIZE(n->at)),
                 steps = random_below(&n->random, WINDOWS + 1);

        for (uint32_t k = 0; k < steps; k++)
                let_step(c, &n->at[i]);
        clocked_give(c, (WINDOWS - steps) * WINDOW_NS);
        if (random_below(&n->random, 12) == 0) {
                murder(&n->at[i]);
                hire(n, i, c, n->random.state);
        }
}

static const char *const *settings(bool together) {
        static char a[64], b[64];
        static const char *const all[] = {"daemon.socket_mode=0666",
                                          "daemon.quarantine_ms=20",
                                          a,
                                          "domain a.isolation=arena",
                                          "domain a.quota=2M",
                                          "domain a.guarantee=2M",
                                          "domain a.client_quota=2M",
                                          b,
                                          "domain b.isolation=arena",
                                          "domain b.quota=2M",
                                          "domain b.guarantee=2M",
                                          "domain b.client_quota=2M",
                                          NULL};

        snprintf(a, sizeof a, "domain a.users=%u", together ? 65532 : USER_A);
        snprintf(b, sizeof b, together ? "domain b.users=%u %u" : "domain b.users=%u", USER_B,
                 USER_A);
        return all;
}

/* Time until B's next step. Often none of the daemon's timers expires meanwhile. */
static uint64_t some_time(struct random *random) {
        static const uint64_t ms[] = {0, 0, 0, 10, 50, 200, 2000};

        return ms[random_below(random, ARRAY_SIZE(ms))] * 1000000;
}

static void run(uint64_t seed, bool beside, bool together, char *told) {
        struct neighbours n = {.random = {seed + 1}, .user = USER_A};
        struct random times = {seed + 4};
        struct process b;
        struct clocked c;

        memset(told, 0, TRANSCRIPT);
        clocked_start(&c, settings(together));
        for (uint32_t i = 0; beside && i < ARRAY_SIZE(n.at); i++)
                hire(&n, i, &c, seed + 2 + i);
        b = employ(&c, USER_B, seed, told);
        clocked_client(&c, B, b.pid);
        for (uint32_t i = 0; i < STEPS; i++) {
                if (beside)
                        neighbours_work(&n, &c);
                else
                        clocked_give(&c, WINDOWS * WINDOW_NS);
                clocked_rest(&c);
                let_step(&c, &b);
                clocked_give(&c, some_time(&times));
                clocked_rest(&c);
        }
        dismiss(&c, &b);
        for (uint32_t i = 0; beside && i < ARRAY_SIZE(n.at); i++)
                murder(&n.at[i]);
        clocked_end_clean(&c);
}

#define SHOWN 240

/* Prints both transcripts from a little before the difference. */
static void say_where(uint64_t seed, const char *alone, const char *beside) {
        size_t i = 0, line = 0, from;

        for (; alone[i] && alone[i] == beside[i]; i++)
                line = alone[i] == '\n' ? i + 1 : line;
        from = MAX(line, i - MIN(i, SHOWN / 2));
        die("seed %llu: B is told alone, byte %zu of a line that begins with \"%.40s\":\n%.*s\nand next to A:\n%.*s",
            (unsigned long long)seed, i - line, alone + line,
            (int)MIN(strcspn(alone + from, "\n"), SHOWN), alone + from,
            (int)MIN(strcspn(beside + from, "\n"), SHOWN), beside + from);
}

struct options {
        uint64_t seed, rounds;
        time_t end;
        bool together;
};

static void parse(struct options *o, int argc, char **argv) {
        static const struct option known[] = {{"seconds", required_argument, NULL, 's'},
                                              {"rounds", required_argument, NULL, 'n'},
                                              {"seed", required_argument, NULL, 'r'},
                                              {"together", no_argument, NULL, 't'},
                                              {0}};
        int c;

        while ((c = getopt_long(argc, argv, "", known, NULL)) != -1)
                switch (c) {
                case 's': o->end = time(NULL) + atoi(optarg); break;
                case 'n': o->rounds = strtoull(optarg, NULL, 10); break;
                case 'r': o->seed = strtoull(optarg, NULL, 10); break;
                case 't': o->together = true; break;
                default: exit(2);
                }
}

static void pair(uint64_t seed, bool together, char *alone, char *beside) {
        run(seed, false, together, alone);
        run(seed, true, together, beside);
        if (!together && strcmp(alone, beside) != 0)
                say_where(seed, alone, beside);
        if (together && strcmp(alone, beside) == 0)
                die("seed %llu: B does not notice its own colleagues", (unsigned long long)seed);
}

int main(int argc, char **argv) {
        struct options o = {.seed = (uint64_t)time(NULL) << 20, .rounds = UINT64_MAX};
        char *told = mmap(NULL, 2 * TRANSCRIPT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                          -1, 0);
        uint64_t done = 0, bytes = 0;

        parse(&o, argc, argv);
        if (getuid() != 0)
                return 77;
        for (; done < o.rounds && (!o.end || time(NULL) < o.end); done++) {
                pair(o.seed + done, o.together, told, told + TRANSCRIPT);
                bytes += strlen(told);
        }
        printf("{\"daemon_pairs\": %llu, \"bytes_told\": %llu, \"seed\": %llu}\n",
               (unsigned long long)done, (unsigned long long)bytes, (unsigned long long)o.seed);
        return 0;
}
