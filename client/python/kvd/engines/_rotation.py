# SPDX-License-Identifier: Apache-2.0
"""How a model rotates its keys (RoPE), as its configuration says. A block of keys can be turned to other positions, if
elements i and i + head_dim / 2 of every key turn by the position times an angle, without scaling."""

from __future__ import annotations

from typing import Any

import torch


def rope_of(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def theta_of(config: Any) -> float:
    """Return the base of the angles; 0: the configuration has none."""
    return float(rope_of(config).get("rope_theta") or getattr(config, "rope_theta", None) or 0)


def frequencies_of(config: Any, dim: int) -> torch.Tensor | None:
    """Return radians per position [dim / 2] of a model whose configuration says nothing else; None if it does. Whether the
    model's code does so is for the caller to find out."""
    theta = theta_of(config)
    plain = rope_of(config).get("rope_type", "default") == "default" and all(getattr(config, "no_rope_layers", None) or [1])
    if not plain or not theta or dim % 2:
        return None
    return (1.0 / torch.tensor(theta) ** (torch.arange(0, dim, 2) / dim)).to(torch.float32)
