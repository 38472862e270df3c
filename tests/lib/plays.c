/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs plays one after the other. The parent never calls the driver, because children cannot use a
 * driver that their parent has initialized.
 */

#include "tests/lib/plays.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/instance.h"

static int run_one(const struct play *play) {
        pid_t pid = fork();
        char group[32];
        int status;

        if (pid < 0)
                die("fork: %m");
        if (pid == 0) {
                snprintf(group, sizeof group, "play%d", getpid());
                setenv("FAKECUDA_GROUP", group, 1);
                play->run();
                exit(0);
        }
        status = wait_status(pid);
        if (status)
                printf("%s: FAILED with status %d\n", play->name, status);
        else
                printf("%s: ok\n", play->name);
        fflush(stdout);
        return status != 0;
}

static const struct play *find(const struct play *plays, size_t n, const char *name) {
        for (size_t i = 0; i < n; i++)
                if (strcmp(plays[i].name, name) == 0)
                        return &plays[i];
        return NULL;
}

int plays_run(const struct play *plays, size_t n_plays, char *const *names) {
        int failed = 0;

        for (size_t i = 0; !*names && i < n_plays; i++)
                failed |= run_one(&plays[i]);
        for (; *names; names++) {
                const struct play *play = find(plays, n_plays, *names);

                if (!play) {
                        fprintf(stderr, "there is no play '%s'\n", *names);
                        return 2;
                }
                failed |= run_one(play);
        }
        return failed;
}
