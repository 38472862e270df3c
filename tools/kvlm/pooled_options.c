/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/pooled_options.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvlm/note.h"

static int read_yes(const char *name, const char *value, bool *ret) {
        *ret = strcmp(value, "yes") == 0;
        return *ret || strcmp(value, "no") == 0 ? 0 : note(-EINVAL, "--%s takes yes or no, not \"%s\"", name, value);
}

static int read_use(const char *value, enum pooled_use *ret) {
        static const char *const names[] = {"auto", "off", "on"};

        for (int i = 0; i < 3; i++)
                if (strcmp(value, names[i]) == 0) {
                        *ret = (enum pooled_use)i;
                        return 0;
                }
        return note(-EINVAL, "--sequence takes auto, off or on, not \"%s\"", value);
}

static int read_wait(const char *value, uint32_t *ret) {
        char *end;
        unsigned long ms = strtoul(value, &end, 10);

        *ret = (uint32_t)ms;
        return *value >= '0' && *value <= '9' && !*end && ms <= 10000 ?
                       0 :
                       note(-EINVAL, "--sync-wait takes 0 to 10000 milliseconds, not \"%s\"", value);
}

static int read_share(const char *value, float *ret) {
        char *end;

        *ret = strtof(value, &end);
        return end != value && !*end && *ret >= 0 && *ret <= 1 ?
                       0 :
                       note(-EINVAL, "--share-random takes a number from 0 to 1, not \"%s\"", value);
}

int pooled_option(struct pooled_options *o, const char *name, const char *value) {
        if (strcmp(name, "sequence") == 0)
                return read_use(value, &o->use);
        if (strcmp(name, "own-prompt") == 0)
                return read_yes(name, value, &o->own_prompt);
        if (strcmp(name, "align-steps") == 0)
                return read_yes(name, value, &o->align);
        if (strcmp(name, "sync-wait") == 0)
                return read_wait(value, &o->wait_ms);
        return read_share(value, &o->random);
}
