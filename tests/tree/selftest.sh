#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Tests that layers.sh finds violations: plants one at a time in a copy of the tree.
#
#       selftest.sh ROOT
set -u
root=$(cd "${1:?usage: selftest.sh ROOT}" && pwd) || exit 2
copy=$(mktemp -d) || exit 2
trap 'rm -rf "$copy"' EXIT
failed=0

mkdir "$copy/tree"
(cd "$root" && tar cf - --exclude=.git --exclude='build*' --exclude='*.safetensors' \
        meson.build meson_options.txt daemon client ipc kernels store tests tools) | (cd "$copy/tree" && tar xf -)

# plant FILE LINE: appends LINE to FILE
plant() {
        planted=$1
        printf '%s\n' "$2" >>"$copy/tree/$planted"
}

# expect TEXT: layers.sh must fail and print TEXT; then restores the file
expect() {
        if said=$(sh "$root/tests/tree/layers.sh" "$copy/tree"); then
                echo "not found: $1"
                failed=1
        elif ! echo "$said" | grep -qF "$1"; then
                echo "found, but not as \"$1\": $said"
                failed=1
        fi
        cp "$root/$planted" "$copy/tree/$planted" 2>/dev/null || rm "$copy/tree/$planted"
}

sh "$root/tests/tree/layers.sh" "$copy/tree" || {
        echo "the tree itself has violations"
        exit 1
}

plant store/store.h '#include "daemon/base/loop.h"'
expect 'store must not include "daemon/base/loop.h" (daemon/base)'

plant client/conn/conn.h '#include "store/store.h"'
expect 'client/conn must not include "store/store.h" (store)'

plant daemon/base/loop.h '#include "daemon/serve/server.h"'
expect 'daemon/base must not include "daemon/serve/server.h" (daemon/serve)'

plant ipc/base/util.h '  #  include "ipc/msg.h"'
expect 'ipc/base must not include "ipc/msg.h" (ipc)'

plant ipc/base/util.h '#include "client/kvd.h"'
expect 'ipc/base must not include "client/kvd.h" (client)'

plant daemon/base/loop.h '#include "../ipc/msg.h"'
expect '"../ipc/msg.h" is not written from the root'

plant daemon/base/loop.h '#include "loop.h"'
expect '"loop.h" is no file, seen from the root'

plant store/store.h '#include <sys/socket.h>'
expect 'store must not include <sys/socket.h>'

plant client/kvd.h '#include "ipc/base/util.h"'
expect 'client/kvd.h: includes "ipc/base/util.h"'

plant store/cache/cache.h '#include "store/methods/methods.h"'
expect 'store/cache must not include "store/methods/methods.h" (store/methods)'

plant store/below/place.c '#include <sys/socket.h>'
expect 'store/below must not include <sys/socket.h>'

plant client/conn/conn.h '#include "kvd.h"'
expect '"kvd.h" is no file, seen from the root'

plant client/kvd_cuda.h '#include "client/kvd.h"'
expect 'client/kvd_cuda.h: includes "client/kvd.h"'

plant client/kvd.h '#include <stdbool.h>'
expect 'client/kvd.h: includes <stdbool.h>'

plant client/kvd.h 'void *new(int class'
expect 'does not compile alone as c:'

plant client/kvd.h "$(printf '#ifdef __cplusplus\nint class;\n#endif')"
if command -v "${CXX:-c++}" >/dev/null 2>&1; then
        expect 'does not compile alone as c++:'
fi

plant notes.txt ''
expect 'notes.txt: not a top-level entry'

exit $failed
