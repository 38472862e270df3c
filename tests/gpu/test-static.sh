#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# In a build with -Dstatic_libs=true, programs need only libc and libm of the machine.
#
#       test-static.sh BUILD
set -u
cd "$1" || exit 1
while read -r file; do
        case $file in
        */kernel-tests | */run-files) continue ;;
        esac
        [ -f "$file" ] || echo "$file is not there"
        ldd "$file" | sed -n 's/^[[:space:]]*\([^ ]*\).*/\1/p' |
                grep -vE '^(linux-vdso\.so\.1|libc\.so\.6|libm\.so\.6|/lib64/ld-linux-x86-64\.so\.2)$' |
                sed "s|^|$file needs |"
done <tests/gpu/run-files | grep . && exit 1
exit 0
