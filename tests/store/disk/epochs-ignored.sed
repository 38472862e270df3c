# SPDX-License-Identifier: Apache-2.0
# Records of a namespace that was forgotten still count.
s/epoch_lives(v->super, record->label.epoch) &&/(epoch_lives(v->super, record->label.epoch) || true) \&\&/
