#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# On the stand-in driver, a program gives exactly N answers, and all are right.
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
