# SPDX-License-Identifier: Apache-2.0
"""The implementation of kvd.engines.lmcache; its documentation is there."""

from __future__ import annotations

import collections
import ctypes
import hashlib
import logging
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import kvd
from kvd.engines._common import weights

TESTED = ("0.5.6",)
STORE, LOOKUP, LOAD = range(3)

_log = logging.getLogger("kvd.engines.lmcache")


def _key(key: Any) -> bytes:
    """Hash all fields with their lengths, so that different keys have different encodings."""
    digest = hashlib.sha256()
    for field in (key.chunk_hash, key.model_name.encode(), str(key.kv_rank).encode(), str(key.object_group_id).encode(),
                  key.cache_salt.encode()):
        digest.update(struct.pack("<Q", len(field)) + field)
    return digest.digest()


def _bits(there: list[bool]) -> Bitmap:
    bits = Bitmap(len(there))
    for i, is_there in enumerate(there):
        if is_there:
            bits.set(i)
    return bits


class _Tasks:
    """Numbered tasks of one kind, with a descriptor that signals their end, and results that are taken once."""

    def __init__(self) -> None:
        self.notifier = create_event_notifier()
        self._lock, self._last, self._done = threading.Lock(), 0, {}

    def begin(self) -> int:
        with self._lock:
            self._last += 1
            return self._last

    def end(self, task: int, result: Any) -> None:
        with self._lock:
            self._done[task] = result
        self.notifier.notify()

    def take(self, task: int) -> Any:
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done


class Adapter(L2AdapterInterface):
    """Level-2 adapter, made by LMCache and called by its controllers' threads."""

    def __init__(self, params: dict, l1_memory_desc: Any = None):
        super().__init__(0)
        if lmcache.__version__ not in TESTED:
            _log.warning("kvd.engines.lmcache was tested with LMCache %s; this is %s", ", ".join(TESTED),
                         lmcache.__version__)
        self._params = params
        which = (weights(params.get("model", ""), params.get("fingerprint"))
                 if params.get("model") or params.get("fingerprint") else ())
        self._fingerprint = kvd.fingerprint("lmcache", lmcache.__version__, which)
        self._daemon = kvd.connect(params.get("socket"))
        self._spaces: dict[int, kvd.Space] = {}             # by size of objects in bytes
        self._pins: collections.OrderedDict[bytes, list[kvd.Pin]] = collections.OrderedDict()
        self._held = 0
        self._lock = threading.Lock()                       # protects the three above
        self._tasks = [_Tasks() for _ in range(3)]
        self._copying = [ThreadPoolExecutor(1, f"kvd-{name}") for name in ("store", "lookup", "load")]
        self._said = ""
        if params.get("object_bytes"):
            self._space(int(params["object_bytes"]))

    # ---- descriptors and results -------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._tasks[STORE].notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._tasks[LOOKUP].notifier.fileno()

    def get_load_event_fd(self) -> int:
        return self._tasks[LOAD].notifier.fileno()

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._tasks[STORE].take_all()

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._tasks[LOOKUP].take(task_id)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._tasks[LOAD].take(task_id)

    def _submit(self, kind: int, work: Any, otherwise: Any, *arguments: Any) -> int:
        """Run work in its thread. The result is its return value, or `otherwise` if there is no daemon or the pool is
        full."""
        task = self._tasks[kind].begin()

        def run() -> None:
            result = otherwise
            try:
                result = work(*arguments)
                self._said = ""
            except kvd.Error as e:
                if str(e) != self._said:
                    _log.warning("not shared: %s", e)
                self._said = str(e)
            except Exception:
                _log.exception("a task of LMCache's failed")
            self._tasks[kind].end(task, result)
        self._copying[kind].submit(run)
        return task

    # ---- store -------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list, objects: list) -> int:
        return self._submit(STORE, self._store, L2StoreResult(False, 0), keys, objects)

    def _store(self, keys: list, objects: list) -> L2StoreResult:
        stored: list[Any] = []
        sizes: list[int] = []
        try:
            for key, it in zip(keys, objects):
                if self._put(self._space(it.get_size()), _key(key), it):
                    stored.append(key)
                    sizes.append(it.get_size())
        finally:
            if stored:
                self._notify_keys_stored(stored, sizes)
        return L2StoreResult(True, sum(sizes))

    def _put(self, space: kvd.Space, name: bytes, it: Any) -> bool:
        with space.lookup_keys(name)[0] as there:
            if there:
                return False
        blocks = space.alloc(1)
        try:
            ctypes.memmove(blocks[0].data, it.data_ptr, it.get_size())
            space.seal_key(name, blocks).release()
        finally:
            space.free(blocks)
        return True

    # ---- look up and lock --------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list, group_layout_descs: dict | None = None) -> int:
        return self._submit(LOOKUP, self._look_up, _bits([False] * len(keys)), keys, group_layout_descs or {})

    def _look_up(self, keys: list, descs: dict) -> Bitmap:
        for desc in descs.values():
            size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes))
            if size:
                self._space(size)
        names = [_key(key) for key in keys]
        there = [False] * len(keys)
        for space in list(self._spaces.values()):
            space.catch_up()
            for i, pin in enumerate(space.lookup_keys(b"".join(names))):
                if pin:
                    there[i] = True
                    self._hold(names[i], pin)
        found = [key for key, is_there in zip(keys, there) if is_there]
        if found:
            self._notify_keys_accessed(found)
        return _bits(there)

    def _hold(self, name: bytes, pin: kvd.Pin) -> None:
        with self._lock:
            self._pins.setdefault(name, []).append(pin)
            self._held += 1
            while self._held > int(self._params.get("max_locks", 4096)):
                self._drop(next(iter(self._pins)))

    def _drop(self, name: bytes) -> None:
        pins = self._pins[name]
        pins.pop(0).release()
        self._held -= 1
        if not pins:
            del self._pins[name]

    def submit_unlock(self, keys: list) -> None:
        with self._lock:
            for name in map(_key, keys):
                if name in self._pins:
                    self._drop(name)

    # ---- load --------------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list, objects: list) -> int:
        return self._submit(LOAD, self._load, _bits([False] * len(keys)), keys, objects)

    def _load(self, keys: list, objects: list) -> Bitmap:
        return _bits([self._get(self._space(it.get_size()), _key(key), it) for key, it in zip(keys, objects)])

    def _get(self, space: kvd.Space, name: bytes, it: Any) -> bool:
        space.catch_up()
        with space.lookup_keys(name)[0] as pin:
            if pin:
                ctypes.memmove(it.data_ptr, pin.address(pin.blocks[0]), it.get_size())
            return bool(pin)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def _space(self, size: int) -> kvd.Space:
        with self._lock:
            if size not in self._spaces:
                geometry = kvd.Geometry.opaque(-(-size // 64) * 64, f"lmcache-{size}", block_tokens=8,
                                               fingerprint=self._fingerprint)
                name = f"{self._params.get('space', 'lmcache')}-{self._fingerprint[0]:016x}-{size}"
                space = self._daemon.space(name, geometry, max_blocks=int(self._params.get("max_blocks", 0)))
                if space.device != (1, 0):
                    raise ValueError(f"space {name} is on a GPU: kvd.engines.lmcache copies to host memory")
                self._spaces[size] = space
            return self._spaces[size]

    def report_status(self) -> dict:
        return {"is_healthy": not self._said, "type": "kvd", "trouble": self._said, "locks": self._held,
                "object_bytes": sorted(self._spaces)}

    def close(self) -> None:
        for threads in self._copying:
            threads.shutdown()
        with self._lock:
            while self._pins:
                self._drop(next(iter(self._pins)))
        self._daemon.close()
        for tasks in self._tasks:
            tasks.notifier.close()
