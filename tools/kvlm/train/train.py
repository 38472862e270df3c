"""Trains the model: `python train.py --minutes 80 --export ../model`.

`--resume` continues from the checkpoint; with `--minutes 0` it only exports what is there.

The length of the samples grows by stages: a stage is left when answers of its length are right
often enough. Earlier lengths stay in the mixture, because a reader of long documents forgets short
ones. The learning rate follows the clock, not the update count, since the training time is fixed.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import hf_tokenizer
from corpus import ANSWER, TOKENS, Mixture, Writer
from model import Llama, Shape
from optimiser import Optimiser
from planting import plant

ADVANCE = 0.97          # answer-token accuracy at which the next length begins
PEAK_RATE = 3e-3
WARM_UP = 50
CLIP = 1.0
AVERAGE = 0.995         # of the weights, per update
LOG_EVERY = 50
SAVE_EVERY = 120        # seconds

# Until recall is learned the signal is kept dense; then prose and reasoning are added. Names with two facts are added
# only once all lengths are reached, because they are learned slowly and would delay the lengths.
SEEK = Mixture(repeat=0.4, steps=0.0, terse=0.5, density=(0.5, 0.9))
GROW = Mixture(repeat=0.1, steps=0.15, terse=0.2, density=(0.1, 0.7))
FULL = Mixture(repeat=0.1, steps=0.15, terse=0.2, density=(0.1, 0.7), paired=0.25)


@dataclass
class Progress:
    """The state of a checkpoint in addition to tensors."""

    update: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stage: int = 0
    accuracy: list[float] = field(default_factory=list)     # of answer tokens, per length

    def note(self, which: int, accuracy: float) -> None:
        """Folds one batch's accuracy into the running one, and advances the stage."""
        if math.isnan(accuracy):
            return
        self.accuracy[which] += 0.05 * (accuracy - self.accuracy[which])
        if which == self.stage and self.accuracy[which] >= ADVANCE and self.stage + 1 < len(self.accuracy):
            self.stage += 1


def batch(writer: Writer, length: int, count: int, mixture: Mixture) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and loss weights."""
    samples = [writer.sample(length + 1, mixture) for _ in range(count)]
    ids = torch.tensor([s.ids for s in samples])
    weights = torch.tensor([s.weights for s in samples])
    return ids[:, :-1], ids[:, 1:], weights[:, 1:]


def loss_of(model: Llama, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy, and the share of answer tokens that are right: nan if nothing was asked."""
    logits = model(inputs).float()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    asked = (weights == ANSWER).float()
    right = (logits.argmax(-1) == targets).float()
    return (each * weights.flatten()).sum() / weights.sum(), (right * asked).sum() / asked.sum()


def rate_at(update: int, share: float) -> float:
    """Warm-up by updates, then constant, then linear decay over the last third of the time."""
    return PEAK_RATE * min(1.0, (update + 1) / WARM_UP) * min(1.0, max(0.02, (1 - share) / 0.35))


class Trainer:
    """The training loop; subclasses may change the samples and the initialisation."""

    LENGTHS = (64, 128, 256, 512, 1024, 2112)
    CURRENT = 0.6           # share of updates with samples of the stage's own length

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        torch.manual_seed(options.seed)
        self.model = self.start()
        self.optimiser = Optimiser(self.model)
        # The running average of the weights is exported, as if the rate had already decayed.
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.progress = Progress(accuracy=[0.0] * len(self.LENGTHS))
        if options.resume:
            self.restore()
        # The stream after a resume differs from the one before it: no sample is drawn twice.
        self.random = random.Random(f"{options.seed}/{self.progress.update}")
        self.writer = self.open_writer(f"{options.seed}/corpus/{self.progress.update}")
        self.loss = torch.compile(self.loss_of, dynamic=True)

    # The parts that depend on the kind of model.

    loss_of = staticmethod(loss_of)

    def start(self) -> Llama:
        """The model before training."""
        model = Llama(Shape(vocab=len(TOKENS)))
        model.initialise()
        plant(model)
        return model

    def open_writer(self, seed: str) -> Writer:
        return Writer(seed)

    def batch(self, length: int, count: int) -> tuple[Tensor, ...]:
        """The arguments of `loss_of` after the model, for samples of this stage."""
        stage = self.progress.stage
        mixture = SEEK if stage == 0 else GROW if stage + 1 < len(self.LENGTHS) else FULL
        return batch(self.writer, length, count, mixture)

    # The loop.

    def restore(self) -> None:
        state = torch.load(self.options.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.restore(state["optimiser"])
        self.average = state["average"]
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Writes the checkpoint under another name first, so that a kill does not lose the last one."""
        path = self.options.checkpoint
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state(),
                 "average": self.average, "progress": asdict(self.progress)}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def pick_length(self) -> int:
        """Mostly the current stage, sometimes an earlier one."""
        stage = self.progress.stage
        return stage if stage == 0 or self.random.random() < self.CURRENT else self.random.randrange(stage)

    def update(self) -> tuple[float, float]:
        """One optimiser step; returns its loss and rate."""
        which = self.pick_length()
        length = self.LENGTHS[which]
        data = self.batch(length, max(1, self.options.batch // length))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, accuracy = self.loss(self.model, *data)
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        rate = rate_at(self.progress.update, self.progress.seconds / (60 * self.options.minutes))
        self.optimiser.step(rate)
        keep = min(AVERAGE, (self.progress.update + 1) / (self.progress.update + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 1 - keep)
        self.progress.update += 1
        self.progress.tokens += data[0].numel()
        self.progress.note(which, accuracy.item())
        return loss.item(), rate

    def run(self) -> None:
        saved = last = time.monotonic()
        while self.progress.seconds < 60 * self.options.minutes:
            loss, rate = self.update()
            now = time.monotonic()
            self.progress.seconds += now - last
            last = now
            if self.progress.update % LOG_EVERY == 0:
                self.log(loss, rate)
            if now - saved > SAVE_EVERY:
                self.save()
                saved = now
        self.save()

    def export(self, folder: Path) -> None:
        """Writes the averaged weights and the vocabulary, and for a causal model the files that engines read."""
        with torch.no_grad():
            for parameter, average in zip(self.model.parameters(), self.average):
                parameter.copy_(average)
        self.model.save(folder)
        TOKENS.save(folder / "vocab.txt")
        if self.model.shape.mask is None:
            hf_tokenizer.export(folder)

    def log(self, loss: float, rate: float) -> None:
        p = self.progress
        accuracies = " ".join(f"{length}:{a:.3f}" for length, a in zip(self.LENGTHS, p.accuracy[:p.stage + 1]))
        print(f"{p.seconds / 60:6.1f} min  update {p.update}  tokens {p.tokens / 1e6:.2f}M  loss {loss:.3f}  "
              f"rate {rate:.1e}  answers {accuracies}", flush=True)


def main(kind: type[Trainer] = Trainer, what: str = __doc__) -> None:
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=90, help="training time in all, over every resume")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4224, help="tokens per update")
    parser.add_argument("--checkpoint", type=Path, default=Path("kvlm-training/checkpoint.pt"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--export", type=Path, help="write the averaged model here at the end")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer = kind(options)
    trainer.run()
    if options.export:
        trainer.export(options.export)


if __name__ == "__main__":
    main()
