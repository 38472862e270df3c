# SPDX-License-Identifier: Apache-2.0
# Any incarnation of the block before will do as parent.
s/shm_get64(&desc->parent) == s->leaf/!(uint32_t)(shm_get64(\&desc->parent) ^ s->leaf)/
