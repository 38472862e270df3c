/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/space_methods.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"

struct values {
        const char *at[METHOD_NAMES];
        char text[METHOD_NAMES][48];
};

static size_t index_of(const char *name) {
        size_t i = 0;

        while (i < METHOD_NAMES && strcmp(method_name(i), name) != 0)
                i++;
        return i;
}

static bool has(const struct values *v, const char *name) {
        size_t i = index_of(name);

        return i < METHOD_NAMES && v->at[i];
}

/* Unless the command line said something. */
_printf_(3, 4) static void put(struct values *v, const char *name, const char *format, ...) {
        size_t i = index_of(name);
        va_list args;

        if (i == METHOD_NAMES || v->at[i])
                return;
        va_start(args, format);
        vsnprintf(v->text[i], sizeof v->text[i], format, args);
        va_end(args);
        v->at[i] = v->text[i];
}

static double get(kvd_space *space, const char *name) {
        double value = 0;

        kvd_space_setting(space, name, &value);
        return value;
}

static void put_keydiff(kvd_space *space, struct values *v) {
        if (has(v, "evict") || get(space, "keydiff") == 0 || get(space, "keydiff.budget") == 0)
                return;
        put(v, "evict", "keydiff");
        put(v, "budget", "%.0f", get(space, "keydiff.budget"));
        put(v, "evict-every", "%.0f", get(space, "keydiff.block"));
        put(v, "evict-slack", "%.0f", get(space, "keydiff.slack"));
        put(v, "sink-blocks", "%.0f", get(space, "keydiff.sink_blocks"));
        put(v, "recent-frac", "%g", get(space, "keydiff.recent_frac"));
}

static void put_hshare(kvd_space *space, struct values *v) {
        static const char *const algorithms[] = {"greedy", "star"};

        if (has(v, "hshare") || get(space, "hshare") == 0)
                return;
        put(v, "hshare", "%g,%g,%g", get(space, "hshare.layer_ratio"), get(space, "hshare.head_ratio"),
            get(space, "hshare.query_ratio"));
        put(v, "critical", "%.0f,%.0f,%.0f", get(space, "hshare.sinks"), get(space, "hshare.recent"),
            get(space, "hshare.top"));
        put(v, "dense-layers", "%.0f", get(space, "hshare.dense_layers"));
        put(v, "share-by", "%s", algorithms[get(space, "hshare.algo") != 0]);
}

int space_methods(kvd_space *space, const char *const given[METHOD_NAMES], struct methods *ret) {
        struct values v = {0};

        memcpy(v.at, given, sizeof v.at);
        if (space) {
                put_keydiff(space, &v);
                put_hshare(space, &v);
        }
        return methods_read(v.at, ret);
}
