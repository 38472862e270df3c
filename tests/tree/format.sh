#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Are all C files laid out as .clang-format says? Versions of clang-format differ, so only version 14 judges.
#
#   tests/tree/format.sh [--fix] ROOT
set -eu

what='--dry-run --Werror'
[ "$1" = --fix ] && what=-i && shift
cd "$1"
command -v clang-format-14 >/dev/null || {
        echo "clang-format-14 is not installed"
        exit 77
}
find client daemon ipc kernels store tests tools -name build -prune -o \( -name '*.c' -o -name '*.h' \) -print0 |
        xargs -0 -P "$(nproc)" -n 100 clang-format-14 $what
