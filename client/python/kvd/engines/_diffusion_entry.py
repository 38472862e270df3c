# SPDX-License-Identifier: Apache-2.0
"""A stored prefix (arXiv:2606.07571, section 4): its keys, values and rows, computed without what follows it.

Each layer is a layer group of the space, and is found as a whole or not at all. Layer 0 is sealed last: a lease takes group
0 as the sign that a prefix is complete. An entry may be found in part, after an eviction or because its producer needed
fewer layers; the missing layers are then computed from the rows after the last one.
"""

from __future__ import annotations

import logging

import torch

import kvd

from ._diffusion_blocks import Place, Planes, Private
from ._diffusion_model import Decoder

log = logging.getLogger("kvd.engines.diffusion")

TRIES = 8
LEASE_S = 10.0      # to wait for another process that computes the prefix


class _Layer:
    """A layer's blocks: found or sealed (pin), to be sealed (filling), or private."""

    def __init__(self, geometry: kvd.Geometry, n: int, *, pin: kvd.Pin | None = None,
                 filling: list[kvd.Block] | None = None):
        self.pin, self.filling, self.private = pin, filling or [], None
        if pin or filling:
            self.planes = Planes(geometry, self._addresses(), geometry.block_bytes)
        else:
            self.private = Private(geometry, n, True)
            self.planes = self.private.planes

    def _addresses(self) -> list[int]:
        return [self.pin.address(id) for id in self.pin.blocks] if self.pin else [it.data for it in self.filling]

    def sealed(self, geometry: kvd.Geometry, pin: kvd.Pin) -> None:
        self.pin, self.filling = pin, []
        self.planes = Planes(geometry, self._addresses(), geometry.block_bytes)


class Entry:
    """The first layers of a prefix, in the pool where that is possible, otherwise in private memory, with the same numbers.

    found: layers that were in the pool, or that others made while this process waited; made: layers computed here."""

    def __init__(self, decoder: Decoder, space: kvd.Space | None, tokens: list[int]):
        self.decoder, self.space, self.tokens = decoder, space, tokens
        self.geometry = decoder.geometry
        self.n_blocks = -(-len(tokens) // self.geometry.block_tokens)
        self.layers: list[_Layer] = []
        self.found = self.made = 0
        self.refused = False            # the pool or the daemon failed us

    def open(self, need: int, make: int) -> Entry:
        """Find or compute `need` layers; if some are missing, max(need, make) are computed, for others that need more."""
        for _ in range(TRIES if self.space else 0):
            if self._find(need):
                return self
            if self.refused:
                break
            try:
                lease = self.space.lease(self.tokens, LEASE_S)  # type: ignore[union-attr]
            except kvd.Error as error:
                self._refuse(error)
                break
            if lease:
                with lease:
                    if not self._find(need):        # another process may have finished it before
                        self._make(max(need, make))
                return self
        self.refused = self.space is not None
        self._make(need)
        return self

    def planes(self, layer: int) -> Planes:
        return self.layers[layer].planes

    def states(self, layer: int) -> torch.Tensor:
        """Copy the rows after a layer [tokens, hidden]."""
        return self.planes(layer).states(len(self.tokens))

    def shared_bytes(self, layers: int) -> int:
        """Return how many bytes of these layers are in the pool, where other processes find them."""
        return sum(self.n_blocks * self.geometry.block_bytes for it in self.layers[:layers] if it.pin)

    def _refuse(self, error: kvd.Error) -> None:
        if isinstance(error, kvd.Closed):
            raise error
        self.refused = True
        log.warning("kvd: a prefix is computed in private memory: %s", error)

    # ---- finding -----------------------------------------------------------------------------------------------------

    def _find(self, need: int) -> bool:
        """Find the next layers, up to the first that is missing."""
        while len(self.layers) < need:
            assert self.space
            try:
                pin = self.space.find(self.tokens, len(self.layers))
            except kvd.Error as error:
                self._refuse(error)
                return False
            if pin.tokens < len(self.tokens):
                pin.release()
                return False
            self.layers.append(_Layer(self.geometry, self.n_blocks, pin=pin))
            self.found = len(self.layers)
        return True

    # ---- computing ---------------------------------------------------------------------------------------------------

    def _make(self, end: int) -> None:
        rows = self._rows()
        while len(self.layers) < end:
            at = len(self.layers)
            rows = self._compute(at, rows)
            if at and self.layers[at].filling:
                self._seal(at)
            if len(self.layers) == end and self.layers[0].filling:
                self._seal(0)
            if len(self.layers) <= at:      # lost
                rows = self._rows()

    def _rows(self) -> torch.Tensor:
        """Return the rows before the next layer."""
        return self.states(len(self.layers) - 1) if self.layers else self.decoder.embed(self.tokens)

    def _compute(self, at: int, rows: torch.Tensor) -> torch.Tensor:
        layer, place = self._take(), Place(self.geometry, len(self.tokens), len(self.tokens))
        if len(self.tokens) % self.geometry.block_tokens:
            layer.planes.clear_last()
        place.add(at, layer.planes)
        rows = self.decoder.run(rows, place, 0, at, at + 1)
        layer.planes.write_states(rows)
        self.layers.append(layer)
        self.made += 1
        return rows

    def _take(self) -> _Layer:
        blocks: list[kvd.Block] = []
        if self.space and not self.refused:
            try:
                blocks = self.space.alloc(self.n_blocks)
            except kvd.Error as error:
                self._refuse(error)
        return _Layer(self.geometry, self.n_blocks, filling=blocks)

    def _seal(self, at: int) -> None:
        """Publish a layer; if another process did so first, its blocks are used. If the daemon fails, the layer remains
        ours, unpublished, or it is unknown whose it is: then it and all deeper ones are dropped."""
        assert self.space
        layer, pin = self.layers[at], kvd.Pin(self.space, at)
        try:
            if len(pin.seal(layer.filling, self.tokens)) == self.n_blocks:
                layer.sealed(self.geometry, pin)
                return
        except kvd.Error as error:
            self._refuse(error)
            if all(it.data for it in layer.filling):
                return
        self.refused = True
        self._drop(at)

    def _drop(self, first: int) -> None:
        for it in self.layers[first:]:
            if it.pin:
                it.pin.release()
            if self.space:
                self.space.free(it.filling)
        del self.layers[first:]
        self.found = min(self.found, first)

    def close(self) -> None:
        self._drop(0)
