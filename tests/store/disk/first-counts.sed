# SPDX-License-Identifier: Apache-2.0
# The first file's superblock counts, be there a newer one or not.
s/is_newer(&set->files\[i\].newest, newest)/(0 \&\& is_newer(\&set->files[i].newest, newest))/
