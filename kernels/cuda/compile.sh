#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Compiles one image: kernels for every target, and the ptxas report on the resources they need
# (tests/kernels/cuda/resources.sh reads it).
#
#       compile.sh ROOT IN.cu OUT.fatbin OUT.ptxas DEPFILE NVCC...
#
# For a build that runs on one machine only, set the environment variable KVD_CUDA_TARGETS, for example to "90". Other
# GPUs then use the PTX.
#
# No contraction: fused operations are written as fmaf, so that results equal those of the scalar reference.
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
