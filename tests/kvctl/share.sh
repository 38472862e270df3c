#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# evict --to file in a domain with a quota, which is its share of the file, too.
. "$(dirname "$0")/lib.sh"

# with_quota BYTES: a new daemon with a new file, where we have as much of 64 MiB, and the file 16
with_quota() {
        if [ -n "$daemon" ]; then
                kill "$daemon"
                wait "$daemon"
        fi
        rm -f "$dir/file"
        start_daemon --set "daemon.file=$dir/file" --set daemon.file_size=16M --set "domain team.users=$(id -u)" \
                --set "domain team.quota=$1"
        start_filler llama
        for _ in $(seq 600); do
                "$KVCTL" tiers | grep -q '^file *on' && break
                sleep 0.1
        done
}

# tier_has RECORDS EVICTED: each is 8 KiB
tier_has() {
        kvctl 0 tiers --json
        says "\"used\": $(($1 * 8192))," "\"records\": $1," "\"evicted\": $2,"
}

# 512 KiB: what goes there first has room
with_quota 2M
kvctl 0 evict llama --all --to file
says '^20 blocks evicted from llama; 26 are in use and stay\.$'
tier_has 45 0
# ... and makes room for what goes there later, though the file is nearly empty
start_filler other
kvctl 0 evict other --all --to file
says '^20 blocks evicted from other; 26 are in use and stay\.$'
tier_has 64 26
kvctl 0 check
stop_filler

# 256 KiB: what does not go there is said, and nothing leaves the pool
with_quota 1M
kvctl 1 evict llama --all --to file
complains '13 blocks could not be written to the file; see kvctl tiers'
tier_has 32 0
kvctl 1 evict llama --all --to file
complains '13 blocks could not be written to the file'
tier_has 32 0
kvctl 0 spaces --json
says '"evictable": 20,'
kvctl 0 check
finish
