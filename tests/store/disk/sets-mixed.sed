# SPDX-License-Identifier: Apache-2.0
# Files count together that were opened without each other meanwhile.
s/s->set != newest->set ? SET_LEFT : SET_FOUND;/SET_FOUND;/
