/* SPDX-License-Identifier: Apache-2.0 */

/* The library is opened when it is first needed, and must have all functions that kvd calls. */

#include "daemon/process/remote/mooncake_library.h"

#include <dlfcn.h>
#include <errno.h>

#include "ipc/base/util.h"

#define NAME "libmooncake_store.so"

static bool resolve(void *library, const char *path, const char *symbol, void *to,
                    struct kvd_why *why) {
        void *at = dlsym(library, symbol);

        if (at)
                *(void **)to = at;
        else
                kvd_refuse(why, 0, "%s has no %s", path, symbol);
        return at != NULL;
}

bool mooncake_library_open(const char *path, struct mooncake_library *ret, struct kvd_why *why) {
        void *library;
        bool all = true;

        if (!path[0])
                path = NAME;
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) {
                kvd_refuse(why, 0, "Mooncake cannot be loaded: %s", dlerror());
                return false;
        }
#define RESOLVE(type, name, parameters) \
        all = all && resolve(library, path, "mooncake_store_" #name, &ret->name, why);
        MOONCAKE_CALLS(RESOLVE)
#undef RESOLVE
        if (!all)
                dlclose(library);
        return all;
}
