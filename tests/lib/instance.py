# SPDX-License-Identifier: Apache-2.0
"""A kvd of a test's own, for tests in Python. instance.h is the same for tests in C."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

PATIENCE = 60   # seconds: anything that takes longer hangs, even on a busy machine


class Failed(RuntimeError):
    """A program did not do what it was asked to."""


def start(folder: str, *options: str, kvd: str | Path | None = None) -> subprocess.Popen:
    """Starts the daemon $KVD, or `kvd`, with its log in `folder`. It serves when this returns. Its pages are small ones
    unless its configuration says: a test beside it may reserve huge pages for a while."""
    small = [] if "--config" in options else ["--set", "daemon.pages=small"]
    ready, told = os.pipe()
    log = Path(folder, "log")
    with log.open("ab") as file:
        process = subprocess.Popen([str(kvd or os.environ["KVD"]), "--private", folder, "--ready-fd", str(told),
                                    *small, *options], pass_fds=[told], stderr=file)
    os.close(told)
    with os.fdopen(ready, "rb", buffering=0) as pipe:
        if pipe.read(1) != b"\n":
            raise Failed(f"kvd does not start: {log.read_text()}")
    return process


class Instance:
    """A daemon for the duration of a `with`. kvctl() returns text, stat() the parsed JSON of a verb."""

    def __init__(self, *options: str, kvd: str | Path | None = None, kvctl: str | Path | None = None) -> None:
        self.options, self.kvd, self.program = options, kvd, kvctl
        self.directory = tempfile.TemporaryDirectory(prefix="kvd-test-")
        self.folder = self.directory.name
        self.socket = f"{self.folder}/kvd.sock"
        self.start()

    def start(self) -> None:
        self.process = start(self.folder, *self.options, kvd=self.kvd)

    def stop(self) -> None:
        self.process.terminate()
        status = self.process.wait(PATIENCE)
        assert status == 0, f"kvd ended with status {status}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        end = time.monotonic() + PATIENCE
        while self._is_connected():
            assert time.monotonic() < end, "the connections of a killed kvd do not end"
            time.sleep(0.001)

    def _is_connected(self) -> bool:
        """The kernel ends a dead kvd's connections when it has torn down its io_uring. Until then, a client may send a request
        of which nobody knows what became."""
        with open("/proc/net/unix") as sockets:
            return any(line.endswith(f" {self.socket}\n") for line in sockets)

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            self.directory.cleanup()

    def kvctl(self, *arguments: str, timeout: float = PATIENCE) -> str:
        done = subprocess.run([str(self.program or os.environ["KVCTL"]), "--socket", self.socket, *arguments],
                              capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise Failed(f"kvctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def stat(self, *arguments: str, timeout: float = PATIENCE):
        return json.loads(self.kvctl("--json", *arguments, timeout=timeout))

    def check(self) -> None:
        """Checks every invariant of every space."""
        self.kvctl("check")
