# SPDX-License-Identifier: Apache-2.0
"""The implementation of kvd.engines.vllm; its documentation is there."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1, KVConnectorMetadata,
                                                               KVConnectorRole, SupportsHMA)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

import kvd

from . import _vllm_events as events
from ._vllm_attention import Attention
from ._vllm_groups import Groups
from ._vllm_layout import asks_for_methods, register
from ._vllm_ledger import Ledger, Numbers
from ._vllm_methods import Methods
from ._vllm_pool import Manager
from ._vllm_rows import Done, Rows, Told
from ._vllm_space import (block_tokens, blocks_needed, check_device, compare_next_token, layer_specs, open_space, refuse_in_place,
                          require_vllm, stages, workers)
from ._vllm_steps import Steps
from ._vllm_warmup import guard

register()      # for vLLM in the caller's process, where this module is imported before the layout is chosen

logger = init_logger("vllm.kvd.engines.vllm")       # vLLM prints only loggers under its own name

PATIENCE_S = 20         # seconds in which a worker meets the daemon that its scheduler has met; a call may take 5

# Of workers by engine id, until a scheduler in the same process takes them.
_spaces: dict[str, tuple[kvd.Space, Rows]] = {}


class PoolMemory(TorchFunctionMode):
    """Answers the torch.zeros call for the KV cache with the pool, without zeroing, which would erase the shared
    cache."""

    def __init__(self, space: kvd.Space, blocks: int):
        super().__init__()
        self.tensor = torch.from_dlpack(space.memory())[:blocks].view(-1)
        self.placed = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self.tensor.numel(),) and kwargs.get("dtype") is torch.int8:
            self.placed = True
            return self.tensor
        return func(*args, **kwargs)

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        if error is None and not self.placed:
            raise RuntimeError("this vLLM does not allocate its KV cache in one piece of int8: kvd cannot place it")


@dataclass
class Step(KVConnectorMetadata):
    """Blocks that a worker must have mapped before it runs a step: ids of a space, below top, in the pool to which the
    scheduler attached for the era-th time, and whose cache it is. told, numbers: see Methods.tell() and .numbers()."""

    space: str
    top: int
    era: int
    cache: int
    told: dict[int, Told] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)


class KvdStats(KVConnectorStats):
    """Counts for vLLM's log."""

    def reset(self) -> None:
        self.data = asdict(Numbers())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(other.data)        # counts are cumulative
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        require_vllm()
        refuse_in_place(vllm_config, kv_cache_config)
        engine, shares = vllm_config.kv_transfer_config.engine_id, workers(vllm_config)
        is_worker = role == KVConnectorRole.WORKER
        space, self.rows = (None, None) if is_worker else _spaces.pop(engine, (None, None))
        if self.rows:
            self.rows.let_go()      # the scheduler's own blocks hold the pool
        share = self._share(vllm_config) if is_worker else None
        self.space = space or open_space(vllm_config, kv_cache_config, "blhnc", shares=shares, share=share)
        if is_worker:
            check_device(self.space)
            self.rows = Rows(self.space, self._steps(vllm_config))
            if asks_for_methods(vllm_config):
                self.rows.hold()
            _spaces[engine] = self.space, self.rows
            guard()
            self._map_null_block()
        else:
            events.replace_publisher(vllm_config.kv_events_config)
        self.events = vllm_config.kv_events_config
        self.size = block_tokens(kv_cache_config)
        memory = self.space.memory()
        self.base, self.blocks, self.mapped, self.era = memory.base, memory.blocks, memory.mapped, 0
        self.engine = engine
        self.cache = 0              # of a worker: whose blocks its scheduler uses; 0 before its first step
        self.memory = memory        # that of the scheduler's blocks: the space may have met the next daemon already
        self.ahead = compare_next_token(vllm_config, kv_cache_config)
        self.extra = vllm_config.kv_transfer_config.get_from_extra_config
        self.layers = vllm_config.compilation_config.static_forward_context
        self.step: Any = None       # of _vllm_attention.py
        self.form: tuple[int, float] | None = None      # query heads and scale of all layers
        self.batch: kvd.Batch | None = None     # of its steps on a GPU
        self.ledger: Ledger | None = None
        if asks_for_methods(vllm_config):
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"     # what a worker cannot attend to
        self.steps = self._steps(vllm_config)
        self.limits = vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens
        self._make_room(vllm_config, kv_cache_config)
        self._place(kv_cache_config, stages(vllm_config), shares, share or 0, memory.block_bytes)

    def _steps(self, config: VllmConfig) -> Steps | None:
        is_worker = self.role == KVConnectorRole.WORKER
        return Steps(config, self.space.geometry.head_dim, is_worker) if asks_for_methods(config) else None

    def _share(self, config: VllmConfig) -> int:
        """Return the number of this worker's part of a block, of workers(config)."""
        before = 0 if current_platform.is_cpu() else get_pp_group().rank_in_group
        return before * config.parallel_config.tensor_parallel_size + get_tensor_model_parallel_rank()

    def _make_room(self, config: VllmConfig, caches: KVCacheConfig) -> None:
        """Set vLLM's number of blocks to the maximum of the pool, so that every id of the pool is valid in vLLM."""
        needed = blocks_needed(config, caches) + asks_for_methods(config)       # the first block is held twice
        if self.blocks < needed:
            raise ValueError(f"kvd's pool has room for {self.blocks} blocks of {self.space.geometry.block_bytes} bytes;"
                             f" a sequence of max_model_len needs {needed}. Give it a larger pool, or vLLM a smaller"
                             f" --max-model-len (at most {self._longest(config, caches)})")
        caches.num_blocks = config.cache_config.num_gpu_blocks = self.blocks
        step = min(config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len)
        most = self.space.available() * self.size
        if most < step and self.role == KVConnectorRole.SCHEDULER:
            logger.warning("kvd: a step may fill %d tokens, but the pool has room for %d now. Longer steps wait until it has"
                           " more. A process may fill only half of a pool at a time (client_quota in kvd.conf(5)): set"
                           " --max-num-batched-tokens to %d or less", step, most, most)

    def _place(self, caches: KVCacheConfig, layers: list[int], shares: int, share: int, stride: int) -> None:
        """Set where this worker's layers are in a block: the stages of a pipeline one after the other, and in each stage
        the shares of its workers; on several GPUs, at the beginning of its shard, and shards are `stride` bytes apart."""
        stage = get_pp_group().rank_in_group if self.role == KVConnectorRole.WORKER else 0
        for tensor in caches.kv_cache_tensors:
            if layers and tensor.block_stride != layers[stage] * tensor.layer_stride:
                raise RuntimeError(f"vLLM has {len(tensor.layers)} layers in stage {stage}, and not {layers[stage]}")
            if stride == self.space.block_bytes:
                tensor.offset += sum(layers[:stage]) * tensor.layer_stride * shares + share * tensor.block_stride
            tensor.block_stride = stride
            tensor.size = self.blocks * tensor.block_stride

    def _longest(self, config: VllmConfig, caches: KVCacheConfig) -> int:
        """Return the longest sequence, in whole blocks, for which the pool has room."""
        model = config.model_config
        while model.max_model_len > 0 and blocks_needed(config, caches) + asks_for_methods(config) > self.blocks:
            model.max_model_len = (model.max_model_len - 1) // self.size * self.size
        return model.max_model_len

    # ---- worker: the memory

    def _map_null_block(self) -> None:
        """Have block 0 mapped before vLLM's first step: the steps that it invents at its start read it. A handle of its
        own, which is closed, keeps no blocks for this worker, which allocates no others."""
        if not self.space.memory().mapped:
            shard = self.space.shard if self.space.shards > 1 else None
            with self.space.daemon.space(self.space.name, self.space.geometry, shard=shard) as brief:
                brief.free(brief.alloc(1))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        return "BLHNC"

    def get_mem_pool_context(self) -> AbstractContextManager:
        return PoolMemory(self.space, self.blocks)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Check the addresses of vLLM's views: layer l of a tensor in block b is at
        base + b * block_bytes + offset + l * layer_stride, where the offset has the share of this worker. A view is at most
        as long as its page, which may end with padding."""
        memory, caches = self.space.memory(), self._kv_cache_config
        if self.extra("methods", False):
            others = [name for name in kv_caches if not isinstance(self.layers[name].impl, Attention)]
            if others:
                raise RuntimeError(f"vLLM attends with another backend than kvd's in layer {others[0]}, which knows no methods")
        pages = {name: spec.page_size_bytes for name, spec in layer_specs(caches)}
        for tensor in caches.kv_cache_tensors:
            for i, name in enumerate(tensor.layers):
                view, at = kv_caches[name], memory.base + tensor.offset + i * tensor.layer_stride
                if (view.data_ptr() != at or view.stride(0) * view.element_size() != memory.block_bytes
                        or view[0].numel() * view.element_size() > pages[name]):
                    raise RuntimeError(f"vLLM's layer {name} is not in kvd's pool: {tuple(view.shape)} {view.stride()}")
        logger.info("kvd: the KV cache is space %s of the pool, %d blocks of %d bytes", self.space.name, self.blocks,
                    memory.block_bytes)

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        """Map the memory of the next step: model runner V1 zeroes blocks before it binds the metadata."""
        self._map(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Step) -> None:
        self._map(connector_metadata)
        self.rows.begin(connector_metadata.told, self.memory)
        super().bind_connector_metadata(connector_metadata)

    def _map(self, step: Step) -> None:
        """Map memory by which the pool has grown, if a step uses it."""
        self.rows.keep(step.numbers)
        if step.space != self.space.name:
            raise RuntimeError(f"the scheduler uses space {step.space}, and this worker {self.space.name}: kvd's"
                               " fingerprints differ")
        apart = self.engine in _spaces          # in a process of its own: no scheduler has taken its space
        met = (step.era, step.cache) != (self.era, self.cache) and (step.top > 0 or not apart)
        if met and apart:
            self._meet(step.cache)
        if step.top > self.mapped or met:
            memory = self.space.memory()
            if met:
                self.memory = memory
            self.mapped, self.era, self.cache = memory.mapped, step.era, step.cache
            if memory.base != self.base:
                raise RuntimeError("the daemon was replaced, and its pool has other addresses now: restart vLLM")
            if apart and step.top > self.mapped:        # a scheduler in this process has mapped what it uses
                raise RuntimeError("the daemon ended before this worker has mapped the blocks of a step: restart vLLM")

    def _meet(self, cache: int) -> None:
        """Meet the daemon that the scheduler has met, of that cache: elsewhere, ids are other blocks. A daemon that is busy may not
        answer at once, and the connection to one that was killed may look open for a moment."""
        held, start = self.rows.anchor is not None, time.monotonic()
        self.rows.let_go()
        while not self._has_met(cache, held):
            if time.monotonic() - start > PATIENCE_S:
                raise RuntimeError("this worker uses another daemon's pool than its scheduler, as on another host, or has no"
                                   " connection to it: run all workers with one daemon, or use kvd.engines.vllm_copy")
            time.sleep(0.05)

    def _has_met(self, cache: int, held: bool) -> bool:
        try:
            if self.space.catch_up() and self.space.cache == cache:
                if held:
                    self.rows.hold()
                return True
        except kvd.Error:               # it ended just now
            pass
        return False

    def start_load_kv(self, forward_context, **kwargs) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None:
        pass

    def wait_for_save(self) -> None:
        if self.step is not None:
            self.step.end()
        self.rows.end()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.rows.broken_blocks()

    def build_connector_worker_meta(self) -> Done | None:
        return self.rows.done()

    # ---- scheduler: the blocks

    def bind_kv_cache_manager(self, kv_cache_manager) -> None:
        groups = Groups(kv_cache_manager.coordinator, self.ahead)
        self.ledger = Ledger(self.space, groups, keep=min(32, self.blocks // 32),
                             wait=float(self.extra("fetch_wait", 1.0)), pin=bool(self.extra("pin", False)))
        Manager.adopt(kv_cache_manager, self.ledger)
        if self.extra("methods", False):
            self.ledger.methods = Methods(self.ledger, kv_cache_manager.block_pool.null_block, *self.limits, rows=self.rows,
                                          steps=self.steps)
        events.begin(self.events, self.space, groups, self.ledger.salts, kv_cache_manager)
        super().bind_kv_cache_manager(kv_cache_manager)

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return 0, because Manager.get_computed_blocks has counted the pool's blocks; None if vLLM must ask again."""
        return (None if self.ledger.waits(request.request_id) else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output) -> KVConnectorMetadata:
        self.ledger.drop_found()
        if scheduler_output.new_block_ids_to_zero:      # a request of this step may have lost its blocks since
            scheduler_output.new_block_ids_to_zero = [it for it in scheduler_output.new_block_ids_to_zero
                                                      if it in self.ledger.ours]
        self.ledger.trim()
        self.ledger.numbers.steps += 1
        step = Step(self.space.name, self.ledger.top, self.ledger.era, self.ledger.cache)
        if self.ledger.methods:
            step.told = self.ledger.methods.tell(scheduler_output.num_scheduled_tokens)
            step.numbers = self.ledger.methods.numbers()
        return step

    def update_connector_output(self, connector_output) -> None:
        if self.ledger.methods and connector_output.kv_connector_worker_meta:
            self.ledger.methods.take(connector_output.kv_connector_worker_meta)
        self.ledger.publish()   # the step's output has arrived, so its writes are complete, on GPUs too

    def request_finished(self, request, block_ids) -> tuple[bool, None]:
        self.ledger.end_waiting(request.request_id)
        return False, None      # Manager.free publishes and releases its blocks

    def request_finished_all_groups(self, request, block_ids) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        return True

    def get_kv_connector_stats(self) -> KvdStats | None:
        is_due = self.ledger and self.ledger.numbers.steps % 100 == 0
        return KvdStats(asdict(self.ledger.numbers)) if is_due else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict | None = None) -> KvdStats:
        return KvdStats(data or {})

    def shutdown(self) -> None:
        if self.rows:
            self.rows.let_go()
        if self.ledger:
            logger.info("kvd: %s", self.ledger.numbers)
            self.ledger.shut()
