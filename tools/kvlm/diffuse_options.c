/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/diffuse_options.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

static int read_number(const char *name, const char *value, uint32_t most, uint32_t *ret) {
        unsigned long number;
        char *end;

        errno = 0;
        number = strtoul(value, &end, 10);
        if (!isdigit((unsigned char)*value) || *end || errno || number < 1 || number > most)
                return note(-EINVAL, "--%s takes a number from 1 to %u, not \"%s\"", name, most, value);
        *ret = (uint32_t)number;
        return 0;
}

static int read_mode(const char *value, enum bicache_mode *ret) {
        static const char *const names[] = {"space", "off", "naive", "on"};

        for (size_t i = 0; i < ARRAY_SIZE(names); i++)
                if (strcmp(value, names[i]) == 0) {
                        *ret = (enum bicache_mode)i;
                        return 0;
                }
        return note(-EINVAL, "--bicache takes space, off, naive or on, not \"%s\"", value);
}

int diffuse_option(struct diffuse_options *o, const char *name, const char *value) {
        const struct {
                const char *name;
                uint32_t most;
                uint32_t *to;
        } numbers[] = {
                {"prefix-tokens", 1 << 24, &o->prefix},
                {"gen-length", 1 << 20, &o->length}, {"steps", 1 << 20, &o->steps},
                {"bicache-depth", 1024, &o->depth},  {"refresh", 1 << 20, &o->refresh},
                {"profile-step", 100, &o->profile_step},
        };

        for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
                if (strcmp(name, numbers[i].name) == 0)
                        return read_number(name, value, numbers[i].most, numbers[i].to);
        if (strcmp(name, "bicache") == 0)
                return read_mode(value, &o->bicache);
        *(strcmp(name, "profile-out") == 0 ? &o->profile : &o->table) = value;
        return 0;
}
