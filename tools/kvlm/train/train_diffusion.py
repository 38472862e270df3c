"""Trains the diffusion model: `python train_diffusion.py --minutes 50 --seed 1 --export ../diffusion`.

The loop, the optimiser and the options are those of `train.py`; the samples are those of `infill.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from corpus import TOKENS
from infill import MASK, Infiller, Mixture
from model import Llama, Shape
from planting import plant_infill
from train import Trainer, main

SHAPE = Shape(vocab=len(TOKENS), layers=12, ffn=256, mask=MASK)
SEEK = Mixture(repeat=0.2, anywhere=0.0, alone=0.0, single=0.7, chains=0.5, density=(0.5, 0.9))
GROW = Mixture(repeat=0.1, anywhere=0.03, alone=0.15, single=0.45, chains=0.6, density=(0.3, 0.8))
FULL = Mixture(repeat=0.05, anywhere=0.03, alone=0.3, single=0.1, chains=0.8, density=(0.15, 0.7))


def loss_of(model: Llama, inputs: Tensor, targets: Tensor, weights: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of the masked tokens, and the share of single values that are right."""
    logits = model(inputs).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    right = (logits.argmax(-1) == targets) & asked
    return (each * weights.flatten()).sum() / weights.sum(), right.sum() / asked.sum()


class DiffusionTrainer(Trainer):
    LENGTHS = (64, 128, 256, 608)
    CURRENT = 0.4           # bidirectional attention over long samples takes most of the time

    loss_of = staticmethod(loss_of)

    def start(self) -> Llama:
        model = Llama(SHAPE)
        model.initialise()
        plant_infill(model)
        return model

    def open_writer(self, seed: str) -> Infiller:
        return Infiller(seed)

    def batch(self, length: int, count: int) -> tuple[Tensor, ...]:
        stage = self.progress.stage
        mixture = SEEK if stage == 0 else GROW if stage + 1 < len(self.LENGTHS) else FULL
        samples = [self.writer.masked(length, mixture) for _ in range(count)]
        asked = torch.tensor([s.asked for s in samples]) & (torch.tensor([s.weights for s in samples]) > 0)
        return (torch.tensor([s.inputs for s in samples]), torch.tensor([s.targets for s in samples]),
                torch.tensor([s.weights for s in samples]), asked)


if __name__ == "__main__":
    main(DiffusionTrainer, __doc__)
