#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every verb that changes nothing, as a table and as JSON, on a cache with known contents (see filler.c).
. "$(dirname "$0")/lib.sh"
start_daemon
start_filler llama

kvctl 0 ping
says "^kvd .* (pid $daemon) at $KVD_SOCKET answered in "
kvctl 0 status
says "^pid  *$daemon\$" '^administrator  *yes$' '^spaces  *1$' '^llama  2x2x8 f32 x 16  lru  *4.0 KiB' \
        '^held by clients  *[0-9]' '^evictable  *80.0 KiB$'
kvctl 0 spaces
says '^SPACE .* REUSED  METHODS$' '60\.0 %  -$'
says_not DOMAIN # there is only one
fits 112
kvctl 0 clients
says "^CLIENT .* HELD .* AGE\$" " $filler .* kvctl-filler  yes " ' kvctl  *yes '
fits 112

kvctl 0 tiers
says '^There is nothing below the pool; "file", "remote" and "host_tier" in kvd.conf(5) add tiers\.$'
kvctl 0 tiers --json
says '"tiers": \[\]'
kvctl 0 blocks
says '^llama: 256 blocks$' '^  0  hhh*' '^L  limbo  *0 ' '^P  pinned  *1 ' '^h  held  *25 ' '^s  sealed  *20 '
fits 80
kvctl 0 blocks llama --rows 1
says '^llama: 256 blocks, 4 to a cell'
[ "$(grep -c '^  0  ' "$dir/out")" -eq 1 ] || wrong "$what: one row"

kvctl 0 prefixes
says '^CHAIN ' ' 640  *40  *20  *0 .* 1000 1001 1002 .* \.\.$' ' 404  *26  *20  *1 .* 1000 1001'
awk '$2 == 640 { a = NR } $2 == 404 { b = NR } END { exit !(a && a < b) }' "$dir/out" || wrong "$what: longest first"
kvctl 0 prefixes --limit 1
says ' 640 ' '^1 more chain.* not shown'
says_not ' 404 '

kvctl 0 sessions
says '^NAME  *KEEP  *BLOCKS  *BYTES  *LEFT$' '^agent-7  *high  *40  *160 KiB  *[0-9]'
kvctl 0 sessions llama --json
says '"name": "agent-7"' '"keep": "high"' '"blocks": 40'
kvctl 2 session end llama
kvctl 2 session end llama agent-7 --user 4294967296
kvctl 1 session end llama agent-8
complains 'no session of that name'
kvctl 1 session end llama agent-7 --user 77777
kvctl 0 session end llama agent-7 --user "$(id -u)"
says '^Session agent-7 is ended'
kvctl 0 sessions
says_not agent-7
kvctl 0 stat llama
says '^sealed  *46  blocks ' '^lookups  *3  calls ' '^lookup_hits  *2 ' '^tokens_asked  *1600 ' '^tokens_found  *960 ' \
        '^hit_rate  *66\.7 %  lookup_hits / lookups$' '^tokens_reused  *60\.0 %  tokens_found / tokens_asked$'
kvctl 0 check
says '^llama  *256  *0  -' '^All invariants hold in 1 space\.$'
kvctl 0 top --batch -n 2 --watch 0.1
says '^kvctl top, every 0.1 s' '^SPACE .*EVICT/s' '^llama  *18.0 %' 'kvctl-filler'
[ "$(grep -c '^SPACE' "$dir/out")" -eq 2 ] || wrong "$what: two pictures"
fits 100
kvctl 0 methods
says '^METHOD  *ON  *PROFILE  *CHANGED$' '^memshare  *off  *serve  *-$' '^pressure  *on '
kvctl 0 methods llama --settings
says '^memshare.tau_block  *0.27  *0.8  *0.27  *0 to 1e+09  *stage 2' '^hshare.algo  *star  *greedy_root  *star  *greedy_root star '
kvctl 1 profile export
complains 'space "llama" has no table; "kvctl profile build llama" makes one from samples'
kvctl 0 proto
says ' seal_reply  *blocks  *bin  *32768 ' '^ *1  attach  *-  *-  *-  first request of a connection'

# held: 26 blocks of the pinned chain and those being filled, of 4 KiB each; evictable: the other 20
kvctl 0 dump
python3 - "$dir/out" <<'EOS' || wrong "$what: what is held does not add up"
import json, sys
d = json.load(open(sys.argv[1]))
blocks, client = d["spaces"][0]["blocks"], next(c for c in d["clients"] if c["name"] == "kvctl-filler")
assert (blocks["held"], blocks["evictable"]) == (26, 20), blocks
assert client["held_bytes"] == (26 + client["filling_blocks"]) * 4096, client
assert d["daemon"]["held_bytes"] == client["held_bytes"] and d["daemon"]["evictable_bytes"] == 20 * 4096, d["daemon"]
assert sum(s["blocks"] for s in d["states"] if s["held"]) == 26, d["states"]
EOS

# the same for programs
for verb in ping health status spaces clients methods 'profile forget llama' 'blocks llama' prefixes 'prefixes --limit 1' stat check proto dump \
        'top -n 2 --watch 0.1' 'blocks --watch 0.1 --rows 2'; do
        case $verb in
        *'--rows 2') continue ;; # has no end of its own: terminal.sh
        esac
        # shellcheck disable=SC2086 # words
        kvctl 0 --json $verb
        json_is_valid
done
kvctl 0 spaces --json
python3 - "$dir/out" <<'EOS' || wrong "$what: a key stands twice in one object"
import json, sys
def once(pairs):
    assert len(pairs) == len({key for key, _ in pairs}), pairs
    return dict(pairs)
space = json.load(open(sys.argv[1]), object_pairs_hook=once)["spaces"][0]
assert {"total", "free", "private", "vague"} <= space["blocks"].keys()
EOS
kvctl 0 status --json
says '"administrator": true' '"pool_bytes": 67108864' '"fingerprint": "fedcba98765432100123456789abcdef"' '"layers": 2'
kvctl 0 stat --json
says '"name": "tokens_found"' '"value": 960' '"value": 0.6,*$' '"formula": "lookup_hits / lookups"'
kvctl 0 prefixes --json
says '"first_tokens": \[$' '^ *1000,$' '"tokens": 404' '"shared_blocks": 20'
kvctl 0 blocks --json
says '"state": "sealed"' '"pinned": true' '"letter": "P"'
kvctl 0 dump
json_is_valid
says '^  "daemon": {$' '^  "spaces": \[$' '^  "clients": \[$' '^  "counters": \[$' '^  "figures": \[$' '^  "chains": \[$' \
        '^  "states": \[$'
kvctl 0 top --json -n 2 --watch 0.1
says '"turn_recent_us"'
[ "$(grep -c '"interval_s"' "$dir/out")" -eq 2 ] || wrong "$what: two samples"

# These verbs leave nothing behind.
stop_filler
kvctl 0 status
says '^clients  *1$'
kvctl 0 spaces
says ' 46  *0  *210  *0 ' # nothing is being filled any more
kvctl 0 check
finish
