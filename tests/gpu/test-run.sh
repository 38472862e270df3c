#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tests/gpu/run with the stand-in driver: it writes what was said, never among the results of GPUs; what no longer fits
# into its time is reported so; an interruption ends everything.
#
#       test-run.sh SOURCE BUILD FAKECUDA
set -u
export BUILD=$2 LD_LIBRARY_PATH=$3 FAKECUDA_GROUP="run$$"
run=$1/tests/gpu/run results=$1/tests/gpu/results failed=0
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
wrong() {
        echo "FAILED: $*"
        tail -n 5 "$dir/out" "$dir/err"
        failed=1
}
before=$(ls "$results")

sh "$run" --only benchmarks --out "$dir/some.json" >"$dir/out" 2>"$dir/err" || wrong "benchmarks: status $?"
python3 - "$dir/some.json" <<'PYTHON' || wrong 'the file'
import json, sys
it = json.load(open(sys.argv[1]))
assert it['stand_in'] is True and 'STAND-IN, NOT A GPU' in it['device'], it['device']
assert it['commit'] and it['date'] and it['parts']['benchmarks']['no'] == 0
assert any(r['check'] == 'bench' for r in it['results']) and all('STAND-IN' in r['driver'] for r in it['results'])
PYTHON
grep -q '^benchmarks ' "$dir/out" || wrong 'no table'
sh "$run" --only none >"$dir/out" 2>"$dir/err"
grep -q 'not written: what answered is not a GPU' "$dir/err" || wrong 'a stand-in: where did it write?'
sh "$run" --only none --out "$results/stand-in.json" >"$dir/out" 2>"$dir/err" && wrong 'among the results of GPUs: status 0'
grep -q 'not kept among those of GPUs' "$dir/err" || wrong 'among the results of GPUs: no word'
[ "$(ls "$results")" = "$before" ] || wrong 'something was written among the results of GPUs'

sh "$run" --only benchmarks --seconds 12 --out "$dir/late.json" >"$dir/out" 2>"$dir/err"
grep -q '"check": "benchmarks".*"not run: out of time"' "$dir/out" || wrong 'out of time: not said'

# Interrupted while the checks run: status 130, and nobody is left of its group's users.
python3 - "$run" "$dir/out" <<'PYTHON' || wrong 'an interruption'
import os, signal, subprocess, sys, time
with open(sys.argv[2], 'w') as out:
    it = subprocess.Popen(['sh', sys.argv[1], '--only', 'checks'], stdout=out, stderr=out, start_new_session=True)
    time.sleep(3)
    os.killpg(it.pid, signal.SIGINT)
    assert it.wait(timeout=10) == 130, it.returncode
mark = f"FAKECUDA_GROUP={os.environ['FAKECUDA_GROUP']}".encode()
for tries in range(30):
    left = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            name = os.readlink(f'/proc/{pid}/exe')
            if mark in open(f'/proc/{pid}/environ', 'rb').read() and 'gpu-checks' in name:
                left.append(pid)
        except OSError:
            pass
    if not left:
        sys.exit(0)
    time.sleep(0.1)
sys.exit(f'still there: {left}')
PYTHON
exit $failed
