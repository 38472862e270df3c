#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A pool that is full and all in use: kvctl shows its holders, and the log has one line about it.
. "$(dirname "$0")/lib.sh"
start_daemon --pool 4M
start_filler full "${HOARDER:?binary of tests/kvctl/hoarder.c}"

# the daemon counts held blocks in rounds
python3 - "$KVCTL" <<'EOS' || wrong "kvctl dump: not everything is held"
import json, subprocess, sys, time
for i in range(3000):
    d = json.loads(subprocess.check_output([sys.argv[1], "dump"]))
    if any(c["held_bytes"] for c in d["clients"]):
        break
    time.sleep(0.02)
daemon, space = d["daemon"], d["spaces"][0]
client = next(c for c in d["clients"] if c["spaces"])
assert space["blocks"]["evictable"] == 0 and space["blocks"]["held"] == space["blocks"]["sealed"] > 0, space
assert client["held_bytes"] == daemon["held_bytes"] == daemon["pool_bytes"], (client, daemon)
assert daemon["evictable_bytes"] == 0, daemon
EOS
kvctl 0 blocks
says '^s  sealed  *0 ' '^h  held  *[1-9]' "^full: clients hold 100 % of the pool: kvctl-hoarder (client [0-9]*, process $filler) 4.0 MiB"
kvctl 0 status
says "^full: clients hold 100 % of the pool: kvctl-hoarder (client [0-9]*, process $filler) 4.0 MiB"
kvctl 0 top -n 1 --watch 0.1
says "^full: clients hold 100 % of the pool: kvctl-hoarder "
kvctl 1 evict --all
says '^Nothing evicted from full: all [0-9]* blocks that are cached are in use'
[ "$(grep -c "was refused blocks: space 'full' has no block left.*; client [0-9]* (kvctl-hoarder, process $filler) holds most: [0-9]* blocks" "$dir/kvd.log")" -eq 1 ] ||
        wrong "one line in the log: $(cat "$dir/kvd.log")"
stop_filler
kvctl 0 check
finish
