/* SPDX-License-Identifier: Apache-2.0 */
/* T1, T2, T3, T5: access to shared memory, and how long it lives */
#include <string.h>

#include "ipc/base/util.h"
#include "tests/gpu/check.h"

#define CHUNK (4 * MIB)

static int ask_legacy(struct actor *to, const struct note *handle, uint64_t bytes) {
        struct note note = {.action = LEGACY, .n = {bytes}};

        memcpy(note.text, handle->text, CU_IPC_HANDLE_BYTES);
        return actor_ask(to, note);
}

/* Starts a process with a filled chunk, which can be shared by its descriptor. */
static int owner_start(struct actor *a, uint64_t bytes, int *fd) {
        int r;

        *a = actor_start();
        r = ask(a, OPEN);
        r = r ? r : ask(a, CREATE, bytes);
        *fd = STEAL_FD(a->fd);
        r = r ? r : ask(a, MAP, CU_ACCESS_READ_WRITE);
        return r ? r : ask(a, FILL, 1);
}

/* Starts a process that maps the chunk, too. */
static int reader_start(struct actor *a, uint64_t bytes, int fd, uint64_t access) {
        int r;

        *a = actor_start();
        r = ask(a, OPEN);
        actor_lend(a, fd);
        return r ? r : ask(a, IMPORT, bytes, access);
}

/* ---- T1: read-only --------------------------------------------------------------------------- */

static bool kernel_is_missing(int r) {
        return r == CU_INVALID_IMAGE || r == CU_NO_BINARY_FOR_GPU || r == CU_NOT_FOUND ||
               r == CU_UNSUPPORTED_PTX || r == CU_NOT_SUPPORTED;
}

static void say_spoilt(struct line *l, struct actor *owner, struct actor *reader, int wrong_read) {
        const uint64_t *n = reader->note.n;
        int result = reader->note.result, called = (int)n[0], waited = (int)n[1], after = (int)n[2];
        int r = ask(owner, CHECK, 1), healthy;
        uint64_t changed = owner->note.n[0];

        healthy = r ? r : ask(owner, HEALTH);
        line_number(l, "call", called);
        line_number(l, "wait", waited);
        line_number(l, "after", after);
        line_number(l, "words_changed", (double)changed);
        if (kernel_is_missing(called))
                line_answer(l, OPEN_QUESTION, "not asked: no kernel here (%s)", actor_word(called));
        else
                line_answer(l, result && !changed && !healthy && !wrong_read ? YES : NO,
                            "call: %s; waiting: %s; the call after: %s; owner's data %s, owner's "
                            "context: %s",
                            actor_word(called), actor_word(waited), actor_word(after),
                            changed ? "changed" : "unchanged", actor_word(healthy));
}

static void store_read_only(unsigned how, const char *words) {
        struct actor owner, reader = {.fd = -1};
        struct line l;
        int fd = -1, r, wrong;

        line_begin(&l, "T1",
                   "a chunk is imported with read access only, and its reader stores by %s", words);
        r = owner_start(&owner, CHUNK, &fd);
        if (cannot_ask(&l, r, "owner", &owner))
                goto out;
        r = reader_start(&reader, CHUNK, fd, CU_ACCESS_READ);
        r = r ? r : ask(&reader, CHECK, 1);
        if (cannot_ask(&l, r, "reader", &reader))
                goto out;
        wrong = reader.note.n[0] != 0;
        line_number(&l, "words_read_wrong", (double)reader.note.n[0]);
        ask(&reader, SPOIL, how, 5);
        say_spoilt(&l, &owner, &reader, wrong);
out:
        closep(&fd);
        actor_stop(&owner);
        actor_stop(&reader);
}

static void raise_access(void) {
        struct actor owner, reader = {.fd = -1};
        struct line l;
        int fd = -1, r, raised, stored;

        line_begin(&l, "T1",
                   "may the holder of a descriptor raise its own mapping from read to write?");
        r = owner_start(&owner, CHUNK, &fd);
        if (cannot_ask(&l, r, "owner", &owner))
                goto out;
        r = reader_start(&reader, CHUNK, fd, CU_ACCESS_READ);
        if (cannot_ask(&l, r, "reader", &reader))
                goto out;
        raised = ask(&reader, ACCESS, CU_ACCESS_READ_WRITE);
        stored = ask(&reader, SPOIL, BY_MEMSET, 5);
        ask(&owner, CHECK, 1);
        line_number(&l, "words_changed", (double)owner.note.n[0]);
        line_answer(&l, OPEN_QUESTION, "raising: %s; storing then: %s; owner's data %s",
                    actor_word(raised), actor_word(stored),
                    owner.note.n[0] ? "changed" : "unchanged");
out:
        closep(&fd);
        actor_stop(&owner);
        actor_stop(&reader);
}

static void store_legacy(void) {
        struct actor owner = actor_start(), reader = actor_start();
        struct line l;
        int r, restricted, stored;

        line_begin(&l, "T1",
                   "memory comes by a legacy handle: can its reader's mapping be made read-only?");
        r = ask(&owner, OPEN);
        r = r ? r : ask(&owner, ALLOC, CHUNK);
        if (cannot_ask(&l, r, "owner", &owner))
                goto out;
        struct note handle = owner.note;

        r = ask(&owner, FILL, 1);
        r = r ? r : ask(&reader, OPEN);
        r = r ? r : ask_legacy(&reader, &handle, CHUNK);
        r = r ? r : ask(&reader, CHECK, 1);
        if (cannot_ask(&l, r, "reader", &reader))
                goto out;
        line_number(&l, "words_read_wrong", (double)reader.note.n[0]);
        restricted = ask(&reader, ACCESS, CU_ACCESS_READ);
        stored = ask(&reader, SPOIL, BY_MEMSET, 5);
        ask(&owner, CHECK, 1);
        line_number(&l, "words_changed", (double)owner.note.n[0]);
        line_answer(&l, OPEN_QUESTION, "restricting: %s; storing: %s; owner's data %s",
                    actor_word(restricted), actor_word(stored),
                    owner.note.n[0] ? "changed" : "unchanged");
out:
        actor_stop(&owner);
        actor_stop(&reader);
}

void check_read_only(void) {
        store_read_only(BY_KERNEL, "a kernel");
        store_read_only(BY_MEMSET, "memset");
        store_read_only(BY_COPY, "a copy");
        raise_access();
        store_legacy();
}
