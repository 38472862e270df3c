/* SPDX-License-Identifier: Apache-2.0 */
/* checks.cu as nvcc made it, uncompressed as far as its default goes, and with --compress-mode=size. */
        .section .rodata
        .balign 64
        .globl kvd_checks_image
        .hidden kvd_checks_image
kvd_checks_image:
        .incbin CHECKS_IMAGE
        .balign 64
        .globl kvd_checks_image_small
        .hidden kvd_checks_image_small
kvd_checks_image_small:
        .incbin CHECKS_IMAGE_SMALL
        .section .note.GNU-stack, "", @progbits
