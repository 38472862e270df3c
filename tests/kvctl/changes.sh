#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The verbs that change something: evict, space create, space set, space delete.
. "$(dirname "$0")/lib.sh"
start_daemon
shape='--layers 2 --kv-heads 2 --head-dim 8 --vocab 1000'

# shellcheck disable=SC2086 # $shape is words
{
        kvctl 0 spaces
        says '^No spaces yet'
        kvctl 0 spaces --json
        json_is_valid
        kvctl 0 stat
        says '^No spaces yet'
        kvctl 0 check
        says 'All invariants hold in 0 spaces'
        kvctl 0 space create tiny $shape --dtype bf16 --fingerprint abc123 --policy fifo --kind bidirectional
        says 'tiny is made'
        kvctl 0 space create tiny $shape --dtype bf16 --fingerprint abc123 --policy fifo --kind bidirectional
        says 'already'
        kvctl 1 space create tiny $shape --dtype f16 --fingerprint abc123 --policy fifo --kind bidirectional
        complains dtype
        kvctl 0 --json space create other $shape --dtype i8 --block-tokens 32 --order nhd --rope none --keys paper --max-blocks 77
        json_is_valid
        says '"created": true'
        kvctl 0 space create opaque --block-bytes 4096 --layout engine.v1 --block-tokens 8
        kvctl 1 space create opaque --block-bytes 4096 --layout engine.v2 --block-tokens 8
        complains layout
        kvctl 1 space create wrong --block-bytes 4096 --layout engine.v1 $shape
        complains 'must be 0'
        kvctl 1 space set opaque keydiff=on
        complains opaque
        kvctl 0 spaces
        says '^opaque  *engine.v1 x 8 .* 4.0 KiB'
        kvctl 0 space delete opaque
}
kvctl 0 spaces --json
says '"kind": "bidirectional"' '"policy": "fifo"' '"fingerprint": "00000000000000000000000000abc123"' '"dtype": "i8"' \
        '"order": "nhd"' '"rope": "none"' '"keys": "paper"' '"block_tokens": 32' '"max_blocks": 77' '"layout": null'
kvctl 0 prefixes tiny
says '^Nothing is cached\.$'
kvctl 0 blocks tiny
says 'no memory yet'

# BiCache's table
printf '{"def": "INCLUDE_GEN", "entries": [[0, 1], [60, 2]]}\n' >"$dir/table.json"
kvctl 0 profile import tiny "$dir/table.json"
cmp -s "$dir/table.json" "$dir/out" || wrong "$what: prints another table"
kvctl 0 profile export tiny
cmp -s "$dir/table.json" "$dir/out" || wrong "$what: prints another table"
kvctl 0 profile export tiny --json
json_is_valid
says '"ratio_percent": 60' '"depth": 2'
kvctl 1 profile build tiny
kvctl 0 profile forget tiny
kvctl 1 profile export tiny
complains 'no table'
kvctl 2 profile import tiny "$dir/none.json"
complains 'No such file'
for bad in '{' '[]' '{"def": "INCLUDE_GEN"}' '{"def": "OTHER", "entries": [[0, 1]]}' '{"def": "PROMPT_ONLY", "entries": [[1, 0]]}' \
        '{"def": "PROMPT_ONLY", "entries": [[9, 2], [9, 2]]}' '{"def": "PROMPT_ONLY", "entries": [[0, 2], [9, 1]]}'; do
        echo "$bad" >"$dir/table.json"
        kvctl 2 profile import tiny "$dir/table.json"
done

kvctl 0 space set tiny policy=lru max_blocks=64
says '^tiny: policy=lru$' '^tiny: max_blocks=64$'
kvctl 0 spaces --json
says '"max_blocks": 64'
says_not '"policy": "fifo"'
kvctl 0 space set tiny policy=fifo --json
json_is_valid
kvctl 0 space set tiny policy=fifo
says_not 'follow'
kvctl 0 space set tiny policy=fifo keydiff.budget=64
says 'kvlm' 'vLLM on CPUs if'
kvctl 1 space set tiny polcy=fifo
complains policy
kvctl 2 space set tiny policy
complains KEY=VALUE
# all or nothing, wherever the fault is and whichever check finds it
for wrong in foo=1 memshare=perhaps hshare.channels=3 keydiff.recent_frac=7 memshare.foo=on; do
        kvctl 1 space set tiny max_blocks=32 policy=priority $wrong
        kvctl 1 space set tiny $wrong max_blocks=32 policy=priority
        kvctl 1 space set tiny max_blocks=32 $wrong policy=priority
done
for wrong in policy=lur max_blocks=-1 max_blocks=99999999999; do
        kvctl 1 space set tiny keydiff.recent_frac=0.7 $wrong
        kvctl 1 space set tiny $wrong keydiff.recent_frac=0.7
done
kvctl 2 space set tiny max_blocks=32 policy
kvctl 2 space set tiny max_blocks=32 =7
kvctl 2 space set tiny max_blocks=32 policy=lru max_blocks=16
complains 'max_blocks.* is set twice'
kvctl 0 spaces --json
says '"max_blocks": 64' '"policy": "fifo"'
kvctl 0 methods tiny --settings
says_not 'keydiff.recent_frac  *0.7'
kvctl 1 space set nix policy=fifo
complains nix

kvctl 0 space delete other
kvctl 1 space delete other
kvctl 0 space delete tiny --json
json_is_valid

# eviction: B (pinned) and the blocks before it stay
start_filler llama
chain=$("$KVCTL" prefixes --json | sed -n '/"chain"/{s/.*: "//;s/",*//;p;}' | head -1)
kvctl 1 evict --all --to file
complains 'there is no file tier for the space, or it is not on'
kvctl 0 evict --blocks 3
says '^3 blocks evicted from llama\.$'
kvctl 0 evict llama --all
says '^17 blocks evicted from llama; 26 are in use and stay\.$'
kvctl 1 evict llama --all
says '^Nothing evicted from llama: all 26 blocks that are cached are in use; "kvctl clients" shows by whom\.$'
kvctl 1 evict llama --all --json
json_is_valid
says '"evicted_blocks": 0' '"held_blocks": 26'
kvctl 1 evict llama --blocks 5
says '^0 of 5 blocks evicted'
kvctl 1 evict llama --chain "$chain"
complains 'not cached'
pinned=$("$KVCTL" prefixes --json | sed -n '/"chain"/{s/.*: "//;s/",*//;p;}' | head -1)
kvctl 1 evict llama --chain "$pinned"
says 'in use'
kvctl 1 evict llama --blocks 5 --json
json_is_valid
says '"evicted_blocks": 0' '"asked_blocks": 5'
kvctl 0 check
kvctl 1 space delete llama
complains force
stop_filler
kvctl 0 evict llama --chain "$pinned" --json
json_is_valid
says '"asked_blocks": null'
kvctl 0 evict llama --all
kvctl 0 spaces --json
says '"sealed": 0' '"filling": 0'
kvctl 0 check

start_filler llama
kvctl 0 space delete llama --force
kvctl 0 spaces
says '^No spaces yet'
finish
