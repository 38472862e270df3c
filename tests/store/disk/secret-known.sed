# SPDX-License-Identifier: Apache-2.0
# A file that starts empty has the secret that it had before.
s/r = draw(head, s->secret, sizeof s->secret);/r = 0;/
