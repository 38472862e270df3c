# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server as users start it, on loopback: API server and engine core, each in its own process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from common import pasted_server
from vllm_engine import QUIET, connector

PACKAGE = Path(__file__).resolve().parents[2] / "client/python"


def installed(folder: str) -> dict:
    """An environment in which kvd's entry points are installed, without its wheel."""
    sys.path.insert(0, str(PACKAGE))
    from wheel_of_kvd import prepare_metadata_for_build_wheel
    prepare_metadata_for_build_wheel(folder)
    return {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


class Server:
    """Starts at once. ready() waits until it answers."""

    def __init__(self, kv: str | None = None, *, environment: dict, python: Path | str = sys.executable,
                 options: tuple[str, ...] = (), **extra):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = tempfile.TemporaryFile("w+")
        command = pasted_server(str(python), os.environ["KVD_MODEL"], port,
                                json.dumps(connector(kv, **extra)) if kv else None)
        command += ["--served-model-name", "kvlm", "--host", "127.0.0.1", "--dtype", "float32", "--block-size", "32",
                    "--max-model-len", "4096", "--enforce-eager", "--enable-prompt-tokens-details",
                    "--disable-uvicorn-access-log", *options]
        quiet = {name: value for name, value in QUIET.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
                                        env=os.environ | quiet | environment)

    def ready(self, seconds: float = 600) -> Server:
        end = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=60).close()
                return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server does not start:\n{self.tail()}") from None
                time.sleep(0.2)

    def complete(self, prompt: str | list[int], max_tokens: int = 16, rank: int = 0, **options) -> dict:
        """Returns text, tokens, the number of cached tokens, and the seconds until the whole answer was there. rank: the
        engine that is to answer, with data parallelism."""
        body = {"model": "kvlm", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, **options}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)})
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as response:
            answer = json.load(response)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return {"text": answer["choices"][0]["text"], "tokens": answer["choices"][0]["token_ids"],
                "cached": details.get("cached_tokens") or 0, "seconds": time.perf_counter() - start,
                "prompt_tokens": answer["usage"]["prompt_tokens"]}

    def tail(self, n: int = 6000) -> str:
        self.log.seek(0)
        return self.log.read()[-n:]

    def kill(self) -> None:
        """Kills all of its processes, as the out-of-memory killer would."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        self.log.close()
