# SPDX-License-Identifier: Apache-2.0
# A file that begins anew has the checksums that it had before.
s/if (f->state == SET_FOUND) {/if (f->state == SET_FOUND || f->whole) {/
