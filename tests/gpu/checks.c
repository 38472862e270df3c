/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds out how a driver and its device really behave: ten questions whose answers decide details
 * of kvd. Needs no part of kvd. Prints one line of JSON for each question (line.h).
 *
 *      checks [--only T1[,T4...]] [--seconds [T1=]N] [--list]
 *      checks --hold       runs no check: keeps a context until its standard input ends
 *
 * --seconds: the time limit of each check, or of the named one. Default: the check's own limit,
 * which is five times as long on a stand-in. KVD_GPU is the device's ordinal (default: 0). T9 needs
 * Python: check_dlpack.py. Exit status: 0 if all checks ran, 1 if a check did not end by itself, 77
 * if there is no driver or no device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/gpu/check.h"
#include "tests/gpu/driver.h"

/* Those that decide most about kvd come first; T6, which takes long, is last. */
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

static const char *seconds;

/* The limit that --seconds sets for this check, or 0 for its own. */
static unsigned limit_of(const struct check *check) {
        size_t n = seconds ? strcspn(seconds, "=") : 0;

        if (!seconds)
                return 0;
        if (!seconds[n])
                return (unsigned)atoi(seconds);
        if (strncmp(seconds, check->name, n) != 0 || check->name[n])
                return 0;
        return (unsigned)atoi(seconds + n + 1);
}

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
                        seconds = argv[i + 1];
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
                        well = check_run(&checks[n], limit_of(&checks[n])) && well;
        return !well;
}
