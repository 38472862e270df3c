# SPDX-License-Identifier: Apache-2.0
# What erases is answered when the disk has it in its cache.
s/r = volume_flush(v);/r = 0;/
