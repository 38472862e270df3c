# SPDX-License-Identifier: Apache-2.0
"""What the tests of engines share: a daemon of their own, documents, programs of their own in other processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = os.environ.get("KVD_MODEL", str(ROOT / "tools/kvlm/model"))


class Daemon:
    """A kvd in a folder of its own. `check` walks every invariant; `stat` is kvctl's JSON of a verb."""

    def __init__(self, folder: str, *arguments: str):
        self.folder, self.arguments = folder, arguments
        self.socket = f"{folder}/kvd.sock"
        self.start()

    def start(self) -> None:
        ready, told = os.pipe()
        self.process = subprocess.Popen([os.environ["KVD"], "--private", self.folder, "--ready-fd", str(told),
                                         *self.arguments], pass_fds=[told], stderr=subprocess.DEVNULL)
        os.close(told)
        try:
            assert os.read(ready, 1) == b"\n", "kvd does not start"
        finally:
            os.close(ready)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kvctl(self, *arguments: str) -> str:
        done = subprocess.run([os.environ["KVCTL"], "--socket", self.socket, *arguments], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0, f"kvctl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def stat(self, *arguments: str):
        return json.loads(self.kvctl("--json", *arguments))

    def check(self) -> None:
        self.kvctl("check")


@contextmanager
def daemon(*arguments: str):
    with tempfile.TemporaryDirectory(prefix="kvd-engines-") as folder:
        it = Daemon(folder, *(arguments or ("--pool", "256M")))
        try:
            yield it
        finally:
            it.process.terminate()
            it.process.wait(20)


def document(seed: int, n: int, vocab: int = 760) -> list[int]:
    """n token ids that the model knows: any will do for what is compared here."""
    r = random.Random(seed)
    return [1] + [r.randrange(260, vocab) for _ in range(n - 1)]


def run(tests: list, *arguments) -> int:
    """Runs functions, prints a line each; the exit status."""
    failed = 0
    for test in tests:
        try:
            test(*arguments)
            print(f"ok   {test.__name__.removeprefix('test_').replace('_', ' ')}", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc(file=sys.stdout)
            print(f"FAIL {test.__name__}", flush=True)
    return 1 if failed else 0
