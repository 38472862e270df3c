# SPDX-License-Identifier: Apache-2.0
"""generate() and profile() of kvd.engines.diffusion, whose documentation is there."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import kvd

from ..ops import bicache_percent
from ._diffusion_blocks import Place, plain_bytes
from ._diffusion_entry import Entry
from ._diffusion_model import Decoder
from ._transformers_model import check_space

MODES = ("off", "naive", "on")
REFRESH = 16            # steps from one refresh to the next, without a space
_CHUNK = 64             # positions whose logits are in memory at a time, in double precision


class Answer(NamedTuple):
    """Result of generate()."""

    tokens: list[int]
    """The region's tokens [gen_length]."""
    mode: str
    """What was done: "off", "naive" or "on"."""
    depth: int
    """b: layers of the prefix that were used as they are stored."""
    ratio: int
    """r: the prefix's share of the request in percent."""
    found: int
    """Layers of the entry that were in the pool; at most depth."""
    made: int
    """Layers of the entry that this call computed."""
    refreshes: int
    """Steps at which the deep layers were recomputed."""
    computed: int
    """Tokens times layers that this call computed, including the entry."""
    whole: int
    """Tokens times layers that would have been computed without reuse."""
    shared_bytes: int
    """Bytes of the used part of the entry that are in the pool."""
    refused: bool
    """Whether the pool or the daemon failed, so that a part of the entry is private."""


class Request(NamedTuple):
    """A checked request: all its tokens but the masks, how many of them are the prefix, and the region's length."""

    tokens: list[int]
    prefix: int
    length: int
    mask: int

    @property
    def all(self) -> list[int]:
        return self.tokens + [self.mask] * self.length


def _ids(name: str, given: Any, vocab: int) -> list[int]:
    ids = given.tolist() if hasattr(given, "tolist") else list(given)
    if ids and isinstance(ids[0], list):
        if len(ids) != 1:
            raise ValueError(f"{name} has {len(ids)} rows: generate() takes one request")
        ids = ids[0]
    for it in ids:
        if not isinstance(it, int) or not 0 <= it < vocab:
            raise ValueError(f"{name} has {it!r}, which is not a token id below {vocab}")
    return ids


def _request(decoder: Decoder, prefix_ids: Any, prompt_ids: Any, length: int, mask: int | None) -> Request:
    config = decoder.model.config.get_text_config()
    prefix, prompt = _ids("prefix_ids", prefix_ids, config.vocab_size), _ids("prompt_ids", prompt_ids, config.vocab_size)
    if mask is None:
        mask = getattr(config, "mask_token_id", None)
    if mask is None:
        raise ValueError("mask_token_id is missing: the model's configuration does not name a mask token")
    _ids("mask_token_id", [mask], config.vocab_size)
    most = getattr(config, "max_position_embeddings", None)
    if not prefix + prompt:
        raise ValueError("the prompt has no tokens")
    if length < 1:
        raise ValueError(f"gen_length must be 1 or more, not {length}")
    if most and len(prefix + prompt) + length > most:
        raise ValueError(f"prompt and answer have {len(prefix + prompt) + length} tokens, but the model takes only {most}")
    return Request(prefix + prompt, len(prefix), length, mask)


def _decoder(model: PreTrainedModel, space: kvd.Space | None) -> Decoder:
    decoder = Decoder(model)
    if space is not None:
        check_space(space, model, ("bicache",), decoder.geometry)
    return decoder


# ---- settings of a space ---------------------------------------------------------------------------------------------


def _says(space: kvd.Space | None, setting: str) -> bool:
    return space is not None and space.setting(setting) != 0


def _ratio(space: kvd.Space | None, request: Request, prefix: int) -> int:
    prompt_only = _says(space, "bicache.r_def")
    return bicache_percent(prefix, len(request.tokens) + (0 if prompt_only else request.length))


class _Choice(NamedTuple):
    mode: str
    depth: int          # b
    entry: int          # layers that an entry gets if it is made here


def _choose(space: kvd.Space | None, request: Request, layers: int, mode: str | None, depth: int) -> _Choice:
    mode = mode or ("on" if _says(space, "bicache") else "off")
    if request.prefix == 0 or mode == "off":
        return _Choice("off", 0, 0)
    if mode == "naive":
        return _Choice(mode, layers, layers)
    deepest = depth
    if not depth and space:
        depth = space.prefix_depth(request.prefix, len(request.tokens) - request.prefix, request.length)
        deepest = space.prefix_depth(1, 0, 0)       # of a prefix alone: the most that any ratio needs
    depth = min(max(depth, 1), layers)
    return _Choice(mode, depth, max(depth, min(deepest or layers, layers)))


# ---- denoising -------------------------------------------------------------------------------------------------------


class Denoiser:
    """One request: tokens, blocks, and steps.

    A step computes all rows or, with BiCache, those behind the prefix. The prefix's first b layers are the entry's; its others
    are the request's own, recomputed at refreshes from the entry's rows after layer b."""

    def __init__(self, decoder: Decoder, space: kvd.Space | None, request: Request, choice: _Choice, refresh: int, shift: int):
        self.decoder, self.space, self.request, self.choice = decoder, space, request, choice
        self.refresh, self.shift = refresh, shift
        self.tokens, self.refreshes = request.all, 0
        self.entry: Entry | None = None
        if choice.depth:
            self.entry = Entry(decoder, space, request.tokens[:request.prefix])
            self.entry.open(choice.depth, choice.entry)
        self.place = Place(decoder.geometry, request.prefix, len(self.tokens))
        for layer in range(decoder.layers):
            self.place.add_private(layer, self.entry.planes(layer) if self.entry and layer < choice.depth else None)

    def is_refreshed(self, t: int) -> bool:
        """t counts from 1, as in the paper."""
        if self.refresh == 0 and self.space is not None:
            return self.space.prefix_refresh(t)
        return (t - 1) % (self.refresh or REFRESH) == 0

    def rows(self, t: int) -> tuple[torch.Tensor, int]:
        """Return rows after the last layer at step t, and the position of the first."""
        decoder, b, layers = self.decoder, self.choice.depth, self.decoder.layers
        first = self.request.prefix if b else 0
        x = decoder.embed(self.tokens[first:])
        if b in (0, layers) or not self.is_refreshed(t):
            return decoder.run(x, self.place, first, 0, layers), first
        assert self.entry
        self.refreshes += 1
        x = torch.cat([self.entry.states(b - 1), decoder.run(x, self.place, first, 0, b)])
        return decoder.run(x, self.place, 0, b, layers), 0

    def step(self, t: int, n: int) -> None:
        """Replace n masks, those of the most certain guesses, by tokens."""
        rows, first = self.rows(t)
        masks = [i for i in range(len(self.request.tokens), len(self.tokens)) if self.tokens[i] == self.request.mask]
        guesses: list[tuple[float, int, int]] = []
        for i in range(0, len(masks), _CHUNK):
            part = masks[i:i + _CHUNK]
            tokens, odds = guess(self.decoder.logits(rows[[it - first - self.shift for it in part]]), self.request.mask)
            guesses += zip((-odds).tolist(), part, tokens.tolist())
        for _, position, token in sorted(guesses)[:n]:
            self.tokens[position] = token

    def close(self) -> None:
        if self.entry:
            self.entry.close()


def guess(logits: torch.Tensor, mask: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for rows of logits [n, vocab], the most likely token other than the mask, the lowest among equals, and its log
    odds in double precision, since probabilities of certain guesses round to 1."""
    logits = logits.to(torch.float64, copy=True)
    logits[:, mask] = -torch.inf
    best = logits.amax(1)
    ids = torch.arange(logits.shape[1]).expand_as(logits)
    tokens = ids.where(logits == best[:, None], logits.shape[1]).amin(1)
    return tokens, best - logits.scatter(1, tokens[:, None], -torch.inf).logsumexp(1)


def generate(model: PreTrainedModel, space: kvd.Space | None, prefix_ids: Any, prompt_ids: Any, *, gen_length: int,
             steps: int | None = None, mask_token_id: int | None = None, mode: str | None = None, depth: int = 0,
             refresh: int = 0, shift: bool = False) -> Answer:
    """Denoise a region of gen_length masks behind prefix_ids + prompt_ids (token ids: lists, or tensors of one row).

    The first keys of prefix_ids are shared with other requests. steps: None is one per token. mask_token_id: None is the
    configuration's. mode: "off", "naive" (all layers of the prefix for ever), "on"; None is as the space says. depth and
    refresh override the space's table and bicache.delta. shift: logits of a position are in the row before it (Dream).
    space: None shares nothing. Raises ValueError for a request or model that it does not take, and kvd.Mismatch and
    kvd.Closed."""
    decoder = _decoder(model, space)
    request = _request(decoder, prefix_ids, prompt_ids, gen_length, mask_token_id)
    steps = gen_length if steps is None else steps
    if mode not in (None, *MODES):
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if not 1 <= steps <= gen_length:
        raise ValueError(f"{steps} steps for {gen_length} tokens: there must be 1 or more, and not more than tokens")
    if depth < 0 or refresh < 0:
        raise ValueError("depth and refresh must be 0 or more")
    choice = _choose(space, request, decoder.layers, mode, depth)
    if shift and choice.depth and request.prefix == len(request.tokens):
        raise ValueError("shift needs a token behind the prefix, because it reads the row before the first mask")
    with torch.no_grad():
        denoiser = Denoiser(decoder, space, request, choice, refresh, int(shift))
        try:
            for t in range(1, steps + 1):
                denoiser.step(t, gen_length // steps + (t <= gen_length % steps))
            return _answer(denoiser, steps)
        finally:
            denoiser.close()


def _answer(it: Denoiser, steps: int) -> Answer:
    entry, request, b = it.entry, it.request, it.choice.depth
    return Answer(it.tokens[len(request.tokens):], it.choice.mode, b, _ratio(it.space, request, request.prefix),
                  min(entry.found, b) if entry else 0, entry.made if entry else 0, it.refreshes, it.decoder.computed,
                  len(it.tokens) * it.decoder.layers * steps, entry.shared_bytes(b) if entry else 0,
                  entry.refused if entry else False)


# ---- profile ---------------------------------------------------------------------------------------------------------


def profile(model: PreTrainedModel, space: kvd.Space, prefix_ids: Any, prompt_ids: Any, *, gen_length: int,
            mask_token_id: int | None = None, step: int = 0) -> int:
    """Give the space samples for BiCache's table, and generate nothing: how similar the keys and values of a prefix are when
    it is computed alone, and when it is a part of the request at the first step. `kvctl profile build SPACE` makes the table.

    step 0 samples the request's own prefix; step N, the prefixes of N, 2 N, 3 N, ... percent of the request, up to the
    prompt's end. Returns the number of samples. Raises kvd.PoolFull if the pool has no room for a sample, which is both sets
    of keys and values of all layers, and ValueError as generate() does. Waits for the daemon's worker."""
    decoder = _decoder(model, space)
    request = _request(decoder, prefix_ids, prompt_ids, gen_length, mask_token_id)
    prompt_only = _says(space, "bicache.r_def")
    tokens = len(request.tokens) + (0 if prompt_only else request.length)
    if not 0 <= step <= 100:
        raise ValueError(f"step must be 0 to 100 percent, not {step}")
    if step == 0 and request.prefix == 0:
        raise ValueError("a request without prefix_ids has no prefix to profile")
    prefixes = [(percent * tokens + 50) // 100 for percent in range(step, 101, step)] if step else [request.prefix]
    prefixes = [it for it in prefixes if 0 < it <= len(request.tokens)]
    with torch.no_grad():
        whole = Place(decoder.geometry, 0, len(request.all))
        for layer in range(decoder.layers):
            whole.add_private(layer)
        decoder.run(decoder.embed(request.all), whole, 0, 0, decoder.layers)
        for prefix in prefixes:
            alone = Entry(decoder, None, request.tokens[:prefix]).open(decoder.layers, decoder.layers)
            _send(space, alone, whole, _ratio(space, request, prefix))
    return len(prefixes)


def _send(space: kvd.Space, alone: Entry, whole: Place, ratio: int) -> None:
    """Send blocks [layers][alone, whole][n], the order that prefix_sample() expects."""
    n, size = alone.n_blocks, plain_bytes(space.geometry)
    blocks = space.alloc(2 * n * len(alone.layers))
    try:
        rest = iter(blocks)
        for layer in range(len(alone.layers)):
            for at in alone.planes(layer).at + whole.layers[layer][0][-1].at[:n]:
                ctypes.memmove(next(rest).data, at, size)
        space.prefix_sample(ratio, blocks, len(alone.tokens))
    finally:
        space.free(blocks)
