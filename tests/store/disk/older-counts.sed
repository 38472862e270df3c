# SPDX-License-Identifier: Apache-2.0
# The older copy of the superblock counts.
s/s->serial > head->found.serial/s->serial < head->found.serial/
