#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Writes the assembly that embeds an image into the programs that use it (images.h).
#
#       embed.sh OUT NAME [FATBIN]      without FATBIN if there is no nvcc
set -eu

out=$1 name=$2
exec >"$out"
echo "        .section .rodata.kvd_image_$name, \"a\", %progbits"
echo "        .globl gpu_image_$name"
echo "        .hidden gpu_image_$name"
echo "        .type gpu_image_$name, %object"
echo '        .balign 64'
echo "gpu_image_$name:"
if [ -n "${3-}" ]; then
        echo "        .incbin \"$3\""
else
        echo "        .asciz \"kvd: no image of $name: nvcc was not found\""
fi
echo '        .zero 64'
echo '        .section .note.GNU-stack, "", %progbits'
