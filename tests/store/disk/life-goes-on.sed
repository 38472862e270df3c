# SPDX-License-Identifier: Apache-2.0
# A file that begins anew has the checksums that it had before.
s/if (f->state == VOLUME_FOUND) {/if (f->state == VOLUME_FOUND || seen->whole) {/
