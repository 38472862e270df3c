# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: A has sealed blocks; B starts, and vLLM's own warm-up code runs in it. A's bytes do not change.

    vllm_warmup.py SOCKET       the socket of a daemon

vLLM for CPUs has model runner V1, which invents no steps that write, and no CUDA graphs; it is started for real in
test_families_in_place. This plays model runner V2 at the contract: its warm-up, its block tables and its switch for the
connector are vLLM's; the model, which writes one byte at each slot, and the two Triton kernels that move block ids are
stand-ins.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import block_table, buffer_utils, warmup
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

import kvd
from kvd.engines import _vllm_warmup as guarded

BLOCKS, SIZE, REQUESTS, LENGTH = 64, 16, 8, 256
UNGUARDED = {"append_block_ids": guarded._append, "compute_slot_mappings": guarded._slots}


class Kernel:
    """Stands in for a Triton kernel: kernel[grid](arguments)."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return self.run


def write_tables(table, stride, rows, starts, contents, ends, *_, **__) -> None:
    """As _apply_write_kernel: copies staged block ids to rows of a table."""
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        table[row, start:start + end - begin] = contents[begin:end]
        begin = end


class Runner:
    """The parts of model runner V2 that its warm-up uses. Its model writes a byte at each slot of the pool."""

    is_pooling_model = is_encoder_decoder = False
    is_last_pp_rank, adaptive_verification, rejection_sampler, kv_block_zeroer = True, None, None, None
    num_speculative_steps, decode_query_len, speculative_config = 0, 1, None

    def __init__(self, pool: torch.Tensor):
        self.pool, self.rows, self.computed, self.written = pool, {}, {}, 0
        self.vllm_config = SimpleNamespace(is_mm_encoder_only=False, num_lookahead_tokens=0)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1024)
        self.scheduler_config = SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=LENGTH)
        self.model_state, self.max_model_len, self.max_num_reqs = SimpleNamespace(), LENGTH, REQUESTS
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
        self.kv_cache_config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[],
                                             kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.block_tables = block_table.BlockTables([SIZE], REQUESTS, LENGTH, [LENGTH // SIZE], torch.device("cpu"))
        self.kv_connector = ActiveKVConnector.__new__(ActiveKVConnector)
        self.kv_connector.kv_connector = object()
        self.kv_connector.set_disabled(False)

    def execute_model(self, step: SchedulerOutput) -> None:
        for name in step.finished_req_ids:
            self.rows.pop(name)
        for new in step.scheduled_new_reqs:
            row = self.rows[new.req_id] = min(set(range(REQUESTS)) - set(self.rows.values()))
            self.computed[new.req_id] = 0
            self.block_tables.append_block_ids(row, new.block_ids, overwrite=True)
        old = step.scheduled_cached_reqs
        for name, n, ids in zip(old.req_ids, old.num_computed_tokens, old.new_block_ids):
            self.computed[name] = n
            if ids is not None:
                self.block_tables.append_block_ids(self.rows[name], ids, overwrite=False)
        self.block_tables.apply_staged_writes()
        if step.num_scheduled_tokens:
            self.forward(step.num_scheduled_tokens)

    def forward(self, scheduled: dict[str, int]) -> None:
        places = [(self.rows[name], self.computed[name] + i) for name, n in scheduled.items() for i in range(n)]

        def slots_of(*_, **__) -> None:
            """As _compute_slot_mappings_kernel."""
            table = self.block_tables.block_tables[0].gpu
            for i, (row, position) in enumerate(places):
                self.block_tables.slot_mappings[0, i] = table[row, position // SIZE] * SIZE + position % SIZE

        block_table._compute_slot_mappings_kernel = Kernel(slots_of)
        slots = self.block_tables.compute_slot_mappings(torch.arange(len(scheduled)), torch.zeros(0), torch.zeros(0),
                                                        len(places))
        for slot in slots[0].tolist():
            if slot != guarded.PAD_SLOT_ID:
                self.pool[slot // SIZE, slot % SIZE] = -1
                self.written += 1

    def sample_tokens(self, _grammar) -> None:
        pass


def seal(client: kvd.Space) -> kvd.Pin:
    blocks = client.alloc(BLOCKS)
    for block in blocks:
        client.write([block], bytes([block.id % 251]) * client.block_bytes)
    pin = kvd.Pin(client)
    pin.seal(blocks, list(range(BLOCKS * SIZE)))
    return pin


def start(space: kvd.Space) -> Runner:
    """What worker B does at its start, with the warm-up of all attention backends and the one of FlashInfer."""
    runner = Runner(torch.from_dlpack(space.memory()))
    warmup.warmup_kernels(runner, runner.execute_model, runner.sample_tokens)
    assert warmup.run_mixed_prefill_decode_warmup(runner, runner.execute_model, runner.sample_tokens, SIZE)
    return runner


def real_step(runner: Runner) -> None:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [SimpleNamespace(req_id="real", block_ids=([BLOCKS + 5],))]
    step.num_scheduled_tokens = {"real": SIZE}
    runner.execute_model(step)


def content(space: kvd.Space, pin: kvd.Pin) -> bytes:
    out = bytearray(len(pin) * space.block_bytes)
    space.read(pin, out)
    return bytes(out)


def main() -> None:
    buffer_utils._apply_write_kernel, buffer_utils.is_uva_available = Kernel(write_tables), lambda: False
    torch.accelerator.synchronize = lambda: None
    geometry = kvd.Geometry.opaque(SIZE * 256, "warm-up", block_tokens=SIZE)
    with kvd.connect(sys.argv[1]) as one, one.space("warm-up", geometry) as a:
        with kvd.connect(sys.argv[1]) as two, two.space("warm-up", geometry) as b:
            pin = seal(a)
            before = content(a, pin)
            guarded.guard()
            runner = start(b)
            assert runner.written == 0 and content(a, pin) == before
            real_step(runner)       # the guard is only for invented steps
            assert runner.written == SIZE and (runner.pool[BLOCKS + 5, :SIZE] == -1).all() and content(a, pin) == before
            for name, call in UNGUARDED.items():
                setattr(block_table.BlockTables, name, call)
            assert start(b).written and content(a, pin) != before, "vLLM's warm-up writes no block: kvd needs no guard"
            pin.release()


if __name__ == "__main__":
    main()
