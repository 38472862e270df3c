# SPDX-License-Identifier: Apache-2.0
"""Baselines in numpy, without kvd: the causal model of this repository, and published methods for its cache."""
