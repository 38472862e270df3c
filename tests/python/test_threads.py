# SPDX-License-Identifier: Apache-2.0
"""Nothing is unmapped or closed during a call, neither by close() in another thread nor when Python ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from unittest import mock

from common import TOKENS, chain, child, geometry, kvd, main, seal, until

MODULES = [getattr(kvd, name) for name in ("_attend", "_block", "_daemon", "_lease", "_pin", "_sequence", "_space")]


class Closing:
    """libkvd, but another thread closes everything as soon as a call has begun."""

    def __init__(self, space: kvd.Space, *others: object):
        self.space, self.others, self.called = space, others, []

    def __getattr__(self, name: str):
        function = getattr(kvd._native.lib, name)

        def call(*arguments):
            self.called.append(name)
            for it in (*self.others, self.space, self.space.daemon):
                it.close()
            gc.collect()
            handle = arguments[0]
            assert handle.value if hasattr(handle, "value") else handle, f"{name} was called with a closed handle"
            return function(*arguments)
        return call


def closed_within(path: str, what, *others: str) -> None:
    """Calls what(space, ...) with a new space, whose library is Closing."""
    space = kvd.connect(path).space("tensors", geometry())
    made = [getattr(space, name)(*arguments) for name, *arguments in others]
    with ExitStack() as stack:
        closing = Closing(space, *made)
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "lib", closing))
        try:
            what(space, *made)
        except kvd.Error:       # a method of several calls, or one with nothing to do
            pass
    assert closing.called, what


TOKENS_OF = chain(1, 2)
CALLS = [
    lambda it: it.lookup(TOKENS_OF),
    lambda it: it.match(TOKENS_OF),
    lambda it: it.find(TOKENS_OF),
    lambda it: it.fetch(TOKENS_OF),
    lambda it: it.catch_up(),
    lambda it: it.alloc(3),
    lambda it: it.reserve(0),
    lambda it: it.available(),
    lambda it: it.flush(),
    lambda it: it.settle(),
    lambda it: it.memory(),
    lambda it: it.memory().__dlpack__(),
    lambda it: it.layer(0).__dlpack__(),
    lambda it: it.setting("keydiff"),
    lambda it: it.set("keydiff", 0),
    lambda it: it.counters(),
    lambda it: it.prefix_depth(1, 2, 3),
    lambda it: it.sequence(4),
    lambda it: it.daemon.space("other", geometry()),
]
SEQUENCE_CALLS = [len, lambda it: it.entries(), lambda it: it.sync(), lambda it: it.wait(0), lambda it: it.stats(),
                  lambda it: it.use(0, 1, 1), lambda it: it.labels(0), lambda it: it.step(0, 0)]


def test_close_in_another_thread_waits_for_the_calls_in_progress(space):
    seal(space, 1, 2)
    for what in CALLS:
        closed_within(space.daemon.path, what)
    for what in SEQUENCE_CALLS:
        closed_within(space.daemon.path, lambda _space, sequence, what=what: what(sequence), ("sequence", 4))


def test_a_daemon_closed_while_a_space_is_opened(space):
    """Neither close() nor space() raises anything but kvd.Closed, and no space stays open."""
    for _ in range(5):
        connection, opened, some = kvd.connect(space.daemon.path), [], threading.Event()

        def open_some(connection=connection, opened=opened, some=some):
            try:
                while True:
                    opened.append(connection.space("tensors", geometry()))
                    some.set()
            except kvd.Closed:
                pass
        thread = threading.Thread(target=open_some)
        thread.start()
        some.wait()
        connection.close()
        thread.join()
        assert all(it._handle is None for it in opened)


def test_threads_use_what_others_close(space):
    """Real timing: the only exception is kvd.Closed."""
    seal(space, 3, 2)
    wrong = []

    def use(other: kvd.Space, what) -> None:
        try:
            while True:
                what(other)
        except kvd.Closed:
            pass
        except BaseException as error:
            wrong.append(error)

    for _ in range(3):
        connection = kvd.connect(space.daemon.path)
        other = connection.space("tensors", geometry())
        threads = [threading.Thread(target=use, args=(other, what)) for what in CALLS[:8]]
        for thread in threads:
            thread.start()
        connection.close()
        for thread in threads:
            thread.join()
    assert not wrong, wrong


def test_a_fetch_closed_while_it_is_waited_for(space):
    """The descriptor in poll() is still the fetch's own."""
    read, write = os.pipe()
    handle = kvd._handle.Handle(read, os.close)
    fetch = kvd.Fetch.__new__(kvd.Fetch)
    fetch.tokens, fetch._fd = 0, handle
    del handle
    poll = mock.Mock()

    def close_first(*_arguments):
        fetch.close()
        gc.collect()
        os.fstat(poll.register.call_args.args[0])
        return []
    poll.poll = close_first
    with mock.patch.object(kvd._fetch.select, "poll", lambda: poll):
        assert not fetch.wait()
    try:
        os.fstat(read)
        raise AssertionError("the descriptor stays open")
    except OSError:
        os.close(write)


# ---- the end of Python -----------------------------------------------------------------------------------------------

BEGIN = """
import sys, threading, kvd
daemon = kvd.connect(sys.argv[1])
space = daemon.space("tensors", kvd.Geometry(layers=2, kv_heads=3, head_dim=8, vocab=50000, dtype="f32"))
tokens = list(map(int, sys.argv[3].split(",")))
begun = threading.Event()
def loop(what):
    while True:
        what()
        begun.set()
"""
AT_EXIT = BEGIN + """
def fill():
    blocks = space.alloc(2)
    blocks[0].memoryview()[:] = bytes(space.block_bytes)
    space.free(blocks)
sequence = space.sequence(8)
pin, out = space.lookup(tokens), bytearray(2 * space.block_bytes)
what = {"lookup": lambda: space.lookup(tokens), "match": lambda: space.match(tokens), "fill": fill,
        "read": lambda: space.read(pin, out), "sequence": sequence.sync, "flush": space.flush,
        "find": lambda: space.find(tokens), "capsule": lambda: pin.view(pin.blocks[0]).__dlpack__()}[sys.argv[2]]
for _ in range(3):
    threading.Thread(target=loop, args=(what,), daemon=True).start()
begun.wait()
"""


def test_python_ends_while_threads_are_in_calls(space):
    seal(space, 1, 2)
    for what in ("lookup", "match", "fill", "read", "sequence", "flush", "find", "capsule"):
        for _ in range(2):
            done = child(AT_EXIT, space.daemon.path, what, ",".join(map(str, TOKENS_OF)))
            assert done.returncode == 0 and not done.stderr, (what, done)


AFTER_FORK = BEGIN + """
import os
for what in (lambda: space.lookup(tokens), lambda: space.free(space.alloc(8)), lambda: space.find(tokens)):
    threading.Thread(target=loop, args=(what,), daemon=True).start()
begun.wait()
for _ in range(4):
    pin, (block,) = space.lookup(tokens), space.alloc(1)
    pid = os.fork()
    if pid == 0:
        for what in (space.match, space.find, space.lookup):
            try:
                what(tokens)
                os._exit(3)
            except kvd.Forked:
                pass
        for what in (lambda: space.read(pin, bytearray(2 * space.block_bytes)), block.memoryview,
                     lambda: space.write([block], bytes(space.block_bytes)), lambda: pin.memoryview(pin.blocks[0])):
            try:
                what()
                os._exit(4)
            except kvd.Forked:
                pass
        del pin, block
        daemon.close()
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0
print("end")
"""


def test_a_child_forked_among_calls(space):
    """It does not touch its parent's memory, waits for no lock that a parent's thread held, and ends."""
    seal(space, 1, 2)
    done = child(AFTER_FORK, space.daemon.path, "", ",".join(map(str, TOKENS_OF)))
    assert done.returncode == 0 and done.stdout == "end\n", done


IN_ANOTHER = """
import sys
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
text = '''
import kvd
space = kvd.connect(%r).space("tensors", kvd.Geometry(layers=2, kv_heads=3, head_dim=8, vocab=50000, dtype="f32"))
pin, sequence, lease = space.lookup(%r), space.sequence(4), space.alloc(1)
''' % (sys.argv[1], list(map(int, sys.argv[2].split(","))))
it = interpreters.create()
interpreters.run_string(it, text)
print("made", flush=True)
sys.stdin.readline()
interpreters.destroy(it)
print("ended", flush=True)
sys.stdin.readline()
"""


def sockets_of(pid: int) -> int:
    return sum("socket" in os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))


def test_a_sub_interpreter_closes_what_it_opened(space):
    """Its process continues, but its connection, pins and blocks are released."""
    seal(space, 1, 2)
    path = os.pathsep.join(sys.path)
    with subprocess.Popen([sys.executable, "-c", IN_ANOTHER, space.daemon.path, ",".join(map(str, TOKENS_OF))],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stdout.readline() == "made\n"
        before = sockets_of(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ended\n"
        assert before == 1 and sockets_of(process.pid) == 0, before
        process.stdin.close()
        assert process.wait() == 0
    until(lambda: space.match(TOKENS_OF) == 2 * TOKENS)


if __name__ == "__main__":
    sys.exit(main(globals()))
