/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SETTINGS_H
#define KVD_BASE_SETTINGS_H

/*
 * The methods' settings of a space, as methods.def lists them. The daemon writes them into the
 * index header, where clients and workers read them; each is one atomic word, and none depends on
 * another.
 */

#include <stdbool.h>
#include <stddef.h>

#include "ipc/base/shm.h"

enum kvd_setting {
#define KVD_NUMBER(method, name, paper, serve, least, most, text) KVD_##method##_##name,
#define KVD_CHOICE(method, name, paper, serve, words, text) KVD_##method##_##name,
#include "ipc/base/methods.def"
        KVD_N_SETTINGS
};

#define KVD_SETTINGS_ROOM 96u

enum kvd_profile { KVD_PAPER, KVD_SERVE };

struct kvd_setting_info {
        const char *method, *name;
        double paper, serve, least, most;
        const char *words; /* words of a choice, separated by blanks, from 0 on; NULL: a number */
        const char *text;
};

/* NULL after the last one. */
const struct kvd_setting_info *kvd_setting_info(enum kvd_setting which);

/* name: METHOD or METHOD.on, METHOD.NAME. Returns -1 if none. */
int kvd_setting_by_name(const char *name);

/* Parses a value as users write it. 0, or -EINVAL. */
int kvd_setting_parse(enum kvd_setting which, const char *text, double *ret);

/* Formats a value so that kvd_setting_parse accepts it. Returns to. */
char *kvd_setting_format(enum kvd_setting which, double value, char *to, size_t size);

static inline double kvd_setting_get(const shm_u64 *settings, enum kvd_setting which) {
        uint64_t bits = atomic_load_explicit((shm_u64 *)&settings[which], memory_order_relaxed);
        double value;

        memcpy(&value, &bits, sizeof value);
        return value;
}

bool kvd_setting_is_fixed(enum kvd_setting which);

/* Is a method on that reads summaries? */
bool kvd_settings_read_summaries(const shm_u64 *settings);

static inline bool kvd_setting_on(const shm_u64 *settings, enum kvd_setting which) {
        return kvd_setting_get(settings, which) != 0;
}

/*
 * For the daemon. kvd_setting_put sets one setting, or with a method's profile also the method's
 * other settings, but for "on". kvd_settings_init sets all to their defaults.
 */
void kvd_setting_put(shm_u64 *settings, enum kvd_setting which, double value);
void kvd_settings_init(shm_u64 *settings);

#endif
