# SPDX-License-Identifier: Apache-2.0
# Accepts any incarnation of the previous block as the parent.
s/shm_get64(&desc->parent) == s->leaf/!(uint32_t)(shm_get64(\&desc->parent) ^ s->leaf)/
