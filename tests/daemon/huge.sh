#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The soak, and then a cache that outlives its daemon, on reserved 2 MiB pages. They use the pages that are free, the second one
# all of them. With KVD_TEST_HUGE=1, as root, this reserves some and returns them afterwards. A test should not change
# somebody's machine unasked.
#
#   huge.sh SOAK TEST-OUTLIVE
set -u
pages=/proc/sys/vm/nr_hugepages
free=/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages
needed=40
[ -r $free ] || { echo "SKIP: no 2 MiB pages here"; exit 77; }
before=$(cat $pages)
if [ "$(cat $free)" -lt $needed ] && [ "${KVD_TEST_HUGE-}" = 1 ] && [ -w $pages ]; then
        trap 'echo "$before" >$pages' EXIT
        trap 'exit 130' INT TERM
        echo $((before + needed)) >$pages
fi
[ "$(cat $free)" -ge $needed ] || {
        echo "SKIP: fewer than $needed free 2 MiB pages (KVD_TEST_HUGE=1 reserves them)"
        exit 77
}
"$1" --seconds 5 --huge --pool 64M && KVD_TEST_PAGES=huge KVD_TEST_POOL=$(($(cat $free) * 2))M "$2"
