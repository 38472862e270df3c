/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a driver and its device really do: the ten questions whose answers decide details of kvd,
 * and nothing of kvd is needed to ask them. One line of JSON each (line.h).
 *
 *      checks [--only T1[,T4...]] [--seconds N] [--list]
 *      checks --hold       asks nothing: keeps a context until its standard input ends
 *
 * --seconds: the time that each may take, instead of its own limit. KVD_GPU is the device's ordinal
 * (0). T9 needs Python: check_dlpack.py. Exit status 0: all were asked; 1: a check did not end by
 * itself; 77: no driver or no device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/check.h"
#include "tests/gpu/driver.h"

/* First ones first: what decides most about kvd, and T6, which takes long, last. */
static const struct check checks[] = {
        {"T5", "an owner without a context", check_owner, 20},
        {"T8", "images and entry points", check_images, 30},
        {"T4", "slots that order streams of two processes", check_order, 60},
        {"T1", "is a read-only mapping read-only?", check_read_only, 40},
        {"T2", "does memory outlive its maker?", check_lifetime, 40},
        {"T3", "may another user import it?", check_users, 20},
        {"T7", "what do the calls take?", check_latency, 60},
        {"T10", "registering host memory", check_registering, 40},
        {"T6", "when does the GPU work of a killed process stop?", check_killed, 75},
};

static unsigned seconds;

static void list(void) {
        for (size_t i = 0; i < ARRAY_SIZE(checks); i++)
                printf("%-4s %s\n", checks[i].name, checks[i].about);
}

static int hold(void) {
        struct actor a = actor_start();
        int r = ask(&a, OPEN);
        char c;

        while (!r && read(STDIN_FILENO, &c, 1) > 0)
                ;
        actor_stop(&a);
        return r ? 77 : 0;
}

int main(int argc, char **argv) {
        const char *only = NULL;
        struct driver driver;
        bool well = true;
        int i = 1;

        if (argc == 2 && strcmp(argv[1], "--hold") == 0)
                return hold();
        for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
                if (strcmp(argv[i], "--only") == 0)
                        only = argv[i + 1];
                else if (strcmp(argv[i], "--seconds") == 0)
                        seconds = (unsigned)atoi(argv[i + 1]);
                else
                        break;
        }
        if (i < argc) {
                list();
                return strcmp(argv[i], "--list") == 0 ? 0 : 2;
        }
        if (!driver_say(&driver))
                return 77;
        check_driver(&driver);
        for (size_t n = 0; n < ARRAY_SIZE(checks); n++)
                if (check_is_wanted(only, checks[n].name))
                        well = check_run(&checks[n], seconds) && well;
        return !well;
}
