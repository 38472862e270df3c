/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/driver.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/actor.h"
#include "tests/gpu/line.h"

static bool has_device_file(void) {
        return access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
}

/*
 * "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  ..." or "... Open Kernel Module for
 * x86_64  580..."
 */
static void read_branch(char *to, size_t size) {
        _cleanup_(freep) char *line = NULL;
        FILE *f = fopen("/proc/driver/nvidia/version", "re");
        unsigned a, b, c;
        size_t n = 0;

        if (f && getline(&line, &n, f) > 0)
                for (char *at = line; *at; at++)
                        if (at > line && at[-1] == ' ' &&
                            sscanf(at, "%3u.%3u.%3u", &a, &b, &c) == 3) {
                                snprintf(to, size, "%u.%02u.%02u", a, b, c);
                                break;
                        }
        if (f)
                fclose(f);
}

static void say(const struct driver *d, int r, const char *why) {
        struct line l;
        char name[256];

        snprintf(name, sizeof name, "%s%s, CUDA %d.%d%s%s",
                 d->stand_in ? "STAND-IN, NOT A GPU: " : "", d->device, d->version / 1000,
                 d->version % 1000 / 10, d->branch[0] ? ", driver " : "", d->branch);
        if (!r)
                line_driver(name);
        line_begin(&l, "device", "what answers?");
        line_number(&l, "cuda", d->version);
        line_number(&l, "capability", d->capability);
        line_number(&l, "memory_mib", (double)(d->memory >> 20));
        line_number(&l, "free_mib", (double)(d->free >> 20));
        if (r)
                line_answer(&l, OPEN_QUESTION, "nothing: %s%s%s", actor_word(r), why[0] ? ", " : "",
                            why);
        else
                line_answer(&l, d->stand_in ? OPEN_QUESTION : YES, "%s", name);
}

bool driver_say(struct driver *d) {
        struct actor a = actor_start();
        int r = ask(&a, OPEN);

        *d = (struct driver){.version = (int)a.note.n[0],
                             .memory = a.note.n[1],
                             .capability = (uint32_t)a.note.n[2]};
        if (!r)
                snprintf(d->device, sizeof d->device, "%.90s", a.note.text);
        d->stand_in = !has_device_file() || strcasestr(d->device, "stand-in");
        if (has_device_file())
                read_branch(d->branch, sizeof d->branch);
        struct note opened = a.note;

        if (!r && ask(&a, SEE_FREE) == 0)
                d->free = a.note.n[0];
        say(d, r, opened.text);
        actor_stop(&a);
        return !r;
}
