# SPDX-License-Identifier: Apache-2.0
"""A vLLM in its own process, for tests, benchmarks and the demo. Requests and answers are lines of JSON.

    with Engine(kv="in place", socket=daemon.socket) as engine:
        answers = engine.ask([tokens, ...], max_tokens=8)       # each: tokens, logprobs, cached, seconds
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CONNECTORS = {"in place": ("KvdConnector", "kvd.engines.vllm"), "copy": ("KvdCopyConnector", "kvd.engines.vllm_copy")}
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
         "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO",
         "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
DEFAULTS = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 4096,
            "block_size": 32, "num_gpu_blocks_override": 1000, "disable_log_stats": True}


def connector(kv: str | None, **extra) -> dict | None:
    """vLLM's kv_transfer_config."""
    if kv is None:
        return None
    name, module = CONNECTORS[kv]
    return {"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both",
            "kv_connector_extra_config": extra}


class Engine:
    """The parent's end. Starting takes 10 s of processor time, most of it for imports, so start all engines before asking
    one. timeout limits each answer; for the first answer it includes the start."""

    def __init__(self, kv: str | None = None, *, timeout: float = 600, extra: dict | None = None,
                 python: Path | str = sys.executable, environment: dict | None = None, **options):
        options = self._options(kv, extra, options)
        self.socket = (extra or {}).get("socket")
        self.log = tempfile.TemporaryFile("w+")
        self.timeout = timeout
        self.process = subprocess.Popen([python, __file__, json.dumps(options)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log, text=True,
                                        env=os.environ | QUIET | (environment or {}))
        self.ready = False

    def _options(self, kv: str | None, extra: dict | None, options: dict) -> dict:
        return {"model": os.environ["KVD_MODEL"], **DEFAULTS, **options,
                "kv_transfer_config": connector(kv, **(extra or {}))}

    def reopen(self, kv: str | None = None, *, extra: dict | None = None, **options) -> None:
        """Replaces the vLLM by another in the same process, which spares the imports. Does not wait for it."""
        self.socket = (extra or {}).get("socket")
        self.tell(op="open", **self._options(kv, extra, options))

    def tell(self, **command) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self):
        """Returns the answer to the oldest unanswered command. Kills an engine that takes too long."""
        watchdog = threading.Timer(self.timeout, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise RuntimeError(f"the engine died ({self.process.wait()}):\n{self.tail()}")
        answer = json.loads(line)
        if not self.ready:
            self.ready = True
            return self.hear()
        return answer

    def do(self, **command):
        self.tell(**command)
        return self.hear()

    def ask(self, prompts: list[list[int]], max_tokens: int = 8, **options) -> list[dict]:
        """Also waits until the daemon has taken what was published, which it may do a little later on a busy machine."""
        answers = self.do(op="generate", prompts=prompts, max_tokens=max_tokens, **options)
        if self.socket:                 # it answers messages in their order
            subprocess.run([os.environ["KVCTL"], "--socket", self.socket, "health"], capture_output=True)
        return answers

    def tail(self, n: int = 4000) -> str:
        self.log.seek(0)
        return self.log.read()[-n:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self.log.close()


# ---- the child's end -------------------------------------------------------------------------------------------------


class Child:
    llm = needs_zeroing = None

    def __init__(self, options: dict):
        self.asked = 0
        self.open(**options)

    def open(self, zeroing: bool = False, **options) -> bool:
        """Closes the vLLM, and makes another. zeroing: vLLM zeroes blocks before use, as for caches of mixed precision."""
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.v1.kv_cache_interface import KVCacheConfig

        from kvd.engines import _reduction
        _reduction.PATIENCE_S = 600      # the daemon's worker has what others leave of the processor
        self.close()
        needs = self.needs_zeroing = self.needs_zeroing or KVCacheConfig.needs_kv_cache_zeroing.fget
        KVCacheConfig.needs_kv_cache_zeroing = property(lambda caches: zeroing or needs(caches))
        kv = options.pop("kv_transfer_config")
        if "kv_events_config" in options:
            options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
        self.llm = LLM(**options, kv_transfer_config=KVTransferConfig(**kv) if kv else None)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        return True

    def close(self) -> None:
        from vllm.platforms import current_platform
        if self.llm is not None:
            # Done, and not a second time: its search for kernels in all modules fails at some that are loaded by now.
            current_platform.register_triton_kernel_overrides = lambda: None
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = self.scheduler = None
            gc.collect()

    def _params(self, max_tokens: int, seed: int | None = None, logprobs: int = 1, say: list[int] | None = None):
        from vllm import SamplingParams
        return SamplingParams(temperature=0 if seed is None else 1, seed=seed, max_tokens=max_tokens, detokenize=False,
                              logprobs=logprobs, ignore_eos=True, extra_args={"say": say} if say else None)

    def _prompts(self, prompts: list[list[int]], salt: str | None) -> list:
        from vllm import TokensPrompt
        return [TokensPrompt(prompt_token_ids=it, **({"cache_salt": salt} if salt else {})) for it in prompts]

    def generate(self, prompts: list[list[int]], max_tokens: int, salt: str | None = None, say: list[int] | None = None,
                 first: int = 4) -> list[dict]:
        """say: what the answers begin with, of an engine with vllm_saying. first: the number of logprobs."""
        start = time.perf_counter()
        outputs = self.llm.generate(self._prompts(prompts, salt), self._params(max_tokens, say=say), use_tqdm=False)
        seconds = time.perf_counter() - start
        return [{"tokens": list(it.outputs[0].token_ids), "cached": it.num_cached_tokens, "seconds": seconds,
                 "logprobs": [round(next(iter(p.values())).logprob, 5) for p in it.outputs[0].logprobs[:first]]}
                for it in outputs]

    def gap(self, prompts: list[list[int]], max_tokens: int) -> float:
        """The least difference of log-probability between a token of the answers and the next likely one."""
        least = float("inf")
        for it in self.llm.generate(self._prompts(prompts, None), self._params(max_tokens, logprobs=2), use_tqdm=False):
            for step in it.outputs[0].logprobs:
                first, second, *_ = sorted((p.logprob for p in step.values()), reverse=True)
                least = min(least, first - second)
        return least

    def abort(self, prompts: list[list[int]], max_tokens: int, steps: int) -> bool:
        """Starts requests, and aborts them after `steps` steps."""
        engine, names = self.llm.llm_engine, []
        for prompt in self._prompts(prompts, None):
            names.append(engine.add_request(f"abort-{self.asked}", prompt, self._params(max_tokens)))
            self.asked += 1
        for _ in range(steps):
            engine.step()
        engine.abort_request(names, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        return True

    def reset(self, running: bool = False) -> bool:
        return self.llm.reset_prefix_cache(running)

    def sleep(self, level: int) -> bool:
        self.llm.sleep(level)
        return True

    def wake(self) -> bool:
        self.llm.wake_up()
        return True

    def block(self) -> int:
        """Tokens per block, which vLLM chooses for hybrid models."""
        return self.llm.llm_engine.vllm_config.cache_config.block_size

    def mapped(self) -> int:
        """The number of blocks that this process has mapped."""
        return self.scheduler.connector.space.memory().mapped

    def content(self, tokens: list[int]) -> str:
        """A digest of the blocks that the pool has for a prompt."""
        space = self.scheduler.connector.space
        with space.lookup(tokens) as pin:
            out = bytearray(len(pin) * space.block_bytes)
            space.read(pin, out)
        return f"{len(pin)} blocks, {hashlib.sha256(out).hexdigest()}"

    def numbers(self) -> dict:
        """The connector's counters, and what it holds of the pool."""
        ledger = self.scheduler.connector.ledger
        return vars(ledger.numbers) | {"used": ledger.used, "ours": len(ledger.ours), "free": len(ledger.free),
                                       "chains": len(ledger.chains), "state": ledger.state}

    def fail(self, calls: int, gone: bool) -> bool:
        """Has a request's reader fail once, after so many calls of attention, as if blocks were gone or not."""
        from kvd import NoData
        from kvd.engines import _vllm_rows as rows
        after, missing, left = rows.Row.after, rows.missing, [calls]

        def once(sequence):
            rows.missing = missing
            return [0] if gone else []

        def failing(row):
            left[0] -= 1
            if left[0] > 0 or not row.reader:
                return after(row)
            rows.Row.after, rows.missing = after, once
            raise NoData(0, "as a test wants it")

        rows.Row.after = failing
        return True

    def count_blocks(self) -> bool:
        """From now on, notes what the worker says that a request has; see counted()."""
        ledger, self.count = self.scheduler.connector.ledger, {"over": 0}
        methods, take = ledger.methods, type(ledger.methods).take

        def noting(done):
            take(methods, done)
            for chain in ledger.chains.values():
                has = chain.kept.held + len(chain.tables[0]) - chain.kept.moved
                over = max(self.count["over"], has - (methods.most_blocks(chain) or has))
                self.count = {"held": chain.kept.held, "moved": chain.kept.moved, "over": over}

        methods.take = noting
        return True

    def counted(self) -> dict:
        """What was noted last; over: how many blocks more than Methods.most_blocks() any request ever had."""
        return self.count

    def kill_when_gone(self, pid: int) -> bool:
        """Kills a process as soon as blocks of a request have left the pool, in the middle of a step."""
        from kvd.engines import _vllm_rows as rows
        after = rows.Row.after

        def killing(row):
            if row.decodes and rows.missing(row.sequence):
                rows.Row.after = after
                os.kill(pid, signal.SIGKILL)
            return after(row)

        rows.Row.after = killing
        return True

    def scale(self, key: float, value: float) -> bool:
        """Sets the scales of an fp8 cache, as if they were among the weights. Before the first request."""
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        for layer in runner.model.modules():
            if hasattr(layer, "_k_scale_float"):
                layer._k_scale_float, layer._v_scale_float = key, value
                layer._k_scale.fill_(key)
                layer._v_scale.fill_(value)
        return True

    def watch(self) -> bool:
        """From now on, counts the scheduler's calls and the requests that run at once, and measures its thread's processor
        time; see seen()."""
        self.counts = {"schedule": 0, "update_from_output": 0, "_preempt_request": 0}
        self.seconds, self.most = dict.fromkeys(self.counts, 0.0), 0

        def watched(name: str, call):
            def wrapped(*arguments, **options):
                start = time.thread_time()
                try:
                    return call(*arguments, **options)
                finally:
                    self.seconds[name] += time.thread_time() - start
                    self.counts[name] += 1
                    self.most = max(self.most, len(self.scheduler.running))
            return wrapped

        for name in self.counts:
            setattr(self.scheduler, name, watched(name, getattr(self.scheduler, name)))
        return True

    def seen(self) -> dict:
        return {"steps": self.counts["schedule"], "preemptions": self.counts["_preempt_request"], "most": self.most,
                "seconds": self.seconds["schedule"] + self.seconds["update_from_output"]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                       # vLLM writes to standard output, too
    child = Child(json.loads(sys.argv[1]))

    def say(answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        say(getattr(child, command.pop("op"))(**command))
    child.close()


if __name__ == "__main__":
    main()
