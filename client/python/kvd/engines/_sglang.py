# SPDX-License-Identifier: Apache-2.0
"""The implementation of kvd.engines.sglang; its documentation is there."""

from __future__ import annotations

import collections
import json
import logging
import re
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

import kvd
from kvd.engines._common import weights

TESTED = ("0.5.23",)
TYPES = (torch.float32, torch.float16, torch.bfloat16)
BY_LENGTH = ("longrope", "dynamic")     # RoPE kinds whose keys depend on the maximum sequence length

_log = logging.getLogger("kvd.engines.sglang")


def _refuse(args: Any, params: Any, components: set, cache: Any) -> None:
    """Raise an error that names unsupported configurations at start, to prevent wrong answers later."""
    planes = [*(getattr(cache, "k_buffer", None) or ()), *(getattr(cache, "v_buffer", None) or ())]
    parallel = [name for name in ("tp_size", "pp_size", "dp_size", "attn_cp_size") if getattr(args, name, 1) > 1]
    reasons = [
        (components != {ComponentType.FULL}, f"a cache of {', '.join(sorted(it.name for it in components))}"),
        (not planes or getattr(cache, "kv_cache_layout", "nhd") != "nhd"
         or any(it.dim() != 3 or it.dtype not in TYPES for it in planes),
         f"the KV cache {type(cache).__name__} (plain keys and values of 16 or 32 bits, by token, are what it takes)"),
        (params.is_eagle or bool(getattr(args, "speculative_algorithm", None)), "speculative decoding"),
        (bool(parallel), f"parallelism ({', '.join(parallel)})"),
        (str(getattr(args, "load_format", "auto")) == "dummy", "random weights (--load-format dummy)"),
    ]
    names = [name for is_so, name in reasons if is_so]
    if names:
        raise ValueError("kvd does not support this yet: " + "; ".join(names))


class Linker(UnifiedCacheLinker):
    """Cache linker, made by SGLang in each scheduler process. It runs in the single thread of that process."""

    def __init__(self, server_args: Any, params: Any, *, components: set, extra_config: dict | None = None,
                 forward_stream: Any = None):
        if sglang.__version__ not in TESTED:
            _log.warning("kvd.engines.sglang was tested with SGLang %s; this is %s", ", ".join(TESTED),
                         sglang.__version__)
        cache = params.token_to_kv_pool_allocator.get_kvcache()
        _refuse(server_args, params, components, cache)
        self.forward_stream = forward_stream
        self.page = params.page_size
        self.planes = [*cache.k_buffer, *cache.v_buffer]    # each [slots, heads, dim]
        self.at = [0]
        for it in self.planes:
            self.at.append(self.at[-1] + self.page * it[0].numel() * it.element_size())
        self.space = self._open(server_args, extra_config or {})
        self.pool = torch.from_dlpack(self.space.memory())  # [blocks, bytes]
        self.pools = {PoolName.KV: self}
        self.layer_done_counter = LayerWiseLoadCounter(len(cache.k_buffer))
        self._queued: dict[str, list[tuple[torch.Tensor, list[kvd.Pin]]]] = {}
        self._done: collections.deque[bool] = collections.deque()
        self._said = ""

    def _open(self, args: Any, extra: dict) -> kvd.Space:
        model = ModelConfig.from_server_args(args).hf_config
        config = json.loads(model.to_json_string(use_diff=False))
        if not any(kind in str(config) for kind in BY_LENGTH):
            config.pop("context_len", None)     # SGLang's maximum sequence length
        fingerprint = kvd.fingerprint(
            "sglang", weights(args.model_path, extra.get("fingerprint"), getattr(model, "_commit_hash", None)), config,
            str(args.json_model_override_args), str(args.quantization), self.page,
            [(list(it.shape[1:]), str(it.dtype)) for it in self.planes])
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(args.model_path).name)[:24].strip("-.") or "model"
        geometry = kvd.Geometry.opaque(-(-self.at[-1] // 64) * 64, "sglang-pages", block_tokens=8,
                                       fingerprint=fingerprint)
        return kvd.connect(extra.get("socket")).space(
            extra.get("space") or f"sglang-{slug}-{fingerprint[0]:016x}", geometry,
            max_blocks=int(extra.get("max_blocks", 0)), fixed=True)

    # ---- from kvd ----------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list) -> list[int]:
        """Look up pages without pinning them, because SGLang calls this repeatedly while a request waits."""
        pins = self._try(self._found, _keys(transfers[0])) or []
        return list(range(1, _let_go(pins) + 1))

    def load(self, rid: str, transfers: list) -> bool:
        """Queue the load of pages. Returns False if pages were evicted since the lookup; SGLang then computes them."""
        (kv,) = transfers
        pins = self._try(self._found, _keys(kv)) or []
        if len(pins) < len(kv.keys):
            _let_go(pins)
            return False
        self._queued.setdefault(rid, []).append((kv.device_indices, pins))
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        loads = self._queued.pop(rid, None)
        for _, pins in loads or ():
            _let_go(pins)
        return loads is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        index = self.layer_done_counter.update_producer()
        try:
            for loads in self._queued.values():
                for slots, pins in loads:
                    self._read(slots, [pin.blocks[0] for pin in pins])
            self._synchronize()
            for layer in range(self.layer_done_counter.num_layers):
                self.layer_done_counter.complete(index, layer)
        except Exception as e:  # SGLang aborts the requests that need the pages
            _log.exception("pages were not read")
            self.layer_done_counter.fail(index, e)
        finally:
            self._drop_queued()
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def _found(self, keys: bytes) -> list[kvd.Pin]:
        """Pin the longest run of pages from the first on."""
        self.space.catch_up()
        pins = self.space.lookup_keys(keys)
        n = next((i for i, pin in enumerate(pins) if not pin), len(pins))
        _let_go(pins[n:])
        return pins[:n]

    def _read(self, slots: torch.Tensor, blocks: list[int]) -> None:
        ids = torch.tensor(blocks, device=self.pool.device)
        for i, plane in enumerate(self.planes):
            rows = self.pool[ids, self.at[i]:self.at[i + 1]].view(plane.dtype)
            plane[slots] = rows.reshape(-1, *plane.shape[1:]).to(plane.device)

    # ---- to kvd ------------------------------------------------------------------------------------------------------

    def offload(self, transfers: list, session_id: str | None = None) -> bool:
        """Store pages before returning. Returns False on failure: SGLang keeps the pages and retries later."""
        (kv,) = transfers
        if self._try(self._write, kv.device_indices.view(-1, self.page), _keys(kv)) is None:
            return False
        self._done.append(True)
        return True

    def _write(self, slots: torch.Tensor, keys: bytes) -> bool:
        self.space.catch_up()
        pins = self.space.lookup_keys(keys)
        fresh = [i for i, pin in enumerate(pins) if not pin]
        _let_go(pins)
        blocks = self.space.alloc(len(fresh)) if fresh else []
        try:
            self._fill(slots[fresh].reshape(-1), [block.id for block in blocks])
            for i, block in zip(fresh, blocks):
                self.space.seal_key(keys[32 * i:32 * i + 32], [block]).release()
        finally:
            self.space.free(blocks)
        return True

    def _fill(self, slots: torch.Tensor, blocks: list[int]) -> None:
        if self.planes[0].device.type != "cpu":
            for event in self.record_offload_ready():
                event.synchronize()
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.pool.device)
        for i, plane in enumerate(self.planes if blocks else ()):
            rows = plane[slots].reshape(len(blocks), -1).view(torch.int8)
            self.pool[ids, self.at[i]:self.at[i + 1]] = rows.to(self.pool.device)
        self._synchronize()

    def num_completed_offloads(self) -> int:
        return len(self._done)

    def pop_completed_offload(self) -> bool:
        return self._done.popleft()

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop this process's state, for SGLang's flush_cache. Pages in kvd stay, because other processes use them."""
        self._drop_queued()
        self._done.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self.pool = None
        self.space.close()

    def _drop_queued(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)

    def _synchronize(self) -> None:
        """Wait until copies between a GPU and the pool are done."""
        for device in {self.planes[0].device, self.pool.device}:
            if device.type != "cpu":
                torch.get_device_module(device).current_stream().synchronize()

    def _try(self, what: Any, *arguments: Any) -> Any:
        """Call what(*arguments). Returns None, with a warning, if there is no daemon or the pool is full, because a
        failing cache must not fail the request."""
        try:
            result = what(*arguments)
            self._said = ""
            return result
        except kvd.Error as e:
            if str(e) != self._said:
                _log.warning("not shared: %s", e)
            self._said = str(e)
            return None


def _keys(transfer: Any) -> bytes:
    return bytes.fromhex("".join(transfer.keys))


def _let_go(pins: list[kvd.Pin]) -> int:
    for pin in pins:
        pin.release()
    return len(pins)
