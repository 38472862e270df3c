"""Muon for the matrices, AdamW for the rest.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so rare associations move as
fast as frequent ones. By itself it did not leave the plateau that `planting.py` is about.
Matrices of one shape are orthogonalised as one batch: on two cores the call overhead would
otherwise cost more than the arithmetic.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
DECAY = 0.02
# Coefficients of the quintic Newton-Schulz iteration, chosen by Keller Jordan for speed over exactness.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalised(stack: Tensor, steps: int = 5) -> Tensor:
    """Each matrix of the stack with its singular values pushed to about 1."""
    x = stack / (stack.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """One `step(rate)` for all parameters; the rate applies to both parts alike."""

    def __init__(self, model: nn.Module) -> None:
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        others = []
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                self.groups[tuple(parameter.shape)].append(parameter)
            else:
                others.append(parameter)
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group])
            momentum = self.momenta[shape].lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalised(gradient.lerp(momentum, MOMENTUM)) * (0.2 * max(shape) ** 0.5)
            for parameter, change in zip(group, update):
                parameter.mul_(1 - rate * DECAY).sub_(change, alpha=rate)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()

    def state(self) -> dict:
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def restore(self, state: dict) -> None:
        self.momenta = state["momenta"]
        self.adam.load_state_dict(state["adam"])
