#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# resources.sh reads the ptxas report, and complains about a spill if and only if SPILLS has no line for it.
set -u

script=$(dirname "$0")/resources.sh
at=$(mktemp -d) || exit 2
trap 'rm -rf "$at"' EXIT
mkdir -p "$at/kernels/cuda"
touch "$at/kernels/cuda/SPILLS"
bad=0

check() { # the exit status that is expected
        sh "$script" --check "$at" "$at" >"$at/said"
        status=$?
        [ "$status" = "$1" ] && return
        echo "exit status $status, expected $1: $2" && cat "$at/said"
        bad=1
}

check 77 'no images'
cat >"$at/kernels/cuda/one.ptxas" <<'END'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kvd_good' for 'sm_90'
ptxas info    : Function properties for kvd_good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 8456 bytes smem, 392 bytes cmem[0]
END
check 0 'no spill'
cat >>"$at/kernels/cuda/one.ptxas" <<'END'
ptxas info    : Compiling entry function 'kvd_bad' for 'sm_90'
ptxas info    : Function properties for kvd_bad
    16 bytes stack frame, 0 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 16 bytes cumulative stack size
END
check 1 'a spill'
grep -q '^kvd_bad for sm_90: 0 bytes of spill stores, 48 of loads' "$at/said" || bad=1
echo 'kvd_bad sm_80 for another target' >"$at/kernels/cuda/SPILLS"
check 1 'explained for another target'
echo 'kvd_bad sm_90' >"$at/kernels/cuda/SPILLS"
check 1 'a line without a reason'
echo 'kvd_bad sm_90 because it is so' >"$at/kernels/cuda/SPILLS"
check 0 'explained'
echo 'kvd_bad * because it is so' >"$at/kernels/cuda/SPILLS"
check 0 'explained for all targets'
sh "$script" "$at" "$at" >"$at/report"
grep -Eq '^one +kvd_good +0 +0 +0 +32 +0 +0 +0 +0 +0 +8456$' "$at/report" || { cat "$at/report"; bad=1; }
grep -Eq '^one +kvd_bad +0 +0 +0 +64 +0 +0 +16 +0 +48 +0$' "$at/report" || { cat "$at/report"; bad=1; }
exit $bad
