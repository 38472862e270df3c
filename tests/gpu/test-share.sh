#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# gpu-share with the stand-in driver: all of its answers are the right ones.
#
#       test-share.sh GPU-SHARE        KVD and LD_LIBRARY_PATH are set
set -u
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
"$1" >"$out" || { cat "$out"; exit 1; }
cat "$out"
[ "$(grep -c '"ok": true' "$out")" -eq 4 ] && ! grep -q '"ok": false' "$out"
