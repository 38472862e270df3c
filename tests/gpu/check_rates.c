/* SPDX-License-Identifier: Apache-2.0 */
/* T7, T8, T10: the cost of calls, and the images and entry points that the driver accepts */
#include <linux/memfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/check.h"

#define MOST 24

/* ---- T7 -------------------------------------------------------------------------------------- */

enum { T_CREATE, T_EXPORT, T_IMPORT, T_RESERVE, T_MAP, T_ACCESS, T_UNMAP, T_RELEASE, N_TIMES };

static const char *const time_names[] = {"create_us", "export_us",     "import_us", "reserve_us",
                                         "map_us",    "set_access_us", "unmap_us",  "release_us"};

static int one_chunk(struct actor *maker, struct actor *user, uint64_t bytes,
                     double times[N_TIMES][MOST], unsigned i) {
        int r = ask(maker, CREATE, bytes);

        if (r)
                return r;
        for (int t = 0; t < 2; t++)
                times[T_CREATE + t][i] = us_of(maker->note.n[t]);
        actor_lend(user, maker->fd);
        closep(&maker->fd);
        maker->fd = -1;
        r = ask(user, IMPORT, bytes, CU_ACCESS_READ_WRITE);
        if (r)
                return r;
        for (int t = 0; t < 4; t++)
                times[T_IMPORT + t][i] = us_of(user->note.n[t]);
        r = ask(user, UNMAP);
        for (int t = 0; t < 2; t++)
                times[T_UNMAP + t][i] = us_of(user->note.n[t]);
        return r ? r : ask(maker, UNMAP); /* has no mapping: only releases the handle */
}

static void chunk_times(uint64_t bytes) {
        struct actor maker = actor_start(), user = actor_start();
        unsigned rounds = MIN(check_rounds(MOST), bytes > 256 * MIB ? MOST / 3u : MOST), i = 0;
        double times[N_TIMES][MOST], total = 0;
        struct line l;
        int r;

        line_begin(&l, "T7", "a chunk of %llu MiB: what does each step take?",
                   (unsigned long long)(bytes / MIB));
        r = ask(&maker, INIT);
        r = r ? r : ask(&user, OPEN);
        for (; i < rounds && !r; i += !r)
                r = one_chunk(&maker, &user, bytes, times, i);
        if (r && cannot_ask(&l, r, "one of the steps", &user))
                goto out;
        for (unsigned t = 0; t < N_TIMES; t++) {
                line_number(&l, time_names[t], median(times[t], i));
                total += t >= T_IMPORT && t <= T_ACCESS ? times[t][i / 2] : 0;
        }
        line_number(&l, "rounds", i);
        line_answer(&l, YES, "import, reserve, map and set access take %.0f us together", total);
out:
        actor_stop(&maker);
        actor_stop(&user);
}

static void legacy_times(uint64_t bytes) {
        struct actor maker = actor_start(), user = actor_start();
        double opening[MOST], closing[MOST];
        unsigned i = 0, rounds = check_rounds(MOST);
        struct note handle;
        struct line l;
        int r;

        line_begin(&l, "T7", "a legacy handle of %llu MiB: what does opening take?",
                   (unsigned long long)(bytes / MIB));
        r = ask(&maker, OPEN);
        r = r ? r : ask(&user, OPEN);
        r = r ? r : ask(&maker, ALLOC, bytes);
        handle = maker.note;
        handle.action = LEGACY;
        handle.n[0] = bytes;
        for (; i < rounds && !r; i += !r) {
                r = actor_ask(&user, handle);
                opening[i] = us_of(user.note.n[0]);
                r = r ? r : ask(&user, UNLEGACY);
                closing[i] = us_of(user.note.n[0]);
        }
        if (!r || !cannot_ask(&l, r, "opening it", &user)) {
                line_number(&l, "open_us", median(opening, i));
                line_number(&l, "close_us", median(closing, i));
                line_answer(&l, YES, "%.0f us to open, %.0f us to close", opening[i / 2],
                            closing[i / 2]);
        }
        actor_stop(&maker);
        actor_stop(&user);
}

static void many_mappings(void) {
        struct actor a = actor_start();
        unsigned most = check_rounds(40000);
        struct line l;
        int r;

        line_begin(&l, "T7",
                   "how many mappings of 2 MiB may a process have (tried: %u, at most 15 s)?",
                   most);
        r = ask(&a, OPEN);
        r = r ? r : ask(&a, CREATE, 2 * MIB);
        if (!r || !cannot_ask(&l, r, "a chunk", &a)) {
                r = ask(&a, SPREAD, most, 15000);
                line_number(&l, "mappings", (double)a.note.n[0]);
                line_number(&l, "last_us", us_of(a.note.n[1]));
                line_answer(&l, a.note.n[0] >= 4096 || !r ? YES : NO, "%llu, then: %s",
                            (unsigned long long)a.note.n[0],
                            r ? actor_word(r) : "the attempt was over");
        }
        actor_stop(&a);
}

void check_latency(void) {
        for (uint64_t mib = 2; mib <= 1024; mib *= mib == 2 || mib == 512 ? 2 : 4)
                if (mib * MIB <= check_bytes(1024 * MIB))
                        chunk_times(mib * MIB);
        legacy_times(2 * MIB);
        legacy_times(check_bytes(1024 * MIB));
        many_mappings();
}

/* ---- T8 -------------------------------------------------------------------------------------- */

static void one_image(uint64_t which) {
        struct actor a = actor_start();
        struct line l;
        int r;

        line_begin(&l, "T8", "does this driver take an image of nvcc 13, %s, and run its kernel?",
                   which ? "compressed (--compress-mode=size)" : "in nvcc's default mode");
        r = ask(&a, OPEN);
        if (!r || !cannot_ask(&l, r, "opening", &a)) {
                r = ask(&a, IMAGE, which);
                line_number(&l, "load_us", us_of(a.note.n[0]));
                line_number(&l, "words_wrong", (double)a.note.n[1]);
                line_answer(&l, r || a.note.n[1] ? NO : YES, "%s%s%s",
                            r ? a.note.text : "loaded, launched, right", r ? ": " : "",
                            r ? actor_word(r) : "");
        }
        actor_stop(&a);
}

static uint64_t one_batch(uint64_t version) {
        struct actor a = actor_start();
        uint64_t address = 0;
        struct line l;
        int r;

        line_begin(&l, "T8",
                   "cuMemcpyBatchAsync, asked for as of CUDA %llu.%llu, with that signature: 256 "
                   "copies "
                   "of 64 KiB",
                   (unsigned long long)version / 1000, (unsigned long long)version % 1000 / 10);
        r = ask(&a, OPEN);
        if (!r || !cannot_ask(&l, r, "opening", &a)) {
                r = ask(&a, BATCH, version, 256, 65536);
                address = a.note.n[2];
                line_number(&l, "us", us_of(a.note.n[0]));
                line_number(&l, "wrong", (double)a.note.n[1]);
                line_answer(&l, r == CU_NOT_FOUND || (!r && !a.note.n[1]) ? YES : NO, "%s: %s",
                            r ? a.note.text : "copied",
                            r           ? actor_word(r) :
                            a.note.n[1] ? "wrong" :
                                          "right");
        }
        actor_stop(&a);
        return address;
}

void check_images(void) {
        one_image(0);
        one_image(1);
        one_batch(12080);
        one_batch(13000);
}

/* ---- T10 ------------------------------------------------------------------------------------- */

struct pages {
        const char *words;
        unsigned flags;
        bool advise;
};

static void registering(const struct pages *pages) {
        struct actor a = actor_start();
        uint64_t bytes = check_bytes(1024 * MIB);
        struct line l;
        int fd = host_page(bytes, pages->flags), r;

        line_begin(&l, "T10", "registering %llu MiB of a memfd of %s: how fast?",
                   (unsigned long long)(bytes / MIB), pages->words);
        if (fd < 0) {
                line_answer(&l, OPEN_QUESTION, "not asked: no such memory here");
                goto out;
        }
        r = ask(&a, OPEN);
        r = r ? r : ask(&a, CREATE, bytes);
        r = r ? r : ask(&a, MAP, CU_ACCESS_READ_WRITE);
        actor_lend(&a, fd);
        r = r ? r : ask(&a, REGISTER, bytes, pages->advise);
        if (r && cannot_ask(&l, r, "registering", &a))
                goto out;
        double seconds = (double)a.note.n[1] / 1e9;

        line_number(&l, "register_gb_s", (double)bytes / 1e9 / seconds);
        for (uint64_t in = 0; in < 2; in++)
                if (ask(&a, RATE, bytes, in) == 0)
                        line_number(&l, in ? "to_device_gb_s" : "from_device_gb_s",
                                    (double)a.note.n[0] / 1e9);
        ask(&a, UNREGISTER);
        line_number(&l, "unregister_gb_s", (double)bytes / ((double)a.note.n[0] + 1));
        line_answer(&l, YES, "%.2f GB/s", (double)bytes / 1e9 / seconds);
out:
        closep(&fd);
        actor_stop(&a);
}

void check_registering(void) {
        registering(&(struct pages){"4 KiB pages", 0, false});
        registering(&(struct pages){"4 KiB pages, advised to be huge", 0, true});
        registering(&(struct pages){"2 MiB pages", MFD_HUGETLB | MFD_HUGE_2MB, false});
}
