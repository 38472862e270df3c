# SPDX-License-Identifier: Apache-2.0
"""Baselines in numpy: the causal model of this repository, and what others publish for its cache. Nothing of kvd."""
