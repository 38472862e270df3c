#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The checks on the stand-in driver: each of them ends, reports what it saw, and names the stand-in in each line. Where
# the stand-in's behaviour is defined (tests/gpu/fakecuda/driver.h), the answers match it. This says nothing about a
# GPU.
#
#       test-checks.sh CHECKS FOLDER_OF_FAKECUDA SOURCE
set -u
checks=$1 fake=$2 source=$3 failed=0
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
wrong() {
        echo "FAILED: $*"
        failed=1
}

# no driver: one line, and status 77 (meson names the folder of what a test depends on)
unset LD_LIBRARY_PATH
if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
        "$checks" >"$dir/none"
        [ $? -eq 77 ] || wrong 'no driver: status'
        [ "$(wc -l <"$dir/none")" -eq 1 ] || wrong 'no driver: more than a line'
fi

export LD_LIBRARY_PATH="$fake" FAKECUDA_GROUP="checks$$"
"$checks" >"$dir/out" || wrong "the checks: status $?"
python3 "$source/check_dlpack.py" 'STAND-IN, NOT A GPU' >>"$dir/out" || wrong "T9: status $?"
for check in device T1 T2 T3 T4 T5 T6 T7 T8 T9 T10; do
        grep -q "^{\"check\": \"$check\", " "$dir/out" || wrong "$check says nothing"
done
grep -qv '"driver": "STAND-IN, NOT A GPU' "$dir/out" && wrong 'a line does not name the stand-in'
python3 -c 'import json, sys; [json.loads(line) for line in sys.stdin]' <"$dir/out" || wrong 'a line is not JSON'
grep -E '"check": "(T1|T2|T4|T5|T6|T7|T8)"' "$dir/out" | grep '"ok": false' && wrong 'answers that the stand-in should give'

# On a driver where only a stream's write wakes a wait, T4 must report that, and a stream's write must end the wait. A wait
# that begins after the plain store ends at once: then retry.
is_said() {
        grep 'released by a plain store of another client' "$dir/out" |
                grep -q 'woken within [0-9]* ms; after a stream.s write (CUDA_SUCCESS): CUDA_SUCCESS'
}
: >"$dir/out"
for _ in 1 2 3 4 5; do
        is_said && break
        FAKECUDA_WAKE=write "$checks" --only T4 >"$dir/out" || wrong "WAKE=write: status $?"
done
is_said || wrong 'a wait that no store wakes'
# A full queue, as on a GPU: T6 kills the process while it waits for room, with unfinished work.
FAKECUDA_DEPTH=1000 "$checks" --only T6 >"$dir/out" || wrong "DEPTH=1000: status $?"
grep 'with many writes queued' "$dir/out" | grep -v 'a child' | grep '"ok": true' | grep -q '; [1-9][0-9]* more were queued' ||
        wrong 'DEPTH=1000: T6 says nothing of work that was queued'
grep -q 'a child that it forked lives on.*more were queued' "$dir/out" || wrong 'DEPTH=1000: a forked child'
tries=0
while pgrep -f "^$checks --only T6" >"$dir/left" && [ $((tries += 1)) -le 600 ]; do
        sleep 0.1
done
[ ! -s "$dir/left" ] || wrong "DEPTH=1000: still there: $(cat "$dir/left")"
# Without descriptors for GPU memory, questions that need them are not asked. All others are.
FAKECUDA_VMM=0 "$checks" --only T1,T7,T8 >"$dir/out" || wrong "VMM=0: status $?"
grep -q '"check": "T1".*not asked' "$dir/out" || wrong 'VMM=0: T1 is asked'
grep -q '"check": "T8".*launched, right' "$dir/out" || wrong 'VMM=0: T8 is not asked'
# A check that takes too long is ended and reported, and the next one runs.
FAKECUDA_SLOW=copy:600000 "$checks" --only T1,T7 --seconds T1=1 >"$dir/out" && wrong 'slow: status 0'
grep -q '"check": "T1".*it ran for 1 s' "$dir/out" || wrong 'slow: T1 is not ended'
grep -q '"check": "T7".*"ok": true' "$dir/out" || wrong 'slow: T7 is not asked'
exit $failed
