/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A space's policy, its size and the methods' settings (ipc/base/methods.def) may be changed while
 * it is in use. They are in the header of its index, where clients and workers read them.
 *
 * hshare.channels is the exception: the size of labels is part of the summaries' layout, so it is
 * fixed when the space is created, and the setting only reports it.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "store/cache/cache.h"
#include "store/hooks.h"

static int check_policy(struct space *space, const char *value) {
        uint32_t policy = kvd_enum_number(KVD_ENUM_policy, value);
        char what[32];

        if (!policy)
                return store_refuse(space_store(space), -EINVAL,
                                    "policy is one of " KVD_LIST(policy) ", not '%s'", value);
        snprintf(what, sizeof what, "policy %s", value);
        return policy_goes_by_worth(policy) ? space_refuse_opaque(space, what) : 0;
}

static int check_max_blocks(struct space *space, const char *value) {
        char *end;
        unsigned long long n = strtoull(value, &end, 10);

        if (*end || end == value || n > space_index(space)->capacity)
                return store_refuse(space_store(space), -EINVAL,
                                    "max_blocks is 1 to %u (the space's index holds no "
                                    "more), or 0 for what quota and pool allow; not '%s'",
                                    space_index(space)->capacity, value);
        return 0;
}

static void set_max_blocks(struct space *space, const char *value) {
        space->ix->max_blocks = (uint32_t)strtoull(value, NULL, 10);
        space_fit(space);
        space_is_busy(space);
}

/* ---- the methods' settings ------------------------------------------------------------------- */

static int refuse_value(struct space *space, enum kvd_setting which, const char *value) {
        const struct kvd_setting_info *info = kvd_setting_info(which);
        struct store *store = space_store(space);

        if (info->words)
                return store_refuse(store, -EINVAL, "%s.%s is one of: %s; not '%.64s'",
                                    info->method, info->name, info->words, value);
        return store_refuse(store, -EINVAL, "%s.%s is a number from %g to %g, not '%.64s'",
                            info->method, info->name, info->least, info->most, value);
}

static int refuse_channels(struct space *space) {
        return store_refuse(space_store(space), -EINVAL,
                            "hshare.channels is fixed when a space is made; it is %u in space '%s'",
                            space_index(space)->label_channels, space_name(space));
}

static void tell_channels(struct kvd_index *ix) {
        kvd_setting_put(ix->settings, KVD_hshare_channels, ix->label_channels);
}

static int check_method(struct space *space, enum kvd_setting which, const char *text) {
        double value;
        int r = space_refuse_opaque(space, kvd_setting_info(which)->method);

        if (r < 0)
                return r;
        if (kvd_setting_parse(which, text, &value) < 0)
                return refuse_value(space, which, text);
        if (which == KVD_hshare_channels && value != space_index(space)->label_channels)
                return refuse_channels(space);
        /* methods need a worker, and that needs the summaries: allocate them now, or refuse */
        if (value != 0 && strcmp(kvd_setting_info(which)->name, "on") == 0)
                r = space_summary_fd(space, true);
        return MIN(r, 0);
}

static void set_method(struct space *space, enum kvd_setting which, const char *text) {
        struct kvd_index *ix = space->ix;
        double value = 0;

        kvd_setting_parse(which, text, &value);
        kvd_setting_put(ix->settings, which, value);
        tell_channels(ix); /* a profile may have changed it */
        hooks_setting_changed(space);
}

void settings_init(struct kvd_index *ix) {
        kvd_settings_init(ix->settings);
        tell_channels(ix);
}

int space_check_setting(struct space *space, const char *key, const char *value) {
        int which;

        if (strcmp(key, "policy") == 0)
                return check_policy(space, value);
        if (strcmp(key, "max_blocks") == 0)
                return check_max_blocks(space, value);
        which = kvd_setting_by_name(key);
        if (which >= 0)
                return check_method(space, (enum kvd_setting)which, value);
        return store_refuse(space_store(space), -EINVAL,
                            "a space has no setting '%s'; it has policy, max_blocks and "
                            "those of the methods (kvctl space set --help)",
                            key);
}

int space_set(struct space *space, const char *key, const char *value) {
        int r = space_check_setting(space, key, value);

        if (r < 0)
                return r;
        if (strcmp(key, "policy") == 0)
                evict_set_policy(space, kvd_enum_number(KVD_ENUM_policy, value));
        else if (strcmp(key, "max_blocks") == 0)
                set_max_blocks(space, value);
        else
                set_method(space, (enum kvd_setting)kvd_setting_by_name(key), value);
        return 0;
}
