# SPDX-License-Identifier: Apache-2.0
# What erases is answered when the disk has it in its cache.
s/r = flush(v, places, n);/r = 0, (void)flush;/
