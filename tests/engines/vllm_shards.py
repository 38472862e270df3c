# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: vLLM's connector on several GPUs of the stand-in driver, as far as it goes without vLLM's own kernels. A
scheduler that maps no memory, and workers whose layers are on their own GPUs, of tensor parallelism and of a pipeline with stages
of different sizes; then a second vLLM, which must find each layer where the first one wrote it."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

BUILD = Path(os.environ["KVD"]).resolve().parents[1]
DRIVER = BUILD / "tests/gpu/fakecuda"
if os.environ.get("FAKECUDA_DEVICES") is None:      # libcuda is found by the path that a process starts with
    if not (DRIVER / "libcuda.so.1").exists():
        print("skip: there is no stand-in driver in this build")
        sys.exit()
    os.execve(sys.executable, [sys.executable, *sys.argv],
              os.environ | {"FAKECUDA_DEVICES": "4", "LD_LIBRARY_PATH": str(DRIVER)})

sys.argv[1:] = ["", os.environ["KVD_MODEL"]]        # vllm_refusals.py reads them
from common import daemon  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm_refusals import PLAIN, caches_of, changed, config_of  # noqa: E402

import kvd  # noqa: E402
from kvd.engines import _vllm_connector as connectors  # noqa: E402
from kvd.engines import _vllm_space as spaces  # noqa: E402
from kvd.engines._vllm_connector import KvdConnector, KVConnectorRole  # noqa: E402

GPUS = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False, device_type="cuda", get_device_capability=lambda: (9, 0))
TOKENS, BLOCKS = list(range(300, 300 + 4 * 32)), 4


class Engine:
    """A scheduler's space and its workers', made as KvdConnector makes them. layers: of each worker."""

    def __init__(self, ends: ExitStack, config, layers: list[int]):
        self.workers, n = [], spaces.workers(config)
        self.scheduler = ends.enter_context(self._open(config, caches_of(FullAttentionSpec(**PLAIN)), n, None))
        for i, count in enumerate(layers):
            caches = caches_of(FullAttentionSpec(**PLAIN))
            (tensor,) = caches.kv_cache_tensors
            tensor.layers, tensor.block_stride = tensor.layers[:count], count * tensor.layer_stride
            space = ends.enter_context(self._open(config, caches, n, i))
            self.workers.append((space, self._place(config, space, caches, n, i)))

    def _open(self, config, caches, shares: int, share: int | None) -> kvd.Space:
        return spaces.open_space(config, caches, "blhnc", shares=shares, share=share)

    def _place(self, config, space: kvd.Space, caches, shares: int, share: int):
        """Returns the tensor, at its place in this worker's shard."""
        worker, stage = object.__new__(KvdConnector), share // config.parallel_config.tensor_parallel_size
        worker.space, worker.blocks, worker._role = space, space.memory().blocks, KVConnectorRole.WORKER
        with changed(connectors, "get_pp_group", lambda: SimpleNamespace(rank_in_group=stage)):
            worker._place(caches, spaces.stages(config), shares, share, space.memory().block_bytes)
        return caches.kv_cache_tensors[0]

    def layers(self, block: int):
        """Each worker's memory of each of its layers of a block: the stand-in's device addresses are this process's."""
        for i, (space, tensor) in enumerate(self.workers):
            memory = space.memory()
            assert tensor.block_stride == memory.block_bytes and block < memory.mapped
            for layer in range(len(tensor.layers)):
                at = memory.base + block * memory.block_bytes + tensor.offset + layer * tensor.layer_stride
                assert layer * tensor.layer_stride + tensor.offset + tensor.layer_stride <= memory.block_bytes
                yield 16 * i + layer, (ctypes.c_uint8 * tensor.layer_stride).from_address(at)


def check(socket: str, layers: list[int], tensor: int, pipeline: int) -> None:
    config = config_of()
    config.kv_transfer_config.kv_connector_extra_config["socket"] = str(socket)
    parts = layers[::tensor] if pipeline > 1 else []
    with ExitStack() as ends:
        for it in (changed(config.parallel_config, "tensor_parallel_size", tensor), changed(spaces, "stages", lambda _: parts),
                   changed(config.parallel_config, "pipeline_parallel_size", pipeline), changed(spaces, "current_platform", GPUS),
                   patch.object(connectors, "stages", lambda _: parts)):
            ends.enter_context(it)
        spaces.refuse_in_place(config, caches_of(FullAttentionSpec(**PLAIN)))
        one, two = Engine(ends, config, layers), Engine(ends, config, layers)
        blocks = one.scheduler.alloc(BLOCKS)
        for block in blocks:
            for value, layer in one.layers(block.id):
                ctypes.memset(layer, value + 7 * block.id & 255, len(layer))
        with kvd.Pin(one.scheduler) as pin:
            ids = pin.seal(blocks, TOKENS)
        two.scheduler.catch_up()
        with two.scheduler.lookup(TOKENS) as pin:
            assert pin.blocks == ids, (pin.blocks, ids)
            for block in ids:
                for value, layer in two.layers(block):
                    assert set(layer) == {value + 7 * block & 255}, (value, block)


def main() -> None:
    for layers, tensor, pipeline in ([8, 8], 2, 1), ([3, 5], 1, 2), ([3, 3, 5, 5], 2, 2):
        devices = ",".join(str(i) for i in range(len(layers)))
        with daemon("--pool", "64M", "--set", "daemon.segment=2M", "--backend", "cuda", "--device", devices) as it:
            check(it.socket, layers, tensor, pipeline)
            it.check()


if __name__ == "__main__":
    main()
