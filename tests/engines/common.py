# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of engines: a daemon, README's server command, documents, and a test runner."""

from __future__ import annotations

import os
import random
import re
import shlex
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/lib"))

from instance import Instance   # noqa: E402  (needs the path above)

MODEL = os.environ.get("KVD_MODEL", str(ROOT / "tools/kvlm/model"))


@contextmanager
def daemon(*options: str):
    with Instance(*(options or ("--pool", "256M"))) as it:
        yield it


def pasted_server(python: str, model: str, port: int, config: str | None) -> list[str]:
    """README's command that starts vLLM, as a shell would split it. Without config: vLLM without kvd."""
    (line, *_) = re.findall(r"^python3 .*--kv-transfer-config \"\$config\" &$", (ROOT / "README.md").read_text(), re.M)
    names = {"python3": python, "MODEL": model, "8001": str(port), "$config": config}
    command = [names.get(word, word) for word in shlex.split(line.removesuffix(" &"))]
    return command if config else command[:-2]


def document(seed: int, n: int, vocab: int = 760) -> list[int]:
    """n token ids that the model knows. Any will do for these comparisons."""
    r = random.Random(seed)
    return [1] + [r.randrange(260, vocab) for _ in range(n - 1)]


def shortened(text: str) -> str:
    """Its start and its end, where a traceback has the reason."""
    return text if len(text) < 800 else f"{text[:200]} ... {text[-600:]}"


def run(tests: list, *arguments) -> int:
    """Runs the test functions, and prints a line for each. Returns the exit status."""
    failed = 0
    for test in tests:
        try:
            test(*arguments)
            print(f"ok   {test.__name__.removeprefix('test_').replace('_', ' ')}", flush=True)
        except Exception as error:
            failed += 1
            traceback.print_exc(file=sys.stdout)
            (*_, where), why = traceback.extract_tb(error.__traceback__), " ".join(str(error).split())
            print(f"FAIL {test.__name__}: {where.line}: {type(error).__name__} {shortened(why)}", flush=True)
    return 1 if failed else 0
