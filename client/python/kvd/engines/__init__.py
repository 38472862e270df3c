# SPDX-License-Identifier: Apache-2.0
"""Inference engines on the pool, a module each. Importing one imports its engine."""
