# SPDX-License-Identifier: Apache-2.0
# The first file's superblock counts, even if another one is newer.
s/is_newer(&set->files\[i\].newest, newest)/(0 \&\& is_newer(\&set->files[i].newest, newest))/
