# SPDX-License-Identifier: Apache-2.0
# Accepts any incarnation of the block before a run as its parent.
s/shm_get64(&run->parent) != s->leaf/(uint32_t)(shm_get64(\&run->parent) ^ s->leaf)/
