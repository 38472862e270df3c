# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: vLLM with methods, in place in a pool on a GPU: that of the stand-in driver (vllm_standin.py). All but the
attention is computed by vLLM's CPU backend; kvd's attention for GPUs runs in the emulation. Beside a vLLM whose pool is in host
memory, which vllm_methods.py compares with transformers."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

BUILD = Path(os.environ["KVD"]).resolve().parents[1]
DRIVER = BUILD / "tests/gpu/fakecuda"
if str(DRIVER) not in os.environ.get("LD_LIBRARY_PATH", ""):    # libcuda is found by the path that a process starts with
    if not (DRIVER / "libcuda.so.1").exists():
        print("skip: there is no stand-in driver in this build")
        sys.exit()
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_LIBRARY_PATH": str(DRIVER)})

import torch  # noqa: E402
import vllm_standin  # noqa: E402
from common import Instance, daemon, document, run  # noqa: E402
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.platforms import interface  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402
from vllm_engine import Engine, connector  # noqa: E402
from vllm_methods import END, OPTIONS, close, nothing_is_held, reasoning, switch, wait_for_tables  # noqa: E402
from vllm_server import installed  # noqa: E402

from kvd.engines import _vllm_attention, _vllm_layout  # noqa: E402
from kvd.engines._vllm_attention_gpu import Backend, Builder, GpuAttention, GpuMetadata  # noqa: E402
from kvd.engines._vllm_rows import Rows  # noqa: E402

# The emulation computes some hundred tokens a second.
SHORT, CHUNK = 6, 64
POOL = ("--pool", "256M", "--set", "daemon.segment=4M", "--backend")
FEW = {"hshare_top": 40, "hshare_sinks": 8, "hshare_recent": 16, "hshare_dense_layers": 1}


class World:
    """A vLLM in host memory, and one on the GPU."""

    def __init__(self, ends: ExitStack):
        self.ends, self.folder = ends, ends.enter_context(tempfile.TemporaryDirectory())
        self.environment = installed(self.folder)
        vllm_standin.plugged(self.folder)
        self.host, self.gpu = (ends.enter_context(daemon(*POOL, which)) for which in ("host", "cuda"))
        self.one, self.two = self.engine(self.host), self.engine(self.gpu)
        self.one.do(op="block")
        self.two.do(op="block")

    def engine(self, it: Instance, extra: dict | None = None, **options) -> Engine:
        environment = self.environment if it is self.gpu else {}
        return self.ends.enter_context(Engine("in place", extra={"socket": it.socket, "methods": True} | (extra or {}),
                                              environment=environment, **OPTIONS | {"max_num_batched_tokens": CHUNK} | options))

    def switch(self, space: str | None = None, **settings) -> None:
        for it in self.host, self.gpu:
            switch(it, space, **settings)


def test_answers_are_those_of_host_memory(world: World) -> None:
    """Prompts in pieces beside answers, and what each method leaves."""
    prompts = [document(77, 150), document(78, 80), document(77, 140)]
    for settings in ({}, {"keydiff": "on", "keydiff_budget": 96, "keydiff_slack": 8}, {"kvreviver": "on", "kvreviver_budget": 1},
                     {"hshare": "on", "hshare_top": 65536},
                     {"keydiff": "on", "hshare": "on", "kvreviver": "on", "hshare_top": 65536}):
        world.switch(**settings)
        expected, got = (which.ask(prompts, max_tokens=SHORT) for which in (world.one, world.two))
        close(got, expected, 1e-3)
        assert [it["cached"] for it in got] == [it["cached"] for it in expected], (settings, got, expected)
    nothing_is_held(world.gpu)
    world.gpu.check()


def test_few_tokens_are_selected(world: World) -> None:
    """HShare: once blocks have labels, which are made by and by, answers are those of host memory, and not those of all
    tokens."""
    prompts, patience = [document(79, 150)], time.monotonic() + 600
    world.switch()
    exact = world.one.ask(prompts, max_tokens=SHORT)
    world.switch(hshare="on", **FEW)
    while True:
        expected, got = (which.ask(prompts, max_tokens=SHORT) for which in (world.one, world.two))
        try:
            close(got, expected, 1e-3)
            assert any(abs(a - b) > 1e-3 for a, b in zip(expected[0]["logprobs"], exact[0]["logprobs"]))
            return
        except AssertionError:
            if time.monotonic() > patience:
                raise


def test_what_cannot_be_attended_to_is_computed_again(world: World) -> None:
    """A reader fails at a step's begin. If its blocks are there, the request reads all its tokens."""
    prompts = [document(103, 70), document(104, 90)]
    world.switch()
    expected = world.one.ask(prompts, max_tokens=SHORT)
    world.switch(kvreviver="on", kvreviver_budget=1)
    for gone, words in (False, "reads all its tokens"), (True, "is recomputed"):
        before = world.two.tail(1 << 20).count(words)
        world.two.do(op="fail", calls=1, gone=gone)
        close(world.two.ask(prompts, max_tokens=SHORT), expected, 1e-3)
        assert world.two.tail(1 << 20).count(words) > before
    world.switch(kvreviver_budget=0.25)
    nothing_is_held(world.gpu)
    world.gpu.check()


def test_a_worker_in_another_process_is_killed(world: World) -> None:
    """Its scheduler maps only the index. Both die in the middle of requests, and nothing stays held."""
    prompts = [document(88, 100), document(89, 70)]
    world.switch()
    expected = world.one.ask(prompts, max_tokens=SHORT)
    far = world.engine(world.gpu, distributed_executor_backend="mp")
    far.do(op="block")
    world.switch(kvreviver="on", kvreviver_budget=1)
    close(far.ask(prompts, max_tokens=SHORT), expected, 1e-3)
    far.tell(op="generate", prompts=prompts, max_tokens=1000)
    wait_for_tables(world.gpu, 2)       # the anchor is one
    far.kill()                          # its worker ends with it
    nothing_is_held(world.gpu)
    world.switch(kvreviver_budget=0.25)
    world.gpu.check()


def test_steps_said_again_are_shared(world: World) -> None:
    """MemShare: blocks of the first time, at another place."""
    say, prompt = reasoning(111, 105) * 3, document(110, 40)
    given = {"extra": {"space": "vllm-steps", "step_ends": [END]}, "logits_processors": ["vllm_saying:Saying"]}
    engines = [(it, world.engine(it, **given)) for it in (world.host, world.gpu)]
    for it, engine in engines:
        engine.do(op="block")
    world.switch("vllm-steps", memshare="on")
    expected, got = (engine.ask([prompt], max_tokens=len(say) + SHORT, say=list(say), first=400) for _, engine in engines)
    close(got, expected, 1e-3)
    shared = [sum(each["value"] for each in it.stat("stat", "vllm-steps")["counters"] if each["name"] == "shared")
              for it, _ in engines]
    assert shared[0] == shared[1] >= 2, shared
    world.gpu.check()


# ---- what vLLM asks of a backend -------------------------------------------------------------------------------------


def test_vllm_chooses_the_backend_for_gpus(world: World) -> None:
    """But not in place of another one that is registered."""
    platform = SimpleNamespace(is_cpu=lambda: False)
    from vllm import platforms
    platforms.current_platform, before = platform, platforms.current_platform
    try:
        _vllm_layout.register()
        assert AttentionBackendEnum.CUSTOM.get_class() is Backend
        AttentionBackendEnum.CUSTOM.clear_override()
        register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
        _vllm_layout.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == "another.Backend"
    finally:
        platforms.current_platform = before
        AttentionBackendEnum.CUSTOM.clear_override()
    plain = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16, "use_mla": False,
             "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
             "device_capability": interface.DeviceCapability(9, 0), "attn_type": "decoder", "use_kv_connector": True}
    assert Backend.validate_configuration(**plain) == [] and Backend.get_builder_cls() is Builder
    for name, value in {"head_size": 512, "use_mla": True, "has_sink": True, "has_sliding_window": True,
                        "kv_cache_dtype": "int8_per_token_head"}.items():
        assert len(Backend.validate_configuration(**plain | {name: value})) == 1, name


@contextmanager
def as_configured(**transfer) -> Iterator[None]:
    """vLLM's configuration while it makes its layers; without arguments: of a vLLM without kvd."""
    config = VllmConfig()
    config.kv_transfer_config = KVTransferConfig(**connector("in place", **transfer)) if transfer else None
    with set_current_vllm_config(config):
        yield


def test_what_the_attention_for_gpus_lacks_is_refused(world: World) -> None:
    for given, words in (({"logits_soft_cap": 30.0}, "soft caps"), ({"sinks": torch.zeros(4)}, "sinks"),
                         ({"sliding_window": 64}, "sliding windows"), ({"alibi_slopes": [1.0]}, "ALiBi")):
        with as_configured(methods=True):
            refused(words, lambda given=given: GpuAttention(4, 64, 0.1, 2, **given))
    for transfer in {}, {"methods": False}:         # it would attend to nothing, or to opaque blocks
        with as_configured(**transfer):
            refused("choose another one", lambda: GpuAttention(4, 64, 0.1, 2))


def refused(words: str, call) -> None:
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
        return
    raise AssertionError(f"not refused: {words}")


def test_steps_that_vllm_invents_write_nowhere(world: World) -> None:
    """Before vLLM has the pool, and while its connector is disabled (ActiveKVConnector): graphs are profiled, and kernels
    compiled."""
    with as_configured(methods=True):
        attention = GpuAttention(4, 64, 0.1, 2)
    cache, layer = torch.zeros(3, 2, 32, 128), SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
    states, out = torch.ones(5, 2, 64), torch.full((5, 4 * 64), torch.nan)
    metadata = GpuMetadata(5, torch.tensor([0, 5]), torch.tensor([5]), torch.zeros(1, 1, dtype=torch.int32),
                           torch.arange(5))
    attention.do_kv_cache_update(layer, states, states, cache, metadata.slot_mapping)
    for it in metadata, None:
        out.fill_(torch.nan)
        attention.forward(layer, torch.ones(5, 4, 64), states, states, cache, it, out)
        assert not cache.any() and not out.any()


def test_padding_is_stored_nowhere(world: World) -> None:
    """vLLM's tensors may be longer than a step, for graphs of fixed sizes. Keys are stored with 16 bits, and 8."""
    rows = SimpleNamespace(placed=Rows.placed, places={}, stored=None, running=False,
                           space=SimpleNamespace(geometry=SimpleNamespace(block_tokens=32)))
    group = SimpleNamespace(memory=SimpleNamespace(base=0), rows=SimpleNamespace(placed=lambda slots: Rows.placed(rows, slots)))
    layer = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=4.0)
    for dtype, number in ("auto", torch.bfloat16), ("fp8", torch.float8_e4m3fn):
        with as_configured(methods=True):
            attention = GpuAttention(4, 64, 0.1, 2, kv_cache_dtype=dtype)
        cache = torch.zeros(3, 2, 32, 128, dtype=torch.bfloat16 if dtype == "auto" else torch.uint8)
        keys, values = torch.randn(2, 6, 2, 64, dtype=torch.bfloat16)
        with patch.object(_vllm_attention, "get_kv_transfer_group", lambda: group), \
                patch.object(_vllm_attention, "has_kv_transfer_group", lambda: True):
            attention.do_kv_cache_update(layer, keys, values, cache, torch.tensor([33, 70, -1, 64, -1, -1, -1]))
        planes = cache.view(3, 2, 2, 32, 64).view(number).to(torch.float32)
        for block, slot, token in (1, 1, 0), (2, 6, 1), (2, 0, 3):
            for plane, states, scale in (0, keys, 0.5), (1, values, 4.0):
                stored = states[token].to(torch.float32) / (scale if dtype == "fp8" else 1)
                assert (planes[block, plane, :, slot] == stored.to(number).to(torch.float32)).all(), (dtype, block, slot)
                planes[block, plane, :, slot] = 0
        assert not planes.any(), dtype


def main() -> int:
    with ExitStack() as ends:
        world = World(ends)
        status = run([it for name, it in globals().items() if name.startswith("test_")
                      and (len(sys.argv) < 2 or name in sys.argv[1:])], world)
        if status:
            print(world.two.tail(6000))
        return status


if __name__ == "__main__":
    sys.exit(main())
