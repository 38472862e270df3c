#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Does layers.sh find what it is there to find? Plants one violation at a time in a copy of the tree.
#
#       selftest.sh ROOT
set -u
root=$(cd "${1:?usage: selftest.sh ROOT}" && pwd) || exit 2
copy=$(mktemp -d) || exit 2
trap 'rm -rf "$copy"' EXIT
failed=0

fresh_copy() {
        rm -rf "$copy/tree"
        mkdir "$copy/tree"
        (cd "$root" && tar cf - --exclude=.git --exclude='build*' --exclude='*.safetensors' \
                meson.build meson_options.txt daemon client ipc kernels store tests tools) | (cd "$copy/tree" && tar xf -)
}

# expect TEXT: layers.sh fails and says TEXT
expect() {
        if said=$(sh "$root/tests/tree/layers.sh" "$copy/tree"); then
                echo "not found: $1"
                failed=1
        elif ! echo "$said" | grep -qF "$1"; then
                echo "found, but not as \"$1\": $said"
                failed=1
        fi
        fresh_copy
}

fresh_copy
sh "$root/tests/tree/layers.sh" "$copy/tree" || {
        echo "the tree itself has violations"
        exit 1
}

echo '#include "daemon/loop.h"' >>"$copy/tree/store/store.h"
expect 'store must not include "daemon/loop.h" (daemon)'

echo '#include "store/store.h"' >>"$copy/tree/client/conn.h"
expect 'client must not include "store/store.h" (store)'

echo '  #  include "ipc/msg.h"' >>"$copy/tree/ipc/base/util.h"
expect 'ipc/base must not include "ipc/msg.h" (ipc)'

echo '#include "client/kvd.h"' >>"$copy/tree/ipc/base/util.h"
expect 'ipc/base must not include "client/kvd.h" (client)'

echo '#include "../ipc/msg.h"' >>"$copy/tree/daemon/loop.h"
expect '"../ipc/msg.h" is not written from the root'

echo '#include "loop.h"' >>"$copy/tree/daemon/loop.h"
expect '"loop.h" is no file, seen from the root'

echo '#include <sys/socket.h>' >>"$copy/tree/store/store.h"
expect 'store must not include <sys/socket.h>'

echo '#include "ipc/base/util.h"' >>"$copy/tree/client/kvd.h"
expect 'client/kvd.h: includes "ipc/base/util.h"'

echo '#include "store/methods/methods.h"' >>"$copy/tree/store/cache/cache.h"
expect 'store/cache must not include "store/methods/methods.h" (store/methods)'

echo '#include <sys/socket.h>' >>"$copy/tree/store/tier/tier.c"
expect 'store/tier must not include <sys/socket.h>'

echo '#include <stdbool.h>' >>"$copy/tree/client/kvd.h"
expect 'client/kvd.h: includes <stdbool.h>'

echo 'void *new(int class' >>"$copy/tree/client/kvd.h"
expect 'does not compile alone as c:'

printf '#ifdef __cplusplus\nint class;\n#endif\n' >>"$copy/tree/client/kvd.h"
if command -v "${CXX:-c++}" >/dev/null 2>&1; then
        expect 'does not compile alone as c++:'
fi

echo >"$copy/tree/notes.txt"
expect 'notes.txt: not a top-level entry'

exit $failed
