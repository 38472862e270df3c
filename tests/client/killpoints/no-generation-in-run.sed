# SPDX-License-Identifier: Apache-2.0
# Any incarnation of the block before a run will do as its parent.
s/shm_get64(&run->parent) != s->leaf/(uint32_t)(shm_get64(\&run->parent) ^ s->leaf)/
