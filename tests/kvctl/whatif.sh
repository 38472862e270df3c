#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kvctl whatif: for real requests, its hit rates are those of a simulator that plays them one by one; and its refusals.
# ROOT is the source tree.
. "$(dirname "$0")/lib.sh"
: "${ROOT:?source tree}"
zcat "$ROOT/tests/bench/trace/conversation.jsonl.gz" >"$dir/trace.jsonl"

kvctl 0 whatif "$dir/trace.jsonl" 300 1105 5528 22114 55287 --json
python3 - "$dir/out" "$ROOT/tests/bench" <<'EOS' || wrong "another answer than the simulator's"
import json, sys
sys.path.insert(0, sys.argv[2])
sys.dont_write_bytecode = True
import replay
requests, told = replay.read(replay.HERE / "trace/conversation.jsonl.gz"), json.load(open(sys.argv[1]))
assert told["trace"] == {"requests": 3000, "blocks": 80619, "different": 55287, "longest": max(map(len, requests)),
                         "missed": 0}
for pool in told["pools"]:
    found = sum(replay.simulate(requests, pool["blocks"], 0))
    assert pool["found"] == found, (pool, found)
    assert abs(pool["hit_rate"] - found / 80619) < 1e-9, pool
assert [pool["blocks"] for pool in told["pools"]] == [300, 1105, 5528, 22114, 55287]
EOS

# without sizes: the usual ones, the last of which holds everything, from the standard input
"$KVCTL" whatif - <"$dir/trace.jsonl" >"$dir/out" 2>&1 || wrong "the standard input is not read"
what='kvctl whatif -'
says '^ *500 ' '^ *20000 ' '^ *55287 .*|#\{50\}$'
says_not '^ *100 '

# a block is of use only if those before it are there: the second time, 7 is there, but 9 is not
printf '%s\n' '{"hash_ids":[1,7]}' '{"hash_ids":[9,7]}' >"$dir/odd.jsonl"
kvctl 0 whatif "$dir/odd.jsonl" 2 --json
says '"found": *0'

echo '{"hash_ids":[1,2,3]}' >"$dir/one.jsonl"
kvctl 1 whatif "$dir/one.jsonl" 2
complains 'longest request has 3 blocks'
kvctl 2 whatif "$dir/one.jsonl" many
complains 'not "many"'
kvctl 1 whatif "$dir/nowhere.jsonl"
complains 'No such file'
printf '\n{"hash_ids":[]}\n' >"$dir/bad.jsonl"
kvctl 1 whatif "$dir/bad.jsonl"
complains 'line 2 has no hash_ids'
echo '{"hash_ids":["x"]}' >"$dir/bad.jsonl"
kvctl 1 whatif "$dir/bad.jsonl"
complains 'not a whole number'
echo 'hash_ids' >"$dir/bad.jsonl"
kvctl 1 whatif "$dir/bad.jsonl"
complains 'is no JSON'
: >"$dir/bad.jsonl"
kvctl 1 whatif "$dir/bad.jsonl"
complains 'no requests'
finish
