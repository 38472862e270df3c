# SPDX-License-Identifier: Apache-2.0
"""The implementation of kvd.engines.sglang; its documentation is there."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import logging
import os
import re
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import sglang
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

import kvd
from kvd.engines._common import weights
from kvd.engines._sglang_pools import Part, Unsupported, let_go, parts

TESTED = ("0.5.23",)
BY_LENGTH = ("longrope", "dynamic")     # RoPE kinds whose keys depend on the maximum sequence length
BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "mamba_backend",
            "linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend")
CHUNK = 256                             # pages that are looked up at a time

_linkers: weakref.WeakSet[Linker] = weakref.WeakSet()
_log = logging.getLogger("kvd.engines.sglang")


def _watch_weights() -> None:
    """Have all linkers of this process stop sharing before weights are updated. A reset of the cache does not show why."""
    def watched(update: Any) -> Any:
        @functools.wraps(update)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            for it in _linkers:
                it.stop_sharing()
            return update(*arguments, **options)
        return wrapper

    kind = weight_updater.SchedulerWeightUpdaterManager
    for name in [it for it in vars(kind) if it.startswith(("update_weights", "begin_weight_update"))]:
        setattr(kind, name, watched(getattr(kind, name)))


_watch_weights()


def _supported(args: Any, params: Any, components: set, cache: Any) -> dict[PoolName, Part]:
    """The parts of the KV cache. Raises an error that names unsupported configurations at start, to prevent wrong answers
    later."""
    found, words = {}, []
    try:
        found = parts(cache, params, components)
    except Unsupported as e:
        words.append(str(e))
    parallel = [name for name in ("tp_size", "pp_size", "dp_size", "attn_cp_size") if getattr(args, name, 1) > 1]
    reasons = [
        (params.is_eagle or bool(getattr(args, "speculative_algorithm", None)), "speculative decoding"),
        (bool(parallel), f"parallelism ({', '.join(parallel)})"),
        (str(getattr(args, "load_format", "auto")) == "dummy", "random weights (--load-format dummy)"),
        (bool(getattr(args, "quantization_param_path", None)), "scales of the KV cache from a file"),
    ]
    words += [name for is_so, name in reasons if is_so]
    if words:
        raise ValueError("kvd does not support this yet: " + "; ".join(words))
    return found


class _Loaded(LayerWiseLoadCounter):
    """Pages are read before a batch starts, so no layer waits. Keeps whether they were."""

    def __init__(self) -> None:
        super().__init__(1)

    def wait_until(self, threshold: int) -> None:
        pass


class _Load(NamedTuple):
    """Pages to be copied into slots of SGLang, and the pins that keep them."""
    part: Part
    slots: torch.Tensor
    pins: list[kvd.Pin]


class Linker(UnifiedCacheLinker):
    """Cache linker, made by SGLang in each scheduler process. It runs in the single thread of that process."""

    def __init__(self, server_args: Any, params: Any, *, components: set, extra_config: dict | None = None,
                 forward_stream: Any = None):
        if sglang.__version__ not in TESTED:
            _log.warning("kvd.engines.sglang was tested with SGLang %s; this is %s", ", ".join(TESTED),
                         sglang.__version__)
        self.forward_stream = forward_stream
        self.page = params.page_size
        cache = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = _supported(server_args, params, components, cache)
        self.device = torch.device(cache.device)
        self._open(server_args, extra_config or {}, str(cache.dtype))
        self.layer_done_counter = _Loaded()
        self._queued: dict[str, list[_Load]] = {}
        self._done: collections.deque[bool] = collections.deque()
        self._said = ""
        _linkers.add(self)

    def _open(self, args: Any, extra: dict, dtype: str) -> None:
        """Open a space for each part: for keys and values, for windows, for states."""
        model = ModelConfig.from_server_args(args).hf_config
        config = json.loads(model.to_json_string(use_diff=False))
        if not any(kind in str(config) for kind in BY_LENGTH):
            config.pop("context_len", None)     # SGLang's maximum sequence length
        fingerprint = kvd.fingerprint(
            "sglang", weights(args.model_path, extra.get("fingerprint"), getattr(model, "_commit_hash", None)), config,
            str(args.json_model_override_args), str(args.quantization), dtype, self.page, sglang.__version__,
            self.device.type, [str(getattr(args, name, None)) for name in BACKENDS],
            [(name.value, part.layout()) for name, part in sorted(self.pools.items())])
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(args.model_path).name)[:24].strip("-.") or "model"
        space = extra.get("space") or f"sglang-{slug}-{fingerprint[0]:016x}"
        for name, part in self.pools.items():
            part.open(extra.get("socket"), space if name == PoolName.KV else f"{space}-{name.value}", fingerprint,
                      int(extra.get("max_blocks", 0)))

    # ---- from kvd ----------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list) -> list[int]:
        """The lengths, in pages, that can be restored. Nothing stays pinned, because SGLang calls this repeatedly while a
        request waits."""
        return self._try(self._restorable, {it.name: it for it in transfers}) or []

    def _restorable(self, transfers: dict) -> list[int]:
        """A length needs all pages of keys and values, and of other parts the last ones: of a window as many as SGLang
        names, of states one."""
        keys, n = _keys(transfers.pop(PoolName.KV)), 0
        while n % CHUNK == 0 and 32 * n < len(keys):
            there = self._present(PoolName.KV, keys[32 * n:32 * (n + CHUNK)])
            n += there.index(False) if False in there else len(there)
            if False in there:
                break
        lengths = list(range(1, n + 1))
        for name, transfer in transfers.items() if n else ():
            there, run = self._present(name, keys[:32 * n]), 0
            reach = [run := run + 1 if it else 0 for it in there]
            lengths = [it for it in lengths if reach[it - 1] >= min(it, len(transfer.keys))]
        return lengths

    def _present(self, name: PoolName, keys: bytes) -> list[bool]:
        pins = self.pools[name].find(keys)
        there = [bool(it) for it in pins]
        let_go(pins)
        return there

    def load(self, rid: str, transfers: list) -> bool:
        """Queue the load of pages. Returns False if pages were evicted since the lookup; SGLang then computes them."""
        loads = []
        for it in transfers:
            pins = self._try(self.pools[it.name].find, _keys(it)) or []
            loads.append(_Load(self.pools[it.name], it.device_indices, pins))
            if len(pins) < len(it.keys) or not all(pins):
                _drop(loads)
                return False
        self._queued.setdefault(rid, []).extend(loads)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        loads = self._queued.pop(rid, None)
        _drop(loads or [])
        return loads is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        index = self.layer_done_counter.update_producer()
        try:
            if self.device.type != "cpu" and self.forward_stream is not None:   # it may still write to slots that were freed
                torch.get_device_module(self.device).current_stream().wait_stream(self.forward_stream)
            for it in itertools.chain.from_iterable(self._queued.values()):
                it.part.read(it.slots, it.pins)
            self._synchronize()
            self.layer_done_counter.complete(index, 0)
        except Exception as e:  # SGLang aborts the requests that need the pages
            _log.exception("pages were not read")
            self._synchronize()
            self.layer_done_counter.fail(index, e)
        finally:
            self._drop_queued()
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    # ---- to kvd ------------------------------------------------------------------------------------------------------

    def offload(self, transfers: list, session_id: str | None = None) -> bool:
        """Store pages before returning. Returns False on failure: SGLang keeps the pages and retries later."""
        if self._try(self._write, transfers) is None:
            return False
        self._done.append(True)
        return True

    def _write(self, transfers: list) -> bool:
        if self.device.type != "cpu":
            for event in self.record_offload_ready():
                event.synchronize()
        for it in transfers:
            self.pools[it.name].write(it.device_indices, _keys(it))
        return True

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

    def stop_sharing(self) -> None:
        """From now on, find and store pages under keys of this process only, because the weights change."""
        salt = int.from_bytes(os.urandom(8), "little") | 1
        for part in self.pools.values():
            part.salt = salt

    def close(self) -> None:
        self.reset()
        for part in self.pools.values():
            part.close()

    def _synchronize(self) -> None:
        for part in self.pools.values():
            part.synchronize()

    def _drop_queued(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)

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


def _drop(loads: list[_Load]) -> None:
    for it in loads:
        let_go(it.pins)
