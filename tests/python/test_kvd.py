# SPDX-License-Identifier: Apache-2.0
"""The Python package over libkvd: blocks are tensors of torch and numpy where they lie, and hold what they should.

    KVD=build/daemon/kvd KVD_LIBRARY=build/client/libkvd.so.0 python tests/python/test_kvd.py [--backend cuda]

With --backend cuda, and a driver or its stand-in in LD_LIBRARY_PATH, what can be tested where torch sees no GPU.
Exit status 77 means skipped: no KVD or KVD_LIBRARY, or neither torch nor numpy here.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client" / "python"))
SKIPPED = 77

try:
    import numpy as np
except ImportError:
    np = None
try:
    import torch
except ImportError:
    torch = None

LAYERS, HEADS, TOKENS, DIM, VOCAB = 2, 3, 16, 8, 50000


@contextmanager
def daemon(backend: str):
    """The path of the socket of a daemon that ends with us."""
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as folder:
        ready, told = os.pipe()
        process = subprocess.Popen([os.environ["KVD"], "--private", folder, "--ready-fd", str(told), "--pool", "8M",
                                    "--set", "daemon.segment=2M", "--backend", backend],
                                   pass_fds=[told], stderr=subprocess.DEVNULL)
        os.close(told)
        try:
            assert os.read(ready, 1) == b"\n", "kvd does not start"
            yield f"{folder}/kvd.sock"
        finally:
            os.close(ready)
            process.terminate()
            assert process.wait(20) == 0, "kvd does not end cleanly"


def geometry(dtype: str = "f32", order: str = "hnd") -> kvd.Geometry:
    return kvd.Geometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, vocab=VOCAB, dtype=dtype, order=order)


def chain(number: int, blocks: int) -> list[int]:
    return [number] + [1 + i % 7 for i in range(blocks * TOKENS - 1)]


def seal(space: kvd.Space, number: int, n: int, value: float = 0) -> list[int]:
    """A chain of n blocks whose numbers are value, value + 1, ...; returns its ids."""
    blocks = space.alloc(n)
    for i, block in enumerate(blocks):
        if space.device[0] == 1:
            address = (ctypes.c_float * (space.geometry.block_bytes // 4)).from_address(block.data)
            address[:] = [value + i] * len(address)
    with kvd.Pin(space) as pin:
        return pin.seal(blocks, chain(number, n))


def fill_pool(space: kvd.Space) -> None:
    """With other chains, until everything that nobody holds is gone."""
    fill_pool.number += 1000
    for i in range(300):
        seal(space, fill_pool.number + i, 4)


fill_pool.number = 1000


def libraries():
    """from_dlpack, and a tensor's address and shape."""
    if torch:
        yield torch.from_dlpack, lambda t: t.data_ptr(), lambda t: tuple(t.shape)
    if np:
        yield np.from_dlpack, lambda t: t.__array_interface__["data"][0], lambda t: t.shape


# ---- blocks ---------------------------------------------------------------------------------------------------------


def test_a_tensor_is_the_block(space):
    ids = seal(space, 1, 2, 5)
    for take, address, shape in libraries():
        with space.lookup(chain(1, 2)) as pin:
            assert pin.tokens == 2 * TOKENS and pin.blocks == ids
            tensor = take(pin.view(ids[1]))
            assert address(tensor) == pin.address(ids[1])
            assert shape(tensor) == (LAYERS, 2, HEADS, TOKENS, DIM)
            assert float(tensor.min()) == float(tensor.max()) == 6


def test_what_is_written_into_a_tensor_is_in_the_block(space):
    (block,) = space.alloc(1)
    values = (ctypes.c_float * (space.geometry.block_bytes // 4)).from_address(block.data)
    if torch:
        tensor = torch.from_dlpack(block)
        tensor[1, 0, 2, 3, 4] = 42
        at = ((1 * 2 + 0) * HEADS + 2) * TOKENS * DIM + 3 * DIM + 4
        assert values[at] == 42
        tensor[:] = 7
        del tensor
        assert set(values) == {7.0}
    if np:
        array = np.from_dlpack(block)
        values[5] = 8
        assert array.reshape(-1)[5] == 8
        del array
    space.free([block])


def test_every_dtype_and_order(space):
    daemon_ = space.daemon
    for dtype in ("f32", "f16", "bf16", "i8"):
        for order in ("hnd", "nhd"):
            with daemon_.space(f"{dtype}-{order}", geometry(dtype, order)) as other:
                (block,) = other.alloc(1)
                planes = (HEADS, TOKENS) if order == "hnd" else (TOKENS, HEADS)
                for take, address, shape in libraries():
                    if np and take is np.from_dlpack and dtype == "bf16":
                        continue    # numpy has none
                    tensor = take(block)
                    assert shape(tensor) == (LAYERS, 2, *planes, DIM)
                    assert dtype.replace("f", "float").replace("i8", "int8") in str(tensor.dtype), tensor.dtype
                    assert address(tensor) == block.data
                    del tensor
                other.free([block])


def test_a_layer_is_indexed_by_blocks(space):
    ids = seal(space, 3, 3, 20)
    for take, _, shape in libraries():
        with space.lookup(chain(3, 3)) as pin:
            layer = take(space.layer(1, values=True))
            assert shape(layer)[1:] == (HEADS, TOKENS, DIM) and shape(layer)[0] > max(ids)
            assert [float(layer[i].min()) for i in pin.blocks] == [20, 21, 22]
            assert [float(layer[i].max()) for i in pin.blocks] == [20, 21, 22]
        del layer


# ---- who holds what ------------------------------------------------------------------------------------------------


def test_a_tensor_outlives_its_pin(space):
    for number, (take, _, _) in enumerate(libraries(), 30):
        ids = seal(space, number, 3, 1)
        pin = space.lookup(chain(number, 3))
        tensor = take(pin.view(ids[1]))
        pin.release()
        fill_pool(space)
        assert space.match(chain(number, 3)) == 2 * TOKENS      # the third block is gone
        assert float(tensor.min()) == float(tensor.max()) == 2
        del tensor
        gc.collect()
        fill_pool(space)
        assert space.match(chain(number, 3)) == 0


def test_tensors_die_in_any_thread(space):
    seal(space, 40, 1)
    take, _, _ = next(libraries())
    with space.lookup(chain(40, 1)) as pin:
        tensors = [take(pin.view(pin.blocks[0])) for _ in range(64)]

    def drop():
        while True:
            try:
                tensors.pop()
            except IndexError:
                return

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert kvd._native.lib.kvd_dlpack_live(space.pointer) == 0


def test_a_capsule_that_nobody_takes(space):
    seal(space, 41, 1)
    with space.lookup(chain(41, 1)) as pin:
        capsule = pin.view(pin.blocks[0]).__dlpack__()
        assert kvd._native.lib.kvd_dlpack_live(space.pointer) == 1
        del capsule
        assert kvd._native.lib.kvd_dlpack_live(space.pointer) == 0


def test_a_space_in_use_is_not_closed(space):
    other = space.daemon.space("closing", geometry())
    (block,) = other.alloc(1)
    capsule = block.__dlpack__()
    expect(errno.EBUSY, other.close)
    expect(errno.EBUSY, space.daemon.close)
    other.free([block])
    expect(errno.EBUSY, other.close)    # the tensor is still there
    del capsule
    other.close()
    other.close()
    expect(errno.EBADF, other.alloc, 1)


def test_what_is_forgotten_is_let_go(space):
    seal(space, 50, 2)
    pin = space.lookup(chain(50, 2))
    blocks = space.alloc(3)
    assert space._held.users() == 4
    del pin, blocks
    gc.collect()
    assert space._held.users() == 0
    fill_pool(space)
    assert space.match(chain(50, 2)) == 0


# ---- arguments -----------------------------------------------------------------------------------------------------


def expect(number, function, *arguments):
    try:
        function(*arguments)
    except kvd.Error as error:
        assert error.errno == number, error
        return
    raise AssertionError(f"no error; {errno.errorcode[number]} was expected")


def test_errors(space):
    seal(space, 60, 1)
    with space.lookup(chain(60, 1)) as pin:
        expect(errno.EINVAL, pin.view(pin.blocks[0] + 1).__dlpack__)
        expect(errno.EINVAL, space.lookup, [1], 9)
        expect(errno.EEXIST, space.daemon.space, space.name, geometry("f16"))
        for arguments in ({"copy": True}, {"dl_device": (2, 5)}):
            try:
                pin.view(pin.blocks[0]).__dlpack__(**arguments)
            except BufferError:
                continue
            raise AssertionError(arguments)
    try:
        space.lookup([-1])
    except ValueError:
        return
    raise AssertionError("a negative token")


def test_tokens_of_every_kind(space):
    seal(space, 70, 2)
    kinds = [chain(70, 2), tuple(chain(70, 2)), (ctypes.c_uint32 * (2 * TOKENS))(*chain(70, 2))]
    if np:
        kinds += [np.array(chain(70, 2), dtype=t) for t in ("uint32", "int32", "int64")]
    if torch:
        kinds += [torch.tensor(chain(70, 2)), torch.tensor(chain(70, 2), dtype=torch.int32)]
    for tokens in kinds:
        assert space.match(tokens) == 2 * TOKENS, type(tokens)


def test_the_same_content_is_sealed_once(space):
    ids = seal(space, 80, 2)
    blocks = space.alloc(2)
    with kvd.Pin(space) as pin:
        assert pin.seal(blocks, chain(80, 2)) == ids == pin.blocks
        assert pin.tokens == 2 * TOKENS
    assert space._held.users() == 0


# ---- on a GPU, without reading what is there -----------------------------------------------------------------------


def test_on_a_gpu(space):
    """Addresses of the device are not read here: that tensors say where they are, and hold and let go."""
    if space.device[0] != 2:
        return
    seal(space, 90, 2)
    with space.lookup(chain(90, 2)) as pin:
        assert pin.view(pin.blocks[0]).__dlpack_device__() == (2, 0)
        capsule = pin.view(pin.blocks[0]).__dlpack__(stream=1)
        pin.wait()
        pin.check()
    fill_pool(space)
    assert space.match(chain(90, 2)) == TOKENS
    del capsule
    while space.settle():
        pass
    fill_pool(space)
    assert space.match(chain(90, 2)) == 0


# ---- the end of the interpreter ------------------------------------------------------------------------------------

AT_EXIT = """
import sys
sys.path.insert(0, {path!r})
import kvd
daemon = kvd.connect({socket!r})
space = daemon.space("exit", kvd.Geometry(layers=2, kv_heads=3, head_dim=8, vocab=50000, dtype="f32"))
pin = kvd.Pin(space)
blocks = space.alloc(2)
pin.seal(blocks, list(range(32)))
fresh = space.alloc(1)
taken = [pin.view(i).__dlpack__() for i in pin.blocks] + [fresh[0].__dlpack__(), space.layer(0).__dlpack__()]
try:
    {library}
    taken += [from_dlpack(pin.view(i)) for i in pin.blocks]
except ImportError:
    pass
sys.modules["somewhere"] = taken   # found only when modules are torn down
if {twice}:
    taken.append(taken)
print("end")
"""


def test_the_interpreter_ends(space):
    for library in ("from numpy import from_dlpack", "from torch import from_dlpack"):
        if "torch" in library and not torch:
            continue
        for twice in (False, True):
            text = AT_EXIT.format(path=str(ROOT / "client" / "python"), socket=space.daemon.path, library=library,
                                  twice=twice)
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)
            assert done.returncode == 0 and done.stdout == "end\n" and not done.stderr, done


ON_A_GPU = {test_on_a_gpu, test_a_capsule_that_nobody_takes, test_a_space_in_use_is_not_closed, test_errors,
            test_what_is_forgotten_is_let_go, test_the_same_content_is_sealed_once}


def run(name: str, test, socket: str) -> bool:
    try:
        with kvd.connect(socket) as connection, connection.space("tensors", geometry()) as space:
            connection.path = socket
            test(space)
            gc.collect()
    except Exception:
        traceback.print_exc()
        print(f"FAIL  {name}")
        return False
    print(f"ok    {name}")
    return True


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", choices=("host", "cuda"), default="host")
    backend = arguments.parse_args().backend
    tests = {name: it for name, it in globals().items() if name.startswith("test_")}
    if backend == "cuda":
        tests = {name: it for name, it in tests.items() if it in ON_A_GPU}
    with daemon(backend) as socket:
        return 0 if all([run(name, test, socket) for name, test in tests.items()]) else 1


if __name__ == "__main__":
    if not os.environ.get("KVD") or not os.environ.get("KVD_LIBRARY") or not (np or torch):
        print("skipped: KVD and KVD_LIBRARY are not set, or neither numpy nor torch is installed")
        sys.exit(SKIPPED)
    import kvd
    sys.exit(main())
