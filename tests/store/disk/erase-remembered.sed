# SPDX-License-Identifier: Apache-2.0
# An erasure is noted, but not written.
s/r = each_sector(v, places, n, true);/r = 0;/
s/r = each_sector(v, places, n, false);/r = 0, (void)each_sector;/
