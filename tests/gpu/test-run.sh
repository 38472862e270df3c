#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tests/gpu/run on the stand-in driver: it writes the results after every program, and never among those of GPUs. A
# program that hangs, is killed, or cannot be killed, an interruption, or a driver that nothing else can work with loses
# none of the results that are already known.
#
#       test-run.sh SOURCE BUILD FAKECUDA
set -u
export BUILD=$2 LD_LIBRARY_PATH=$3 FAKECUDA_GROUP="run$$"
source=$1 run=$1/tests/gpu/run results=$1/tests/gpu/results failed=0
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
wrong() {
        echo "FAILED: $*"
        tail -n 5 "$dir/out" "$dir/err"
        failed=1
}
# about FILE CONDITION: of the results in FILE, "it", with "said", a text of each result's check and answer
about() {
        python3 - "$1" "$2" <<'PYTHON'
import json, sys
it = json.load(open(sys.argv[1]))
said = [f"{r['part']} {r['check']}: {r['answer']}" for r in it['results']]
sys.exit(not eval('(' + sys.argv[2] + ')'))
PYTHON
}
before=$(ls "$results")

sh "$run" --only benchmarks --out "$dir/some.json" >"$dir/out" 2>"$dir/err" || wrong "benchmarks: status $?"
about "$dir/some.json" "it['stand_in'] is True and 'STAND-IN, NOT A GPU' in it['device'] and it['ended'] == 'by itself' and
        it['commit'] and it['date'] and it['parts']['benchmarks']['no'] == 0 and it['stuck'] == [] and
        any(r['check'] == 'bench' for r in it['results']) and all('STAND-IN' in r['driver'] for r in it['results'])" ||
        wrong 'the file'
grep -q '^benchmarks ' "$dir/out" || wrong 'no table'
sh "$run" --only none >"$dir/out" 2>"$dir/err"
grep -q 'not written: what answered is not a GPU' "$dir/err" || wrong 'a stand-in: where did it write?'
sh "$run" --only none --out "$results/stand-in.json" >"$dir/out" 2>"$dir/err" && wrong 'among the results of GPUs: status 0'
grep -q 'not kept among those of GPUs' "$dir/err" || wrong 'among the results of GPUs: no word'
[ "$(ls "$results")" = "$before" ] || wrong 'something was written among the results of GPUs'

sh "$run" --only benchmarks --seconds 37 --out "$dir/late.json" >"$dir/out" 2>"$dir/err"
grep -q '"check": "benchmarks".*"not run: out of time"' "$dir/out" || wrong 'out of time: not said'

# The same programs, except one that never ends and one that is killed.
mkdir -p "$dir/build"
cp -rs "$BUILD/tests" "$BUILD/daemon" "$BUILD/tools" "$BUILD/client" "$dir/build/" 2>/dev/null
rm -f "$dir/build/tests/gpu/gpu-share" "$dir/build/tests/gpu/gpu-bench"
printf '#!/bin/sh\necho %s\nexec sleep 1000\n' \
        '{\"check\": \"hangs\", \"question\": \"?\", \"answer\": \"before it hung\", \"ok\": true, \"numbers\": {}}' \
        >"$dir/build/tests/gpu/gpu-share"
printf '#!/bin/sh\nkill -9 $$\n' >"$dir/build/tests/gpu/gpu-bench"
chmod +x "$dir/build/tests/gpu/gpu-share" "$dir/build/tests/gpu/gpu-bench"
BUILD=$dir/build sh "$run" --only processes,benchmarks --each 12 --out "$dir/bad.json" >"$dir/out" 2>"$dir/err"
[ $? -eq 1 ] || wrong 'a part that hangs, and one that is killed: status'
about "$dir/bad.json" "'processes hangs: before it hung' in said and any('share: it ran for' in s for s in said) and
        'benchmarks bench: status -9' in said and it['ended'] == 'by itself' and
        list(it['parts']) == ['processes', 'benchmarks'] and all(p['no'] for p in it['parts'].values()) and
        {'memory-changes-hands', 'arena-is-read-only', 'daemon-killed', 'layers', 'capturing', 'two-clients', 'peer'} <=
        {r['check'] for r in it['results']}" ||
        wrong 'a part that hangs, and one that is killed: the file'

# If streams do not wait for each other, everything that needs this is not run. The rest is.
python3 - "$source/tests/gpu" <<'PYTHON' || wrong 'without order, or with a process that is stuck'
import argparse, io, subprocess, sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import run

o = argparse.Namespace(root='.', build='.', begin=run.time.time(), seconds=100, only=None, out=None, reaped=0.1,
                       each=1e9)
runner = run.Runner(o)
sys.stdout = io.StringIO()
runner.say({'check': 'T4', 'ok': False, 'answer': 'no', 'numbers': {}, 'question':
            "a slot in registered host memory, released by another process' stream: does a pending wait see it?"})
runner.run_part('processes', 20)
assert 'do not wait for each other' in runner.results[-1]['answer'], runner.results[-1]

class Stuck:
    pid, args = 2 ** 22 - 1, ['/somewhere/gpu-share']

    def wait(self, timeout=None):
        raise subprocess.TimeoutExpired('gpu-share', timeout)

runner.kill(Stuck())
assert runner.stuck == [Stuck.pid] and 'stuck in the driver' in runner.results[-1]['answer'], runner.results[-1]
runner.stop()
PYTHON

# Interrupted while the checks run: status 130, known results are written, and no process of its group is left.
FAKECUDA_SLOW=kernel:600000 python3 - "$run" "$dir/out" "$dir/stopped.json" <<'PYTHON' || wrong 'an interruption'
import os, signal, subprocess, sys, time

MARK = f"FAKECUDA_GROUP={os.environ['FAKECUDA_GROUP']}".encode()


def is_ours(pid, argument):
    try:
        with open(f'/proc/{pid}/environ', 'rb') as environ, open(f'/proc/{pid}/cmdline', 'rb') as command:
            return MARK in environ.read() and argument in command.read() and \
                   'gpu-checks' in os.readlink(f'/proc/{pid}/exe')
    except OSError:
        return False


def checks(argument=b''):
    return [pid for pid in filter(str.isdigit, os.listdir('/proc')) if is_ours(pid, argument)]


def wait(condition):
    for tries in range(600):
        if condition():
            return
        time.sleep(0.1)
    sys.exit(f'after a minute, there are: {checks()}')


with open(sys.argv[2], 'w') as out:
    it = subprocess.Popen(['sh', sys.argv[1], '--only', 'deaths', '--out', sys.argv[3]], stdout=out, stderr=out,
                          start_new_session=True)
    wait(lambda: checks(b'T6'))
    os.killpg(it.pid, signal.SIGINT)
    assert it.wait(timeout=120) == 130, it.returncode
wait(lambda: not checks())
PYTHON
about "$dir/stopped.json" "it['ended'] == 'interrupted' and it['results']" || wrong 'an interruption: the file'
exit $failed
