#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# evict --to file in a domain whose quota also limits its share of the file.
. "$(dirname "$0")/lib.sh"

# with_quota BYTES: a new daemon with a new file of 16 MiB; our domain may use that many bytes of the pool's 64 MiB
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

# 512 KiB: the blocks that are written first fit
with_quota 2M
kvctl 0 evict llama --all --to file
says '^20 blocks evicted from llama; 26 are in use and stay\.$'
tier_has 45 0
# later blocks replace them, though the file is nearly empty
start_filler other
kvctl 0 evict other --all --to file
says '^20 blocks evicted from other; 26 are in use and stay\.$'
tier_has 64 26
kvctl 0 check
stop_filler

# 256 KiB: blocks that are not written are reported, and no block leaves the pool
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
