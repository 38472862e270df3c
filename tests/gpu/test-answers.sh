#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# With the stand-in driver: all answers of a program are the right ones, and so many there are.
#
#       test-answers.sh N PROGRAM...        KVD and LD_LIBRARY_PATH are set
set -u
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
n=$1
shift
"$@" >"$out" || { cat "$out"; exit 1; }
cat "$out"
[ "$(grep -c '"ok": true' "$out")" -eq "$n" ] && ! grep -q '"ok": false' "$out"
