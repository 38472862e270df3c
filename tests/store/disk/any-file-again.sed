# SPDX-License-Identifier: Apache-2.0
# A new process opens any file with an intact superblock.
s/return head->whole && head->found.life == head->super.life &&/return head->whole ||/
