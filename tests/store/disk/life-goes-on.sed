# SPDX-License-Identifier: Apache-2.0
# A file that starts empty keeps the key of its checksums.
s/if (f->state == SET_FOUND) {/if (f->state == SET_FOUND || f->whole) {/
