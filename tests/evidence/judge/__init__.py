# SPDX-License-Identifier: Apache-2.0
"""A pretrained model as the judge of what methods keep: tools/evidence --model. run.py begins it."""
