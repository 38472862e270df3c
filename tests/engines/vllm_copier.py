# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: which blocks the connector by copy stores, and what of after a load, or a step, that failed. Without a
model: its two sides, with a daemon of their own, which is replaced in between.
"""

from __future__ import annotations

import kvd
import torch
from kvd.engines._vllm_copier import Copier, Job, KvdCopyConnector, Work

from common import daemon, document

SIZE, BLOCKS = 16, 4
GEOMETRY = kvd.Geometry.opaque(2 * 2 * SIZE * 8 * 4, "copier", block_tokens=SIZE, fingerprint=(7, 7))
TOKENS = document(1, BLOCKS * SIZE)


class Side:
    """A worker whose blocks have its own numbers."""

    def __init__(self, socket: str, number: float):
        self.space = kvd.connect(socket).space("copier", GEOMETRY, fixed=True)
        self.caches = [torch.full((32, 2, SIZE, 8), number) for _ in range(2)]
        self.copier = Copier(self.space, SIZE)
        self.copier.register(self.caches)

    def found(self) -> int:
        """How many tokens another process would find."""
        self.space.catch_up()
        with self.space.lookup(TOKENS) as pin:
            return pin.tokens

    def content(self) -> set[float]:
        with self.space.lookup(TOKENS) as pin:
            return set(self.copier.blocks[torch.tensor(pin.blocks)].unique().tolist())


def job(name: str, first: int, n: int, whole: bool = False) -> Job:
    """Blocks [first, first + n); of a load with all tokens from the start."""
    return Job(name, 0, first, list(range(8 + first, 8 + first + n)), TOKENS[0 if whole else first * SIZE:(first + n) * SIZE])


def stores_what_was_loaded_and_computed(socket: str) -> None:
    one, two = Side(socket, 1.0), Side(socket, 2.0)
    one.copier.store(job("first", 0, 2))
    assert one.found() == 2 * SIZE and one.content() == {1.0}
    two.copier.load(job("second", 0, 2, whole=True))
    assert not two.copier.failed and float(two.caches[0][8:10].mean()) == 1.0
    two.copier.store(job("second", 0, BLOCKS))
    assert one.found() == BLOCKS * SIZE and one.content() == {1.0, 2.0}


def stores_nothing_after_a_failed_load(server) -> None:
    """In the step that loads, and in those that follow; in a worker that found the blocks before the others did not, too."""
    one, two, late = (Side(server.socket, number) for number in (1.0, 2.0, 3.0))
    one.copier.store(job("first", 0, 2))
    late.copier.load(job("third", 0, 2, whole=True))
    assert not late.copier.failed
    one.copier.forget()
    server.kill()
    server.start()
    two.copier.load(job("second", 0, 2, whole=True))
    assert two.copier.failed == {8, 9}
    for it, name in ((two, "second"), (late, "third")):
        it.copier.store(job(name, 0, BLOCKS))
        it.copier.store(job(name, BLOCKS - 1, 1))
        assert it.found() == 0, it.content()
    two.copier.store(job("fourth", 0, 2))       # of a request that nothing was loaded for
    assert two.found() == 2 * SIZE and two.content() == {2.0}


def stores_nothing_of_a_step_that_failed(socket: str) -> None:
    one = Side(socket, 5.0)
    connector = KvdCopyConnector.__new__(KvdCopyConnector)
    connector.stores, connector.copier = True, one.copier
    connector._get_connector_metadata = lambda: Work(1, stores=[job("only", 0, BLOCKS)])
    try:
        try:
            raise RuntimeError("a layer fails")
        finally:
            connector.wait_for_save()
    except RuntimeError:
        assert one.found() == 0
    connector.wait_for_save()
    assert one.found() == BLOCKS * SIZE


if __name__ == "__main__":
    for test in (stores_what_was_loaded_and_computed, stores_nothing_after_a_failed_load,
                 stores_nothing_of_a_step_that_failed):
        with daemon("--pool", "16M") as it:
            test(it if test is stores_nothing_after_a_failed_load else it.socket)
            it.check()
        print(f"ok {test.__name__}", flush=True)
