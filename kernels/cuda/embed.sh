#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Writes the assembly that puts images into a program (images.h).
#
#       embed.sh OUT NAME=FATBIN...     or NAME= for each, without nvcc
set -eu

out=$1
shift
exec >"$out"

object() {
        echo "        .globl $1"
        echo "        .hidden $1"
        echo "        .type $1, %object"
        echo "        .balign 64"
        echo "$1:"
}

built=0
echo '        .section .rodata.kvd_images, "a", %progbits'
for image; do
        object "gpu_image_${image%%=*}"
        if [ -n "${image#*=}" ]; then
                echo "        .incbin \"${image#*=}\""
                built=1
        else
                echo "        .asciz \"kvd: no image of ${image%%=*}: nvcc was not found\""
        fi
        echo "        .zero 64"
done
object gpu_images_built
echo "        .long $built"
echo '        .section .note.GNU-stack, "", %progbits'
