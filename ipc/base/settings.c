/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Settings of spaces, from the table methods.def: parsing, formatting and defaults. A profile is a
 * setting that sets others.
 */

#include "ipc/base/settings.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "ipc/base/text.h"

static_assert(KVD_N_SETTINGS <= KVD_SETTINGS_ROOM, "room for settings");

static const struct kvd_setting_info settings_info[] = {
#define KVD_NUMBER(method, name, paper, serve, least, most, text) \
        {#method, #name, paper, serve, least, most, NULL, text},
#define KVD_CHOICE(method, name, paper, serve, words, text) \
        {#method, #name, paper, serve, 0, 0, words, text},
#include "ipc/base/methods.def"
};

const struct kvd_setting_info *kvd_setting_info(enum kvd_setting which) {
        return which < KVD_N_SETTINGS ? &settings_info[which] : NULL;
}

static bool is_called(const struct kvd_setting_info *info, const char *name) {
        size_t n = strlen(info->method);

        if (strncmp(name, info->method, n) != 0)
                return false;
        return name[n] == '.' ? strcmp(name + n + 1, info->name) == 0 :
                                !name[n] && strcmp(info->name, "on") == 0;
}

int kvd_setting_by_name(const char *name) {
        for (int i = 0; i < KVD_N_SETTINGS; i++)
                if (is_called(&settings_info[i], name))
                        return i;
        return -1;
}

bool kvd_setting_is_fixed(enum kvd_setting which) {
        return false
#define KVD_FIXED(method, name, member) || which == KVD_##method##_##name
#include "ipc/base/methods.def"
                ;
}

bool kvd_settings_read_summaries(const shm_u64 *settings) {
        return false
#define KVD_METHOD(method, reads) || (reads && kvd_setting_on(settings, KVD_##method##_on))
#include "ipc/base/methods.def"
                ;
}

/* ---- values as text -------------------------------------------------------------------------- */

int kvd_setting_parse(enum kvd_setting which, const char *text, double *ret) {
        const struct kvd_setting_info *info = &settings_info[which];
        char *end;
        double value;

        if (info->words) {
                *ret = kvd_word_index(info->words, text);
                return *ret < 0 ? -EINVAL : 0;
        }
        value = strtod(text, &end);
        if (end == text || *end || !(value >= info->least && value <= info->most))
                return -EINVAL;
        *ret = value;
        return 0;
}

char *kvd_setting_format(enum kvd_setting which, double value, char *to, size_t size) {
        const char *words = settings_info[which].words, *word;
        size_t n;

        word = words ? kvd_word_at(words, (int)value, &n) : NULL;
        if (word) {
                snprintf(to, size, "%.*s", (int)n, word);
                return to;
        }
        snprintf(to, size, "%g", value);
        if (strtod(to, NULL) != value) /* exact, but no longer than necessary */
                snprintf(to, size, "%.17g", value);
        return to;
}

/* ---- writing --------------------------------------------------------------------------------- */

static void store(shm_u64 *settings, enum kvd_setting which, double value) {
        uint64_t bits;

        memcpy(&bits, &value, sizeof bits);
        atomic_store_explicit(&settings[which], bits, memory_order_relaxed);
}

static bool is_profile(enum kvd_setting which) {
        return strcmp(settings_info[which].name, "profile") == 0;
}

static bool is_on(enum kvd_setting which) {
        return strcmp(settings_info[which].name, "on") == 0;
}

void kvd_setting_put(shm_u64 *settings, enum kvd_setting which, double value) {
        store(settings, which, value);
        if (!is_profile(which))
                return;
        for (unsigned i = 0; i < KVD_N_SETTINGS; i++)
                if (strcmp(settings_info[i].method, settings_info[which].method) == 0 &&
                    !is_profile(i) && !is_on(i))
                        store(settings, i,
                              value == KVD_PAPER ? settings_info[i].paper : settings_info[i].serve);
}

void kvd_settings_init(shm_u64 *settings) {
        for (unsigned i = 0; i < KVD_N_SETTINGS; i++)
                store(settings, i, settings_info[i].serve);
}
