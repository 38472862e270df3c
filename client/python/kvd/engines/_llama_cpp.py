# SPDX-License-Identifier: Apache-2.0
"""The implementation of kvd.engines.llama_cpp; its documentation is there."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import re
import struct
from ctypes import c_bool, c_int, c_int8, c_int32, c_size_t, c_uint8, c_void_p
from pathlib import Path

import numpy as np

import kvd

_log = logging.getLogger("kvd.engines.llama_cpp")

TOKENS = 16                     # tokens per block
PIECE = 256 << 10               # bytes per block for whole states


# ---- the needed part of llama.h --------------------------------------------------------------------------------------


class _Batch(ctypes.Structure):
    _fields_ = [("n_tokens", c_int32), ("token", c_void_p), ("embd", c_void_p), ("pos", c_void_p),
                ("n_seq_id", c_void_p), ("seq_id", c_void_p), ("logits", c_void_p)]


_FUNCTIONS = {
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
    "llama_memory_seq_pos_max": (c_int32, c_void_p, c_int32),
    "llama_state_seq_get_size": (c_size_t, c_void_p, c_int32),
    "llama_state_seq_get_data": (c_size_t, c_void_p, c_void_p, c_size_t, c_int32),
    "llama_state_seq_set_data": (c_size_t, c_void_p, c_void_p, c_size_t, c_int32),
    "llama_decode": (c_int32, c_void_p, _Batch),
}


class Sequence:
    """A sequence of a llama_context, given by a library that exports llama.h, the address of the context, and the
    number of the sequence."""

    def __init__(self, library: ctypes.CDLL, context: int, number: int = 0):
        self._context, self._number = c_void_p(context), number
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = library[name]    # a new function object, since other users declare their own types
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("llama_"), function)
        self._memory = c_void_p(self.get_memory(self._context))

    def empty(self) -> bool:
        return self.memory_seq_pos_max(self._memory, self._number) < 0

    def clear(self) -> None:
        self.memory_seq_rm(self._memory, self._number, -1, -1)

    def save(self) -> np.ndarray:
        """Return the state as bytes."""
        state = np.empty(self.state_seq_get_size(self._context, self._number), np.uint8)
        n = self.state_seq_get_data(self._context, state.ctypes.data, state.size, self._number)
        if n != state.size:
            raise RuntimeError(f"llama.cpp wrote {n} bytes of a state of {state.size}")
        return state

    def load(self, state: np.ndarray) -> bool:
        """Replace the sequence's state. On failure returns False, and the sequence is empty."""
        if self.state_seq_set_data(self._context, state.ctypes.data, state.size, self._number) == state.size:
            return True
        self.clear()
        return False

    def probe(self) -> np.ndarray:
        """Return the state after two tokens that every vocabulary has. The sequence must be empty, and is empty
        afterwards."""
        if not self.empty():
            raise ValueError("the sequence is not empty: make the Share before anything is decoded")
        tokens, where = (c_int32 * 2)(0, 1), (c_int32 * 2)(0, 1)
        ones, numbers, wanted = (c_int32 * 2)(1, 1), (c_int32 * 1)(self._number), (c_int8 * 2)(0, 1)
        lists = (c_void_p * 2)(*[ctypes.addressof(numbers)] * 2)
        batch = _Batch(2, ctypes.addressof(tokens), None, *map(ctypes.addressof, (where, ones, lists, wanted)))
        if self.decode(self._context, batch) != 0:
            raise ValueError("llama.cpp does not decode tokens in this context")
        try:
            return self.save()
        finally:
            self.clear()


# ---- format of a state -----------------------------------------------------------------------------------------------


class UnknownForm(ValueError):
    """The format of a state is unknown; the message says why."""


class Form:
    """Format of a sequence's state in b11549: a head, a cell for each token, then K of all layers, then V, with one row
    per token."""

    HEAD = struct.pack("<III", 0xaf143cd8, 0, 1)
    CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])

    def __init__(self, probe: np.ndarray):
        self.planes: list[tuple[int, int]] = []     # ggml type, bytes per row
        self.number = 0                             # of the sequence that wrote the state; not used by readers
        try:
            rows = self.take(probe)
            again, to = self.make(len(rows[0]))
        except (struct.error, ValueError, IndexError) as e:
            raise UnknownForm(str(e)) from None
        for i, row in enumerate(rows):
            to[i][:] = row
        if not np.array_equal(again, probe):
            raise UnknownForm("a state that was split and assembled again differs")

    def take(self, state: np.ndarray) -> list[np.ndarray]:
        """Return the planes of a state, [tokens, bytes] each, oldest token first."""
        if state[:12].tobytes() != self.HEAD:
            raise UnknownForm(f"it begins with {state[:12].tobytes().hex()}")
        n = int(state[12:16].view("<u4")[0])
        cells = np.frombuffer(state, self.CELL, n, 16)
        order = self._order(cells)
        transposed, layers, zero = struct.unpack_from("<IIQ", state, at := 16 + cells.nbytes)
        if transposed:
            raise UnknownForm("values are transposed: is flash attention off?")
        if zero:
            raise UnknownForm("layers of another kind")
        kinds, planes, at = [], [], at + 16
        for _ in range(2 * layers):
            kinds.append(struct.unpack_from("<iQ", state, at))
            end = at + 12 + kinds[-1][1] * n
            planes.append(state[at + 12:end].reshape(n, -1))
            at = end
        if at != len(state) or self.planes not in ([], kinds):
            raise UnknownForm("planes of another kind")
        self.planes = kinds
        return planes if order is None else [plane[order] for plane in planes]

    def _order(self, cells: np.ndarray):
        """Return the order of cells by position, or None if they are in order. They are in any order once a context was
        used for several prompts."""
        n = len(cells)
        if not n or (cells["sequences"] != 1).any():
            raise UnknownForm("no cells, or cells of another kind")
        self.number = int(cells["sequence"][0])
        order = np.argsort(cells["position"])
        if (cells["position"][order] != np.arange(n)).any():
            raise UnknownForm("positions do not go from 0 to the end")
        return None if (order == np.arange(n)).all() else order

    def make(self, n: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Make a state of n tokens, and return it with its planes, to be filled."""
        cells = np.empty(n, self.CELL)
        cells["position"], cells["sequences"], cells["sequence"] = np.arange(n), 1, self.number
        head = self.HEAD + struct.pack("<I", n) + cells.tobytes() + struct.pack("<IIQ", 0, len(self.planes) // 2, 0)
        state = np.empty(len(head) + sum(12 + n * row for _, row in self.planes), np.uint8)
        state[:len(head)] = np.frombuffer(head, np.uint8)
        planes, at = [], len(head)
        for kind, row in self.planes:
            struct.pack_into("<iQ", state, at, kind, row)
            planes.append(state[at + 12:at + 12 + n * row].reshape(n, row))
            at += 12 + n * row
        return state, planes


# ---- states in the pool ----------------------------------------------------------------------------------------------


def _pool(space: kvd.Space) -> np.ndarray:
    """Return all blocks as [blocks, bytes]."""
    return np.from_dlpack(space.memory()).view(np.uint8)


class _Blocks:
    """Stores states in blocks of tokens: each block has 16 rows of each plane."""

    def __init__(self, daemon: kvd.Daemon, name: str, fingerprint, form: Form, max_blocks: int):
        self.form = form
        widths = [TOKENS * row for _, row in form.planes]
        self.at = np.concatenate([[0], np.cumsum(widths)]).tolist()
        self.space = daemon.space(name, kvd.Geometry.opaque(
            -(-self.at[-1] // 64) * 64, "llama.cpp-b11549", block_tokens=TOKENS, fingerprint=fingerprint),
            max_blocks=max_blocks, fixed=True)
        self.pool = _pool(self.space)

    def find(self, tokens: np.ndarray, more_than: int, salt: int) -> tuple[int, np.ndarray | None]:
        with self.space.find(tokens, salt=salt) as pin:
            if pin.tokens <= more_than:
                return 0, None
            state, planes = self.form.make(pin.tokens)
            for i, plane in enumerate(planes):
                plane.reshape(len(pin.blocks), -1)[:] = self.pool[pin.blocks, self.at[i]:self.at[i + 1]]
            return pin.tokens, state

    def put(self, tokens: np.ndarray, save, salt: int) -> int:
        tokens = tokens[:len(tokens) // TOKENS * TOKENS]
        with self.space.lookup(tokens, salt=salt) if len(tokens) else kvd.Pin(self.space, salt=salt) as pin:
            first = pin.tokens
            if first == len(tokens):
                return 0
            planes = self.form.take(save())
            blocks = self.space.alloc((len(tokens) - first) // TOKENS)
            try:
                ids = [block.id for block in blocks]
                for i, plane in enumerate(planes):
                    self.pool[ids, self.at[i]:self.at[i + 1]] = plane[first:len(tokens)].reshape(len(ids), -1)
                pin.seal(blocks, tokens[first:])
            finally:
                self.space.free(blocks)
            return len(tokens) - first


class _Whole:
    """Stores whole states by the digest of their tokens: one block with the length and the beginning, and an object
    with the rest."""

    def __init__(self, daemon: kvd.Daemon, name: str, fingerprint, max_blocks: int):
        self.space = daemon.space(name + ".whole", kvd.Geometry.opaque(
            PIECE, "llama.cpp-state", block_tokens=8, fingerprint=fingerprint), max_blocks=max_blocks, fixed=True)
        self.pool = _pool(self.space)

    @staticmethod
    def keys(tokens: np.ndarray, salt: int, shortest: int) -> list[bytes]:
        """Return the keys of all prefixes of at least `shortest` tokens, shortest first."""
        digest = hashlib.sha256(struct.pack("<Q", salt) + tokens[:shortest].tobytes())
        keys, raw = [digest.digest()], tokens.tobytes()
        for at in range(4 * shortest, len(raw), 4):
            digest.update(raw[at:at + 4])
            keys.append(digest.digest())
        return keys

    @staticmethod
    def rest(key: bytes) -> bytes:
        return hashlib.sha256(key + b"rest").digest()

    def find(self, tokens: np.ndarray, more_than: int, salt: int) -> tuple[int, np.ndarray | None]:
        keys = self.keys(tokens, salt, more_than + 1)
        self.space.catch_up()
        pins = self.space.lookup_keys(keys)
        try:
            for i in reversed(range(len(pins))):
                if pins[i] and (state := self._read(keys[i], pins[i])) is not None:
                    return more_than + 1 + i, state
            return 0, None
        finally:
            for pin in pins:
                pin.release()

    def _read(self, key: bytes, pin: kvd.Pin) -> np.ndarray | None:
        first = self.pool[pin.blocks[0]]
        size = 8 + int(first[:8].view("<u8")[0])
        n = -(-size // PIECE) - 1
        if not n:
            return first[8:size].copy()
        if n >= len(self.pool):         # not a valid state
            return None
        with self.space.lookup_keys([self.rest(key)], n)[0] as others:
            if not others:
                return None
            return np.concatenate([first, self.pool[others.blocks].reshape(-1)])[8:size]

    def put(self, tokens: np.ndarray, save, salt: int) -> int:
        key = self.keys(tokens, salt, len(tokens))[0]
        with self.space.lookup_keys([key])[0] as there:
            if there:
                return 0
        state = save()
        pieces = np.zeros((-(-(8 + state.size) // PIECE), PIECE), np.uint8)
        flat = pieces.reshape(-1)
        flat[:8], flat[8:8 + state.size] = np.frombuffer(struct.pack("<Q", state.size), np.uint8), state
        if len(pieces) > 1:
            self._seal(self.rest(key), pieces[1:])
        self._seal(key, pieces[:1])     # last, so that a reader who finds it finds the rest
        return len(tokens)

    def _seal(self, key: bytes, pieces: np.ndarray) -> None:
        blocks = self.space.alloc(len(pieces))
        try:
            self.pool[[block.id for block in blocks]] = pieces
            self.space.seal_key(key, blocks).release()
        finally:
            self.space.free(blocks)


# ---- public classes --------------------------------------------------------------------------------------------------


def _parts(model: str) -> list[Path]:
    """Return the files of a model: one, or all parts of a split model."""
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", Path(model).name)
    if not split:
        return [Path(model)]
    name, n = split.groups()
    return [Path(model).with_name(f"{name}-{i:05}-of-{n}.gguf") for i in range(1, int(n) + 1)]


def _sequence_of(llm) -> Sequence:
    """Return the only sequence of a Llama of llama-cpp-python."""
    from llama_cpp import llama_cpp as api
    return Sequence(api._lib, llm.ctx)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two prompts."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class Share:
    """Shares a sequence's state with other processes: restore() before a prompt is decoded, store() afterwards.

    engine is a Llama of llama-cpp-python, or a Sequence. model is the file that it was loaded from (not needed for a
    Llama). space is the name of the space (default: one per model, made from the fingerprint). whole: never split
    states. salt separates states that must not be shared, as with adapters that are set later. Not thread-safe, like
    its context.
    """

    def __init__(self, engine, daemon: kvd.Daemon | None = None, *, model: str | None = None, space: str | None = None,
                 salt: int = 0, max_blocks: int = 0, whole: bool = False):
        self._llama = None if isinstance(engine, Sequence) else engine
        self._sequence = engine if self._llama is None else _sequence_of(engine)
        self._salt, self._said = salt, ""
        files = self._files(model)
        probe = self._sequence.probe()
        form = None if whole else self._form(probe)
        fingerprint = kvd.fingerprint("llama.cpp", probe.tobytes(), *files)
        name = space or f"llama.cpp-{fingerprint[0]:016x}"
        daemon = daemon or kvd.connect()
        self._store = (_Blocks(daemon, name, fingerprint, form, max_blocks) if form
                       else _Whole(daemon, name, fingerprint, max_blocks))
        self.space = self._store.space

    @property
    def whole(self) -> bool:
        """Whether states are shared as a whole: a prompt then finds a state only if it begins with all its tokens."""
        return isinstance(self._store, _Whole)

    def restore(self, tokens, have: int = 0) -> int:
        """Load the longest stored prefix of tokens, without the last of them, into the sequence if that is longer than
        its present prefix (have; not needed for a Llama). Returns the number of tokens in the sequence: decode the
        others."""
        tokens = np.ascontiguousarray(tokens, np.uint32)
        if self._llama is not None:
            have = _common(self._held(), tokens[:-1])
        if len(tokens) - 1 <= have:
            return have
        found, state = self._try(self._store.find, tokens[:-1], have, self._salt) or (0, None)
        if not found:
            return have
        found = found if self._sequence.load(state) else 0
        if self._llama is not None:
            self._llama.input_ids[:found] = tokens[:found]
            self._llama.n_tokens, self._llama._requires_eval = found, True
        return found

    def store(self, tokens=None) -> int:
        """Publish the sequence's state. tokens are those that it holds, from position 0 on (not needed for a Llama).
        Returns for how many of them keys and values were copied; those already in the pool are not copied."""
        tokens = self._held() if tokens is None and self._llama is not None else np.ascontiguousarray(tokens, np.uint32)
        return self._try(self._store.put, tokens, self._sequence.save, self._salt) or 0 if len(tokens) else 0

    def close(self) -> None:
        """Release the pool."""
        self._store.pool = None
        self.space.close()

    def _held(self) -> np.ndarray:
        return self._llama.input_ids[:self._llama.n_tokens].astype(np.uint32)

    def _files(self, model: str | None) -> list[Path]:
        if self._llama is not None:
            lora = getattr(self._llama, "lora_path", None)
            return _parts(model or self._llama.model_path) + ([Path(lora)] if lora else [])
        if model is None:
            raise ValueError("model: which file was it loaded from?")
        return _parts(model)

    def _form(self, probe: np.ndarray) -> Form | None:
        try:
            return Form(probe)
        except UnknownForm as e:
            _log.warning("llama.cpp's state has an unknown format (%s): states are shared as a whole", e)
            return None

    def _try(self, what, *arguments):
        """Call what(*arguments). Returns None, with a warning, if there is no daemon or the pool is full, because a
        failing cache must not fail the request."""
        try:
            result = what(*arguments)
            self._said = ""
            return result
        except (kvd.Error, UnknownForm) as e:
            if str(e) != self._said:
                _log.warning("not shared: %s", e)
            self._said = str(e)
            return None


class Cache:
    """Cache for Llama.set_cache: completions reuse what any process has computed of their prompt, and publish their
    own.

    For set_cache, Llama saves its whole context after each completion, whether that is used or not. Calling restore()
    and store() of a Share avoids this.
    """

    def __init__(self, llm, daemon: kvd.Daemon | None = None, **options):
        self.share = Share(llm, daemon, **options)

    def __getitem__(self, tokens):
        self.share.restore(tokens)
        raise KeyError("nothing to load: it is in the context already")

    def __setitem__(self, tokens, state) -> None:
        self.share.store()
