# SPDX-License-Identifier: Apache-2.0
# Files count together that were opened without each other meanwhile.
s/seen->newest->set != newest->set ? VOLUME_LEFT : VOLUME_FOUND;/VOLUME_FOUND;/
