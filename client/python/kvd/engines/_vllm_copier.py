# SPDX-License-Identifier: Apache-2.0
"""The implementation of kvd.engines.vllm_copy; its documentation is there."""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from dataclasses import dataclass, field

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole,
                                                               KVConnectorWorkerMetadata)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec
from vllm.v1.request import Request

import kvd

from ._vllm_keys import extra_key, tokens_of
from ._vllm_space import HEADS, layer_specs, open_space, refuse, refuse_always, require_vllm

logger = init_logger("vllm.kvd.engines.vllm_copy")


@dataclass
class Job:
    """Blocks of one request, from its block `first` on, and their tokens; for loads, all tokens from the start."""

    request_id: str
    salt: int
    first: int
    blocks: list[int]               # vLLM's ids
    tokens: list[int]


@dataclass
class Work(KVConnectorMetadata):
    step: int
    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)


@dataclass
class Loaded(KVConnectorWorkerMetadata):
    """Reports that a worker has finished the loads of a step."""

    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return Loaded(min(self.step, other.step))


class Planner:
    """The scheduler's side: plans loads and stores of each step."""

    def __init__(self, spaces: list[kvd.Space], block_tokens: int):
        self.spaces, self.size = spaces, block_tokens
        self.epoch = b""
        self.pins: dict[str, list[kvd.Pin]] = {}                # pins of requests that were looked up
        self.loading: deque[tuple[int, list[kvd.Pin]]] = deque()    # pins of loading requests, by step
        self.requests: dict[str, Request] = {}
        self.stored: dict[str, int] = {}                        # number of blocks given to workers to store, by request
        self.work = Work(1)

    def find(self, request: Request, computed: int) -> int:
        """Return how many tokens all ranks have in the pool beyond the `computed` ones in vLLM's own cache."""
        self.drop(request.request_id)
        salt = extra_key(request, self.epoch, self.size)
        if salt is None:
            return 0
        tokens = tokens_of(request, 0, (request.num_tokens - 1) // self.size * self.size, self.size)
        self.pins[request.request_id] = pins = [space.find(tokens, salt=salt, wait=0) for space in self.spaces]
        return max(min(pin.tokens for pin in pins) - computed, 0)

    def admit(self, request: Request, blocks: list[int], found: int) -> None:
        """Plan the load of a request. blocks are those of the whole request; the `found` tokens follow those in vLLM's
        own cache."""
        pins = self.pins.pop(request.request_id, [])
        self.requests[request.request_id] = request
        self.stored[request.request_id] = 0
        if found:
            end = min(pin.tokens for pin in pins) // self.size
            first = end - found // self.size
            self.work.loads.append(Job(request.request_id, extra_key(request, self.epoch, self.size), first,
                                       blocks[first:end], tokens_of(request, 0, end * self.size, self.size)))
        self.loading.append((self.work.step, pins))

    def step(self, scheduled: dict[str, int], blocks_of) -> Work:
        for request_id, n in scheduled.items():
            request = self.requests.get(request_id)
            if request and (salt := extra_key(request, self.epoch, self.size)) is not None:
                first = self.stored[request_id]
                full = min(request.num_computed_tokens + n, request.num_tokens) // self.size
                if full > first:
                    self.work.stores.append(Job(request_id, salt, first, blocks_of(request_id)[0][first:full],
                                                tokens_of(request, first * self.size, full * self.size, self.size)))
                    self.stored[request_id] = full
        work, self.work = self.work, Work(self.work.step + 1)
        return work

    def loaded(self, step: int) -> None:
        while self.loading and self.loading[0][0] <= step:
            for pin in self.loading.popleft()[1]:
                pin.release()

    def drop(self, request_id: str) -> None:
        for pin in self.pins.pop(request_id, []):
            pin.release()
        self.requests.pop(request_id, None)
        self.stored.pop(request_id, None)


class Copier:
    """A worker's side: copies its part of blocks to and from its space."""

    def __init__(self, space: kvd.Space, block_tokens: int):
        self.space, self.size = space, block_tokens
        self.pool = torch.from_dlpack(space.memory())
        self.chains: dict[str, kvd.Pin] = {}
        self.caches: list[torch.Tensor] = []
        self.failed: set[int] = set()
        self.attached: dict[str, int] = {}      # by request that was loaded: reconnects until then, -1 if that failed
        self.step: int | None = None

    def register(self, caches: list[torch.Tensor]) -> None:
        """Set vLLM's caches, each [blocks, heads, tokens, content]. In the pool a block is [layers, heads, tokens,
        content], packed."""
        first = caches[0]
        if first[0].numel() * first.element_size() * len(caches) != self.pool.shape[1]:
            raise RuntimeError(f"vLLM's blocks do not have the announced size: {tuple(first.shape)}")
        for it in caches:
            if (it.shape[1:], it.dtype, it.device) != (first.shape[1:], first.dtype, first.device):
                raise RuntimeError(f"vLLM's layers are not alike: {tuple(it.shape)} of {it.dtype} on {it.device}, and"
                                   f" {tuple(first.shape)} of {first.dtype} on {first.device}")
        self.caches = caches
        self.blocks = self.pool.view(first.dtype).view(-1, len(caches), *first.shape[1:])

    def load(self, job: Job) -> None:
        """Load a job's blocks, or report them as failed. vLLM then computes them again, after a step that has computed with
        what was in them: nothing that follows from a failed load may be stored."""
        self.attached[job.request_id] = -1
        try:
            self._load(job)
        except kvd.Error as error:
            logger.warning_once("kvd: blocks are not loaded: %s", error)
            self.failed.update(job.blocks)

    def _load(self, job: Job) -> None:
        self.space.catch_up()
        with self.space.lookup(job.tokens, salt=job.salt) as pin:
            if pin.tokens < len(job.tokens):
                self.failed.update(job.blocks)
                return
            self.attached[job.request_id] = self.space.counters().reconnects
            ours, source = torch.tensor(job.blocks), torch.tensor(pin.blocks[job.first:])
            for i, cache in enumerate(self.caches):
                cache[ours] = self.blocks[source, i]

    def store(self, job: Job) -> None:
        """Store a job's blocks. A request whose beginning has left the pool, or for which there is no room, is not
        stored further, nor is one whose load failed, here or perhaps in a worker that found the next daemon."""
        if not self._was_loaded(job.request_id):
            self.let_go(self.chains.pop(job.request_id, None))
            return
        pin = self.chains.pop(job.request_id, None)
        if not job.first:
            self.let_go(pin)
            pin = self.space.lookup(job.tokens, salt=job.salt)
            if not pin:
                pin = kvd.Pin(self.space, salt=job.salt)
        if pin is None:
            return
        try:
            if self._extend(pin, job):
                self.chains[job.request_id], pin = pin, None
        except kvd.Error as error:
            logger.warning_once("kvd: not everything is stored: %s", error)
            if error.errno not in (errno.ENOBUFS, errno.EDQUOT):
                self.forget()
        finally:
            self.let_go(pin)

    def _was_loaded(self, request_id: str) -> bool:
        """Whether a request's load, if there was one, ended well, and every worker is sure to have found the same daemon."""
        if request_id not in self.attached:
            return True
        self.space.catch_up()
        return self.attached[request_id] == self.space.counters().reconnects

    def _extend(self, pin: kvd.Pin, job: Job) -> bool:
        """Copy and seal missing blocks of a job. Returns whether the chain has all of them now."""
        there = pin.tokens // self.size - job.first
        if there >= len(job.blocks):
            return True
        blocks = self.space.alloc(len(job.blocks) - there)
        ours, target = torch.tensor(job.blocks[there:][:len(blocks)]), torch.tensor([block.id for block in blocks])
        for i, cache in enumerate(self.caches):
            self.blocks[target, i] = cache[ours]
        pin.seal(blocks, job.tokens[there * self.size:][:len(blocks) * self.size])
        return there + len(blocks) == len(job.blocks)

    def let_go(self, pin: kvd.Pin | None) -> None:
        if pin is not None:
            pin.release()

    def forget(self) -> None:
        """Release all chains: a new daemon can be used only when no block of the old one is held."""
        while self.chains:
            self.chains.popitem()[1].release()


class KvdCopyConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        require_vllm()
        refuse_always(vllm_config, kv_cache_config)
        groups = len(kv_cache_config.kv_cache_groups)
        guess = vllm_config.speculative_config
        refuse([(guess is not None and guess.method in HEADS, f"speculation by {guess and guess.method} by copy"),
                (groups != 1, f"{groups} KV cache groups by copy: use kvd.engines.vllm, or"
                              " --disable-hybrid-kv-cache-manager")])
        self.group = kv_cache_config.kv_cache_groups[0]
        size, stages = self.group.kv_cache_spec.block_size, vllm_config.parallel_config.pipeline_parallel_size
        alike = all(isinstance(spec, MLAAttentionSpec) for _, spec in layer_specs(kv_cache_config))
        ranks = 1 if alike else vllm_config.parallel_config.tensor_parallel_size      # that have a space each, in a stage

        def space(stage: int, rank: int) -> kvd.Space:
            return open_space(vllm_config, kv_cache_config, "lhnc", part=(stage * ranks + rank, stages * ranks), stage=stage)

        if role == KVConnectorRole.SCHEDULER:
            self.planner = Planner([space(stage, rank) for stage in range(stages) for rank in range(ranks)], size)
        else:
            rank = get_tensor_model_parallel_rank()
            self.copier = Copier(space(get_pp_group().rank_in_group, min(rank, ranks - 1)), size)
            self.stores = rank < ranks

    # ---- scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        return self.planner.find(request, num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        self.planner.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output) -> Work:
        return self.planner.step(scheduler_output.num_scheduled_tokens, self._kv_cache_manager.get_block_ids)

    def update_connector_output(self, connector_output) -> None:
        if connector_output.kv_connector_worker_meta:
            self.planner.loaded(connector_output.kv_connector_worker_meta.step)

    def request_finished(self, request, block_ids) -> tuple[bool, None]:
        self.planner.drop(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Stop sharing, because this vLLM's weights may have changed. Stored blocks stay for other processes."""
        self.planner.epoch = os.urandom(16)
        return True

    # ---- workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.copier.register([kv_caches[name] for name in self.group.layer_names])

    def start_load_kv(self, forward_context, **kwargs) -> None:
        work = self._get_connector_metadata()
        for job in work.loads:
            self.copier.load(job)
        self.copier.step = work.step

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None:
        pass

    def wait_for_save(self) -> None:
        if sys.exc_info()[0] is not None:       # vLLM calls this after a step that failed, too
            return
        stores = self._get_connector_metadata().stores if self.stores else []
        if stores and self.copier.caches[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        for job in stores:
            self.copier.store(job)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        for request_id in finished_req_ids:
            self.copier.attached.pop(request_id, None)
            self.copier.let_go(self.copier.chains.pop(request_id, None))
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.copier.failed = self.copier.failed, set()
        return failed

    def build_connector_worker_meta(self) -> Loaded | None:
        step, self.copier.step = self.copier.step, None
        return None if step is None else Loaded(step)

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self.copier.forget()
