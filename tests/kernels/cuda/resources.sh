#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The resources that every kernel needs on every target, as reported by ptxas during the build.
#
#       resources.sh ROOT BUILD > kernels/cuda/RESOURCES.txt    the report
#       resources.sh --check ROOT BUILD                         fails if a kernel that spills registers has no
#                                                               line in kernels/cuda/SPILLS that says why
#
# A line of SPILLS: kernel, target (or *), reason. Exit status 77: this build has no images.
set -u

check=
[ "${1-}" = --check ] && check=1 && shift
root=${1:?} build=${2:?}
said=$(find "$build/kernels/cuda" -name '*.ptxas' | sort)
[ -n "$said" ] || exit 77

# image kernel target registers stack spill-stores spill-loads shared
lines() {
        for file in $said; do
                awk -v image="$(basename "$file" .ptxas)" '
                function number_before(word,   i) {
                        for (i = 2; i <= NF; i++)
                                if (index($i, word) == 1)
                                        return $(i - 1) + 0
                        return 0
                }
                /Compiling entry function/ { split($0, part, "\047"); kernel = part[2]; target = part[4] }
                /bytes stack frame/ { stack = $1; stores = $5; loads = $9 }
                /Used [0-9]+ registers/ {
                        shared = 0
                        if (match($0, /[0-9]+ bytes smem/))
                                shared = substr($0, RSTART, RLENGTH) + 0
                        print image, kernel, target, number_before("registers"), stack, stores, loads, shared
                }' "$file"
        done | sort -k1,1 -k2,2
}

report() {
        echo "# The ptxas report on every kernel (tests/kernels/cuda/resources.sh): registers per thread for each"
        echo "# target, and the maximum of stack, spill stores, spill loads and static shared memory, in bytes."
        echo "# Compiled by nvcc $("${NVCC:-nvcc}" --version | sed -n 's/.*release [0-9.]*, V//p'); not run on a GPU."
        lines | awk '
        function most(of, x) { if (x > of[key]) of[key] = x }
        BEGIN {
                n = split("sm_80 sm_86 sm_89 sm_90 sm_100 sm_120", targets, " ")
                printf "%-10s %-32s", "image", "kernel"
                for (i = 1; i <= n; i++)
                        printf " %6s", targets[i]
                printf " %6s %7s %6s %7s\n", "stack", "stores", "loads", "shared"
        }
        {
                key = sprintf("%-10s %-32s", $1, $2)
                if (!(key in seen))
                        order[++kernels] = key
                seen[key] = 1
                registers[key, $3] = $4
                most(stack, $5); most(stores, $6); most(loads, $7); most(shared, $8)
        }
        END {
                for (k = 1; k <= kernels; k++) {
                        key = order[k]
                        printf "%s", key
                        for (i = 1; i <= n; i++)
                                printf " %6d", registers[key, targets[i]]
                        printf " %6d %7d %6d %7d\n", stack[key], stores[key], loads[key], shared[key]
                }
        }'
}

explained() {
        awk -v kernel="$1" -v target="$2" '
        $1 == kernel && ($2 == target || $2 == "*") && NF > 2 { found = 1 }
        END { exit !found }' "$root/kernels/cuda/SPILLS"
}

if [ -z "$check" ]; then
        report
        exit 0
fi
bad=$(lines | while read -r _ kernel target _ _ stores loads _; do
        [ "$((stores + loads))" = 0 ] || explained "$kernel" "$target" ||
                echo "$kernel for $target: $stores bytes of spill stores, $loads of loads, and no line in SPILLS"
done)
[ -z "$bad" ] && exit 0
echo "$bad"
exit 1
