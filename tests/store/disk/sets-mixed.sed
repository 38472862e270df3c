# SPDX-License-Identifier: Apache-2.0
# Files count together even if they were opened without each other.
s/s->set != newest->set ? SET_LEFT :/false ? SET_LEFT :/
