#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The file tier as kvctl shows it, and evict --to file.
. "$(dirname "$0")/lib.sh"
start_daemon --set "daemon.file=$dir/file" --set daemon.file_size=16M
start_filler llama
for _ in $(seq 600); do
        "$KVCTL" tiers | grep -q '^file *on' && break
        sleep 0.1
done

# no block was used twice or is deep in its chain, so the file is empty
kvctl 0 tiers
says '^TIER .* READ/S  *WRITTEN/S  *AGE  *EVICTED' '^file  *on  *16.0 MiB .* -  *-  *- '
kvctl 2 evict llama --all --to disk
complains '--to takes file, not "disk"'
kvctl 0 evict llama --all --to file
says '^20 blocks evicted from llama; 26 are in use and stay\.$' \
        '^Not written to the file, because fetches cannot bring them back: 1 blocks\. Only full blocks'
kvctl 0 tiers --json
json_is_valid
says '"records": 45,' '"read_per_second": null' '"written_per_second": [0-9]' '"age_ms": [0-9]' '"errors": 0'

# from the second picture on, rates are those since the previous picture
"$KVCTL" tiers --watch 0.2 --json >"$dir/out" 2>"$dir/err" &
watcher=$!
wait_until '"written_per_second": null'
kill -INT $watcher
wait $watcher

# blocks that are in the file are not written again
kvctl 1 evict llama --all --to file
kvctl 0 tiers --json
says '"records": 45,'

# killed in the middle: the next run does all of it
"$KVCTL" evict llama --all --to file >/dev/null 2>&1 &
leaver=$!
kill -KILL $leaver
wait $leaver 2>/dev/null
stop_filler
kvctl 0 evict llama --all --to file
says '^26 blocks evicted from llama\.$'
kvctl 0 check llama
finish
