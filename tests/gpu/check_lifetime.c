/* SPDX-License-Identifier: Apache-2.0 */
/* T2, T3, T5: how long memory lives, who may import it, the cost of an owner without a context */
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/check.h"

#define CHUNK (4 * MIB)
#define NOBODY 65534

static double mib(uint64_t bytes) {
        return (double)bytes / (double)MIB;
}

/* Free memory as seen by an onlooker, which keeps its context all the time. */
static double free_mib(struct actor *onlooker) {
        return ask(onlooker, SEE_FREE) ? -1 : mib(onlooker->note.n[0]);
}

/*
 * Driver and kernel free memory shortly after a process has ended. Returns the most free memory
 * that is seen within two seconds.
 */
static double free_mib_soon(struct actor *onlooker) {
        double most = 0;

        for (unsigned i = 0; i < check_rounds(20); i++) {
                most = MAX(most, free_mib(onlooker));
                sleep_ms(check_ms(100, 1));
        }
        return most;
}

/* ---- T2 -------------------------------------------------------------------------------------- */

/*
 * Process 1 makes and fills a chunk, sends us its descriptor, and is killed. Process 2 imports it
 * from us.
 */
static void descriptor_outlives(void) {
        struct actor maker = actor_start(), heir = {.fd = -1}, onlooker = actor_start();
        uint64_t bytes = check_bytes(1024 * MIB);
        struct line l;
        int fd = -1, r;

        line_begin(&l, "T2",
                   "a process makes a chunk, fills it, and is killed: does its descriptor still "
                   "hold it?");
        r = ask(&onlooker, OPEN);
        line_number(&l, "mib", mib(bytes));
        line_number(&l, "free_before_mib", free_mib(&onlooker));
        r = r ? r : ask(&maker, OPEN);
        r = r ? r : ask(&maker, CREATE, bytes);
        fd = STEAL_FD(maker.fd);
        r = r ? r : ask(&maker, MAP, CU_ACCESS_READ_WRITE);
        r = r ? r : ask(&maker, FILL, 1);
        if (cannot_ask(&l, r, "maker", &maker))
                goto out;
        line_number(&l, "free_filled_mib", free_mib(&onlooker));
        actor_stop(&maker);
        sleep_ms(check_ms(500, 1));
        line_number(&l, "free_maker_killed_mib", free_mib(&onlooker));
        heir = actor_start();
        r = ask(&heir, OPEN);
        actor_lend(&heir, fd);
        closep(&fd);
        fd = -1;
        r = r ? r : ask(&heir, IMPORT, bytes, CU_ACCESS_READ);
        r = r ? r : ask(&heir, CHECK, 1);
        if (r) {
                line_answer(&l, NO, "importing it then: %s", actor_word(r));
                goto out;
        }
        line_number(&l, "words_wrong", (double)heir.note.n[0]);
        uint64_t wrong = heir.note.n[0];

        actor_stop(&heir);
        line_number(&l, "free_all_gone_mib", free_mib_soon(&onlooker));
        line_answer(&l, wrong ? NO : YES, "imported after its maker's death, %llu words wrong",
                    (unsigned long long)wrong);
out:
        closep(&fd);
        actor_stop(&maker);
        actor_stop(&heir);
        actor_stop(&onlooker);
}

static void legacy_outlives(void) {
        struct actor maker = actor_start(), user = actor_start();
        struct note handle;
        struct line l;
        int r;

        line_begin(&l, "T2",
                   "memory is open by a legacy handle when its maker is killed: is it still "
                   "there?");
        r = ask(&maker, OPEN);
        r = r ? r : ask(&maker, ALLOC, CHUNK);
        handle = maker.note;
        r = r ? r : ask(&maker, FILL, 1);
        if (cannot_ask(&l, r, "maker", &maker))
                goto out;
        r = ask(&user, OPEN);
        handle.action = LEGACY;
        handle.n[0] = CHUNK;
        r = r ? r : actor_ask(&user, handle);
        if (cannot_ask(&l, r, "user", &user))
                goto out;
        actor_stop(&maker);
        sleep_ms(check_ms(500, 1));
        r = ask(&user, CHECK, 1);
        line_number(&l, "words_wrong", (double)user.note.n[0]);
        line_answer(&l, r || user.note.n[0] ? NO : YES, "reading it then: %s, %llu words wrong",
                    actor_word(r), (unsigned long long)user.note.n[0]);
out:
        actor_stop(&maker);
        actor_stop(&user);
}

/* Is memory empty that one process has freed and another one allocates? */
static void fresh_memory(void) {
        struct actor first = actor_start(), second = actor_start();
        uint64_t bytes = check_bytes(256 * MIB);
        struct line l;
        int r;

        line_begin(&l, "T2",
                   "memory that another process filled and gave back: is a new chunk zero?");
        r = ask(&first, OPEN);
        r = r ? r : ask(&first, CREATE, bytes);
        r = r ? r : ask(&first, MAP, CU_ACCESS_READ_WRITE);
        r = r ? r : ask(&first, FILL, 3);
        if (cannot_ask(&l, r, "first", &first))
                goto out;
        actor_stop(&first);
        sleep_ms(check_ms(300, 1));
        r = ask(&second, OPEN);
        r = r ? r : ask(&second, CREATE, bytes);
        r = r ? r : ask(&second, MAP, CU_ACCESS_READ_WRITE);
        r = r ? r : ask(&second, CHECK, 3);
        if (cannot_ask(&l, r, "second", &second))
                goto out;
        line_number(&l, "words", (double)(bytes / 4));
        line_number(&l, "words_left_over", (double)(bytes / 4 - second.note.n[0]));
        line_answer(&l, OPEN_QUESTION,
                    "%llu of %llu words of the old content (kvd clears, whatever the answer)",
                    (unsigned long long)(bytes / 4 - second.note.n[0]),
                    (unsigned long long)(bytes / 4));
out:
        actor_stop(&first);
        actor_stop(&second);
}

void check_lifetime(void) {
        descriptor_outlives();
        legacy_outlives();
        fresh_memory();
}

/* ---- T3 -------------------------------------------------------------------------------------- */

static void other_user(bool legacy) {
        struct actor owner = actor_start(), other = {.fd = -1};
        struct note handle;
        struct line l;
        int r;

        line_begin(&l, "T3", "may a process of another user (%d) open %s?", NOBODY,
                   legacy ? "a legacy handle" : "a descriptor that it was sent");
        if (geteuid() != 0) {
                line_answer(&l, OPEN_QUESTION, "not asked: needs root");
                goto out;
        }
        r = ask(&owner, OPEN);
        r = r ? r : legacy ? ask(&owner, ALLOC, CHUNK) : ask(&owner, CREATE, CHUNK);
        handle = owner.note;
        actor_user(NOBODY);
        other = actor_start();
        actor_user(0);
        actor_lend(&other, -1);
        int fd = STEAL_FD(owner.fd);

        r = r ? r : legacy ? 0 : ask(&owner, MAP, CU_ACCESS_READ_WRITE);
        r = r ? r : ask(&owner, FILL, 1);
        if (cannot_ask(&l, r, "owner", &owner))
                goto out_fd;
        r = ask(&other, OPEN);
        if (cannot_ask(&l, r, "the other user's driver", &other))
                goto out_fd;
        handle.action = LEGACY;
        handle.n[0] = CHUNK;
        actor_lend(&other, fd);
        r = legacy ? actor_ask(&other, handle) : ask(&other, IMPORT, CHUNK, CU_ACCESS_READ);
        if (!r)
                r = ask(&other, CHECK, 1);
        line_number(&l, "words_wrong", r ? -1 : (double)other.note.n[0]);
        line_answer(&l,
                    legacy               ? OPEN_QUESTION :
                    r || other.note.n[0] ? NO :
                                           YES,
                    "%s", actor_word(r));
out_fd:
        closep(&fd);
out:
        actor_stop(&owner);
        actor_stop(&other);
}

void check_users(void) {
        other_user(false);
        other_user(true);
}

/* ---- T5 -------------------------------------------------------------------------------------- */

/* Imports and maps memory, as a daemon does that takes over its predecessor's. */
static void take_over(void) {
        struct actor maker = actor_start(), next = actor_start(), onlooker = actor_start();
        uint64_t bytes = check_bytes(1024 * MIB);
        double before;
        struct line l;
        int r;

        line_begin(&l, "T5",
                   "can a process import and map a descriptor after cuInit alone, and what does it "
                   "cost?");
        r = ask(&onlooker, OPEN);
        r = r ? r : ask(&maker, INIT);
        r = r ? r : ask(&maker, CREATE, bytes);
        r = r ? r : ask(&next, INIT);
        if (cannot_ask(&l, r, "maker", &maker))
                goto out;
        actor_lend(&next, maker.fd);
        before = free_mib(&onlooker);
        r = ask(&next, IMPORT, bytes, CU_ACCESS_NONE);
        line_number(&l, "import_us", us_of(next.note.n[0]));
        line_number(&l, "map_us", us_of(next.note.n[2]));
        line_number(&l, "costs_mib", before - free_mib(&onlooker));
        line_answer(&l, r ? NO : YES, "import, reserve and map: %s", actor_word(r));
out:
        actor_stop(&maker);
        actor_stop(&next);
        actor_stop(&onlooker);
}

static void make_alone(void) {
        struct actor owner = actor_start(), onlooker = actor_start();
        uint64_t bytes = check_bytes(1024 * MIB);
        double before, init, made, context;
        struct line l;
        int r;

        line_begin(&l, "T5",
                   "can a process make and export memory after cuInit alone, and what does it "
                   "cost?");
        r = ask(&onlooker, OPEN);
        before = free_mib(&onlooker);
        r = r ? r : ask(&owner, INIT);
        if (cannot_ask(&l, r, "cuInit", &owner))
                goto out;
        init = free_mib(&onlooker);
        r = ask(&owner, CREATE, bytes);
        made = free_mib(&onlooker);
        line_number(&l, "mib", mib(bytes));
        line_number(&l, "init_costs_mib", before - init);
        line_number(&l, "making_costs_mib", init - made);
        line_number(&l, "create_us", us_of(owner.note.n[0]));
        line_number(&l, "export_us", us_of(owner.note.n[1]));
        ask(&owner, OPEN);
        context = free_mib(&onlooker);
        line_number(&l, "context_costs_mib", made - context);
        line_answer(&l, r ? NO : YES, "create and export: %s", actor_word(r));
out:
        actor_stop(&owner);
        actor_stop(&onlooker);
}

void check_owner(void) {
        make_alone();
        take_over();
}
