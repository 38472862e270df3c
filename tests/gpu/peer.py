#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""
Measures in PyTorch what gpu-bench measures, on the same device at the same sizes: KeyDiff's scores, and
scaled_dot_product_attention over contiguous keys and values. Prints JSON lines. tests/gpu/run computes the ratios.
"""
import json
import statistics
import sys

TURNS = 3  # sets of inputs, used in turn


def say(question, answer, ok=None, **numbers):
    print(json.dumps({'check': 'peer', 'question': question, 'answer': answer, 'ok': ok, 'numbers': numbers}), flush=True)


def timed(torch, function, inputs):
    for given in inputs:
        function(*given)
    torch.cuda.synchronize()
    times = []
    for turn in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(6):
            function(*inputs[(turn + i) % len(inputs)])
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / 6)
    return statistics.median(times)


def keydiff(torch):
    """KeyDiff's scores as a PyTorch program computes them: minus the cosine to the mean of the normalised keys."""
    def scores(keys):
        directions = torch.nn.functional.normalize(keys.float(), dim=-1)
        return -torch.nn.functional.cosine_similarity(keys.float(), directions.mean(dim=1, keepdim=True), dim=-1)

    inputs = [(torch.randn(8, 128 * 1024, 128, dtype=torch.bfloat16, device='cuda'),) for _ in range(TURNS)]
    us = timed(torch, scores, inputs)
    say('KeyDiff by PyTorch, 128 k tokens, 8 heads of 128, bf16', f'{us:.1f} us', us=us)
    half = [(k.clone(),) for k, in inputs]
    us = timed(torch, lambda k: -torch.nn.functional.cosine_similarity(
        k, torch.nn.functional.normalize(k, dim=-1).mean(dim=1, keepdim=True), dim=-1), half)
    say('KeyDiff by PyTorch, all in bf16', f'{us:.1f} us', us=us)


def attention(torch, sequences, tokens, heads, kv_heads):
    attend = torch.nn.functional.scaled_dot_product_attention
    inputs = []
    for _ in range(TURNS):
        q = torch.randn(sequences, heads, 1, 128, dtype=torch.bfloat16, device='cuda')
        kv = [torch.randn(sequences, kv_heads, tokens, 128, dtype=torch.bfloat16, device='cuda') for _ in range(2)]
        inputs.append((q, *kv))
    us = timed(torch, lambda q, k, v: attend(q, k, v, enable_gqa=heads != kv_heads), inputs)
    bytes_ = 2 * sequences * kv_heads * tokens * 128 * 2
    say(f'scaled_dot_product_attention, {sequences} sequences x {tokens} tokens, {heads}/{kv_heads} heads of 128, bf16',
        f'{us:.1f} us, {bytes_ / us / 1e3:.0f} GB/s', us=us, bytes=bytes_)


def main():
    try:
        import torch
    except ImportError:
        say('PyTorch beside it', 'not run: no torch here')
        return 0
    if not torch.cuda.is_available():
        say('PyTorch beside it', f'not run: torch {torch.__version__} sees no device')
        return 0
    for case in (lambda: keydiff(torch), lambda: attention(torch, 64, 8192, 32, 8), lambda: attention(torch, 1, 32768, 32, 8)):
        try:
            case()
            torch.cuda.empty_cache()
        except RuntimeError as why:
            say('PyTorch beside it', f'not run: {str(why).splitlines()[0]}')
    return 0


sys.exit(main())
