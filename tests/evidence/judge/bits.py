# SPDX-License-Identifier: Apache-2.0
"""Keys and values in fewer bits."""

from __future__ import annotations

import numpy as np


def quantised(states: np.ndarray, bits: int) -> np.ndarray:
    """The numbers again, after the last axis had `bits` bits for each, and a scale and a least number of 16 bits."""
    least = states.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((states.max(-1, keepdims=True) - least) / (2 ** bits - 1)).astype(np.float16).astype(np.float32)
    scale = np.maximum(scale, np.finfo(np.float16).tiny)
    again: np.ndarray = np.clip(np.round((states - least) / scale), 0, 2 ** bits - 1) * scale + least
    return again
