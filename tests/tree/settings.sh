#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Each setting of ipc/base/methods.def must be read somewhere: an unread setting would be an empty promise.
#
#       settings.sh ROOT
set -u
cd "${1:?usage: settings.sh ROOT}" || exit 2
status=0
for name in $(sed -n 's/^KVD_[A-Z]*(\([a-z]*\), \([a-z_]*\),.*/\1.\2/p' ipc/base/methods.def); do
        method=${name%.*} setting=${name#*.}
        [ "$setting" != profile ] || continue # read when its method's other settings are set
        ! grep -qF "KVD_FIXED($method, $setting," ipc/base/methods.def || continue # only reported
        case $setting in
        on) words="\"$method\"" ;;
        *) words="\"$name\"" ;;
        esac
        grep -rqF -e "KVD_${method}_$setting" -e "$words" store daemon client tools/kvlm && continue
        echo "ipc/base/methods.def: nobody reads $name"
        status=1
done
exit $status
