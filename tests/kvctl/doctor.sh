#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kvctl doctor: on a machine without a driver, and (if FAKECUDA names its folder) with the stand-in driver, both intact
# and failing. No daemon is needed.
. "$(dirname "$0")/lib.sh"

# row TRIED STATE: expects one row
row() {
        grep -qE "^[A-Za-z]+ +$1 +$2( |\$)" "$dir/out" || wrong "$what: \"$1\" is not \"$2\""
}

# follows LINE WORDS: expects a line of the verdict
follows() {
        grep -qE "^$1 +$2" "$dir/out" || wrong "$what: \"$1\" is not \"$2\""
}

# no driver (meson puts the folders of a test's dependencies into LD_LIBRARY_PATH)
unset LD_LIBRARY_PATH
if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
        kvctl 0 doctor
        row driver missing
        row 'chunks by descriptors' 'not tried'
        follows backend 'host memory'
        follows "methods' kernels" 'on processors'
fi
kvctl 0 doctor
row 'shared memory' ok
row pidfds ok
kvctl 0 doctor --json
json_is_valid
says '"findings"' '"kvd"' '"can_run": true' '"tried": "io_uring"'
kvctl 2 doctor none
complains 'not the number of a device'
COLUMNS=80 kvctl 0 doctor

[ -n "${FAKECUDA:-}" ] || finish
export LD_LIBRARY_PATH="$FAKECUDA"

kvctl 0 doctor
row driver ok
row device ok
says 'Stand-in'
for thing in 'chunks by descriptors' 'read-only mapping' 'legacy handles' 'stream order, GPU memory' \
        'stream order, host memory' 'streams see plain stores'; do
        row "$thing" ok
done
follows backend CUDA
follows 'GPU memory' 'chunks, shared by descriptors'
follows 'seals and reads' 'by streams: no processor waits'

# a device that is not there
kvctl 0 doctor 7
row driver ok
row device missing
row 'chunks by descriptors' 'not tried'
follows backend 'host memory'

# no device at all
FAKECUDA_DEVICES=0 kvctl 0 doctor
follows backend 'host memory'

# a driver or a container with only one kind of handles
FAKECUDA_VMM=0 kvctl 0 doctor
row 'chunks by descriptors' missing
row 'read-only mapping' 'not tried'
row 'legacy handles' ok
follows backend CUDA
follows 'GPU memory' 'legacy handles'
follows 'isolation = arena' 'not on this GPU'
FAKECUDA_LEGACY=0 kvctl 0 doctor
row 'chunks by descriptors' ok
row 'legacy handles' missing
follows 'GPU memory' 'chunks'
FAKECUDA_VMM=0 FAKECUDA_LEGACY=0 kvctl 0 doctor
follows backend 'host memory'

# streams that cannot wait, and streams that only other streams wake
FAKECUDA_STREAM_ORDER=0 kvctl 0 doctor
row 'stream order, host memory' missing
follows 'seals and reads' 'calls wait'
# (a wait that begins after the store ends at once, so retry)
for _ in 1 2 3 4 5; do
        FAKECUDA_WAKE=write kvctl 0 doctor
        ! grep -qE '^[A-Za-z]+ +streams see plain stores +missing' "$dir/out" || break
done
row 'stream order, host memory' ok
row 'streams see plain stores' missing

# calls that fail: the failing call is named, and nothing else is affected
FAKECUDA_FAIL=cuMemImportFromShareableHandle:1=999 kvctl 0 doctor
row 'chunks by descriptors' missing
row 'legacy handles' ok
says 'cuMemImportFromShareableHandle'
FAKECUDA_FAIL=cuMemCreate:1=2 kvctl 0 doctor
says 'cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY'
FAKECUDA_FAIL=cuMemHostRegister:1=801 kvctl 0 doctor
row 'stream order, host memory' missing
row 'stream order, GPU memory' ok
FAKECUDA_FAIL=cuDevicePrimaryCtxRetain:1=999 kvctl 0 doctor
row driver ok
row device ok
follows backend 'host memory'
FAKECUDA_FAIL=cuInit:1=999 kvctl 0 doctor
row driver missing
finish
