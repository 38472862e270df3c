#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# One image: kernels for every target, and what ptxas says that they need (tests/kernels/cuda/resources.sh reads it).
#
#       compile.sh ROOT IN.cu OUT.fatbin OUT.ptxas DEPFILE NVCC...
#
# KVD_CUDA_TARGETS="90", as an environment variable, is for builds that one machine runs. Others go by the PTX.
#
# No contraction: what is fused is written as fmaf, so that results are those of the scalar reference.
set -eu

root=$1 in=$2 fatbin=$3 said=$4 depfile=$5
shift 5
targets=
for target in ${KVD_CUDA_TARGETS:-80 86 89 90 100 120}; do
        targets="$targets -gencode arch=compute_$target,code=sm_$target"
done
# shellcheck disable=SC2086 # words
"$@" -fatbin -O3 -std=c++17 -fmad=false -Xptxas -v $targets -gencode arch=compute_80,code=compute_80 \
        -I "$root" -MD -MF "$depfile" -MT "$fatbin" -o "$fatbin" "$in" >"$said" 2>&1 || {
        cat "$said" >&2
        exit 1
}
grep -v 'ptxas info' "$said" | grep 'warning' >&2 || :
