# SPDX-License-Identifier: Apache-2.0
# An erasure succeeds when it is in the disk's cache.
s/r = volume_flush(v);/r = 0;/
