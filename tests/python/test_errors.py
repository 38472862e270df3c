# SPDX-License-Identifier: Apache-2.0
"""Errors say what happened: by their text, by their class, and as the builtin exception that callers catch."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import sys
import tempfile
from pathlib import Path

from common import VOCAB, child, geometry, kvd, main, raises


def test_a_daemon_that_is_not_there(space):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "no.sock")
        for as_what in (str, Path, os.fsencode):
            with raises(FileNotFoundError, "no.sock"):
                kvd.connect(as_what(path))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
        with raises(ConnectionRefusedError):
            kvd.connect(path)
        with raises(kvd.NotKvd):
            kvd.connect(folder)
        with raises(kvd.DaemonNotFound):
            kvd.connect(path.with_name("none"))
    assert issubclass(kvd.DaemonNotFound, kvd.Error) and issubclass(kvd.Error, OSError)


def test_a_missing_object_is_no_missing_daemon(space):
    """ENOENT in a reply means that the named object does not exist; the daemon does, since it has just answered."""
    refusal = kvd.Error(errno.ENOENT, "there is no such sequence")
    assert type(refusal) is kvd.NotFound and not isinstance(refusal, kvd.DaemonNotFound)
    assert isinstance(pickle.loads(pickle.dumps(kvd.DaemonNotFound(errno.ENOENT, "no kvd"))), kvd.DaemonNotFound)


def test_a_path_like_is_a_path(space):
    with kvd.connect(Path(space.daemon.path)) as connection:
        assert connection.path == space.daemon.path and space.daemon.path in repr(connection)
    assert "closed" in repr(connection)


def test_another_geometry(space):
    for other, field in ((geometry("f16"), "dtype"), (geometry(fingerprint=(1, 2)), "fingerprint")):
        with raises(kvd.Mismatch, field):
            space.daemon.space(space.name, other)
    with raises(FileExistsError, "kind"):
        space.daemon.space(space.name, geometry(), kind="bidirectional")


def test_impossible_arguments(space):
    with raises(kvd.Invalid, "group"):
        space.lookup([1], 9)
    with raises(ValueError, "dtype must be one of f32, f16, bf16, i8, q8, q4, e4m3, e5m2, not 'f64'"):
        geometry("f64")
    with raises(ValueError, "kind must be one of causal, bidirectional"):
        space.daemon.space("other", geometry(), kind="acausal")
    with raises(ValueError, "layers must be a number from 0"):
        kvd.Geometry(layers=-1, kv_heads=1, head_dim=1, vocab=1).block_bytes
    with raises(kvd.Invalid, "invalid geometry"):
        kvd.Geometry.opaque(100, "odd").block_bytes
    with raises(kvd.Invalid):
        space.set("keydiff.budgte", 1)
    with raises(kvd.Invalid, "vocabulary"), kvd.Pin(space) as pin:
        pin.seal(space.alloc(1), [VOCAB] * 16)


def test_a_full_pool(space):
    """One client may be filling half of it. A request for more gets nothing, and freed blocks are available again."""
    kept = []
    with raises(kvd.QuotaExceeded, "client_quota"):
        while True:
            kept += space.alloc(16)
    n = len(kept)
    with raises(kvd.QuotaExceeded):
        space.alloc(32)
    space.free(kept)
    assert len(space.alloc(n)) == n


def test_one_class_for_each_errno(space):
    for number, kind in kvd._errors._CLASSES.items():
        error = kvd.Error(number, "words")
        assert type(error) is kind and error.errno == number and error.strerror == "words"
        assert getattr(kvd, kind.__name__) is kind and kind.__module__ == "kvd" and kind.__doc__
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and again.args == error.args
        assert isinstance(error, type(OSError(number, ""))) or number == errno.EPIPE, number
    assert type(kvd.Error(errno.ENOSPC, "words")) is kvd.Error
    assert f"{kvd.PoolFull}" == "<class 'kvd.PoolFull'>"


def test_no_library(space):
    done = child("import kvd", KVD_LIBRARY="/nowhere/libkvd.so.0")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: kvd needs its library") and "KVD_LIBRARY" in last, done
    done = child("import kvd", KVD_LIBRARY="libc.so.6")
    assert "ImportError: libc.so.6 has no kvd_version: it is older than this package" in done.stderr, done


if __name__ == "__main__":
    sys.exit(main(globals()))
